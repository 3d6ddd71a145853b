"""The file with clients' keys: what it may say, what is kept of it, and the sentence for every mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from proxy.settings import SettingsError, load_client_keys

SECRET = "sk-canary-0123456789"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()

NOT_A_LIST = " must hold a list of keys under `keys:` and nothing else"
BAD_NAME = ": entry 1: name must be 1 to 64 letters, digits, `.`, `_` or `-`, and not only a `-`"
BAD_KEY = ": entry 1: key must be printable ASCII without spaces, as it is sent in an HTTP header"
NO_TEXT = ": entry 1: key must be text: put it in quotes"
ONE_OF_TWO = ": entry 1 must have either a key or its key_sha256"
ODD = ": this is not valid YAML"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def mistake(file: Path) -> str:
    """Return the sentence about a mistake, without the path at its beginning."""
    with pytest.raises(SettingsError) as error:
        load_client_keys(file)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert "canary" not in sentence
    assert sentence.startswith(str(file))
    return sentence.removeprefix(str(file))


def test_key_has_a_name_and_limits_if_it_says_so(file: Path) -> None:
    file.write_text(f"""
        keys:
          - name: team-a
            key: {SECRET}
            max_concurrent: 16
            requests_per_minute: 600
            tokens_per_minute: 200000
          - {{name: Team_B.2, key_sha256: {"AB" * 32}, max_concurrent: null, priority: -2}}
    """)
    first, second = load_client_keys(file)
    assert first.model_dump() == {
        "name": "team-a",
        "key_sha256": DIGEST,
        "max_concurrent": 16,
        "requests_per_minute": 600,
        "tokens_per_minute": 200000,
        "priority": 0,
        "gather_tokens": True,
    }
    assert second.model_dump() == {
        "name": "Team_B.2",
        "key_sha256": "ab" * 32,
        "max_concurrent": None,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "priority": -2,
        "gather_tokens": True,
    }
    with pytest.raises(ValidationError):
        first.max_concurrent = None


def test_only_a_digest_of_a_key_is_kept_and_not_shown_either(file: Path) -> None:
    file.write_text(f"keys: [{{name: a, key: {SECRET}}}]")
    (key,) = load_client_keys(file)
    assert key.key_sha256 == DIGEST
    assert SECRET not in key.model_dump_json()
    assert DIGEST not in repr(key)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", NOT_A_LIST),
        (f"- {SECRET}", NOT_A_LIST),
        (f"keys: {{a: {SECRET}}}", NOT_A_LIST),
        ("keys:", NOT_A_LIST),
        ("keys: []\nmore: 1", NOT_A_LIST),
        # An empty list is not "no keys needed".
        ("keys: []", " holds no key; to let every client in, leave auth.client_keys_file out"),
        (f"keys: [{SECRET}]", ": entry 1 must have a name and a key, like `- {name: team-a, key: sk-…}`"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{key: sk-b}}]", ": entry 2: name: Field required"),
        ("keys: [{name: a}]", ONE_OF_TWO),
        (f"keys: [{{name: a, key: {SECRET}, key_sha256: x}}]", ONE_OF_TWO),
        (f"keys: [{{name: {SECRET}!, key: sk-a}}]", BAD_NAME),
        (f"keys: [{{name: {'n' * 65}, key: sk-a}}]", BAD_NAME),
        ('keys: [{name: "a\\n", key: sk-a}]', BAD_NAME),
        ("keys: [{name: '-', key: sk-a}]", BAD_NAME),
        ("keys: [{name: 1, key: sk-a}]", ": entry 1: name must be a valid string"),
        ("keys: [{name: a, key: 12345}]", NO_TEXT),
        ("keys: [{name: a, key: null}]", NO_TEXT),
        *((f"keys: [{{name: a, key: '{key}'}}]", BAD_KEY) for key in ("", f"{SECRET} ", f"{SECRET} x", f"{SECRET}ß")),
        (f"keys: [{{name: a, key_sha256: {SECRET}}}]", ": entry 1: key_sha256 must be 64 hexadecimal digits"),
        ("keys: [{name: a, key_sha256: 12}]", ": entry 1: key_sha256 must be a valid string"),
        (
            "keys: [{name: a, key: sk-a, max_concurrent: 0}]",
            ": entry 1: max_concurrent must be greater than or equal to 1",
        ),
        (
            f"keys: [{{name: a, key: sk-a, requests_per_minute: {SECRET}}}]",
            ": entry 1: requests_per_minute must be a valid integer",
        ),
        ("keys: [{name: a, key: sk-a, requests_per_minute: yes}]", ": entry 1: requests_per_minute must be a number"),
        (
            "keys: [{name: a, key: sk-a, max_concurent: 2}]",
            ": entry 1 has an unknown member max_concurent (did you mean max_concurrent?)",
        ),
        ("keys: [{name: a, key: sk-a, rpm: 60}]", ": entry 1 has an unknown member rpm"),
        (f"keys: [{{name: a, key: sk-a, {SECRET}: 2}}]", ": entry 1 has an unknown member"),
        ("keys: [{name: a, key: sk-a, 0canary0: 2}]", ": entry 1 has an unknown member"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: a, key: b}}]", ": entry 2 has the same name as entry 1"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: b, key: {SECRET}}}]", ": entry 2 has the same key as entry 1"),
        (
            f"keys: [{{name: a, key: {SECRET}}}, {{name: c, key: c}}, {{name: b, key_sha256: {DIGEST.upper()}}}]",
            ": entry 3 has the same key as entry 1",
        ),
        (f"keys:\n- {{name: a,\n   {SECRET}: 1, {SECRET}: 2}}", ", line 3: a member is given twice"),
        (f"keys:\n- {{name: a, key: !{SECRET} x}}", f", line 2{ODD}"),
        (f"keys:\n- {{name: a, key: *{SECRET}}}", f", line 2{ODD}"),
        (f"keys: [{{name: a, key: {SECRET}", ", line 1: expected ',' or '}', but got '<stream end>'"),
        (f"keys: !{SECRET}!a x", ", line 1: found undefined tag handle"),
        (f"%TAG !{SECRET}! x\n%TAG !{SECRET}! x\n---\nkeys:", ", line 2: duplicate tag handle"),
        ("\0", " is not valid YAML"),
    ],
)
def test_mistake_in_the_keys_file_is_one_sentence_with_its_position(file: Path, text: str, sentence: str) -> None:
    file.write_text(text)
    assert mistake(file) == sentence


def test_file_that_cannot_be_read_is_a_mistake(file: Path) -> None:
    assert mistake(file) == " cannot be read: no such file or directory"
    file.write_bytes(b"keys: \xff")
    assert mistake(file) == " is not UTF-8 text"
