"""Keys and limits of clients, from the YAML file `auth.client_keys_file`.

    keys:
      - name: team-a
        key: sk-0123456789abcdef     # or key_sha256: its SHA-256, so that the file has no secret
        max_concurrent: 16           # requests at a time; null or missing: no limit
        requests_per_minute: 600     # null or missing: no limit
        tokens_per_minute: 200000    # of prompts and answers; null or missing: no limit
        priority: 0                  # lower values leave the queue first
      gather_tokens: true          # false: tokens of its streams never wait, see stream.gather_seconds

Errors are one sentence with the place of the mistake and without the key. Only the digest of a key is kept.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field, ValidationError

from proxy.settings.kinds import Positive, Section
from proxy.settings.mistakes import SettingsError, explain_mistakes, suggest_known_word
from proxy.settings.yaml_file import read_yaml


def _make_pattern_check(pattern: str, expectation: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {expectation}")
        return text

    return check


# `-` means no key.
_KeyName = Annotated[
    str,
    AfterValidator(
        _make_pattern_check(
            r"(?!-$)[A-Za-z0-9._-]{1,64}", "1 to 64 letters, digits, `.`, `_` or `-`, and not only a `-`"
        )
    ),
]
_Digest = Annotated[str, AfterValidator(_make_pattern_check(r"[0-9a-f]{64}", "64 hexadecimal digits"))]


class ClientKey(Section):
    """The digest and the limits of one client's key."""

    name: _KeyName
    """Name of the client in the log."""
    key_sha256: _Digest = Field(repr=False)
    """SHA-256 of the key, in lower-case hexadecimal digits."""
    max_concurrent: Positive | None = None
    """Maximum number of requests in flight, over all workers; null: no limit."""
    requests_per_minute: Positive | None = None
    """Maximum number of requests in any minute, over all workers; null: no limit."""
    tokens_per_minute: Positive | None = None
    """Maximum number of tokens of prompts and answers in any minute, over all workers; null: no limit.

    A request reserves its estimated prompt and its limit on the answer, and settles with its usage at its end.
    """
    priority: int = 0
    """Priority in the queue: lower values first.

    A request may ask for a later place than its key, but not for an earlier one.
    """
    gather_tokens: bool = True
    """Whether tokens of its streams may wait for further ones under load, see `stream.gather_seconds`."""


_KEY_MEMBERS: Final = ("key", *ClientKey.model_fields)
# The value of any member may be a key that was written in the wrong place.
_SECRET_MEMBERS: Final = tuple(ClientKey.model_fields)


def load_client_keys(path: str | Path) -> tuple[ClientKey, ...]:
    """Read the client keys of a file, at least one. Raises SettingsError.

    An empty file is an error, because without any key every client would be accepted.
    """
    tree = read_yaml(path)
    entries = tree.get("keys") if isinstance(tree, dict) and set(tree) == {"keys"} else None
    if not isinstance(entries, list):
        raise SettingsError(f"{path} must hold a list of keys under `keys:` and nothing else")
    if not entries:
        raise SettingsError(f"{path} holds no key; to let every client in, leave auth.client_keys_file out")
    keys = tuple(_parse_key(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, 1))
    _require_unique_keys(keys, path)
    return keys


def _parse_key(entry: object, place: str) -> ClientKey:
    """Return one entry of the key file with the digest in place of its `key`."""
    if not isinstance(entry, dict):
        raise SettingsError(f"{place} must have a name and a key, like `- {{name: team-a, key: sk-…}}`")
    for member in entry:
        if member not in _KEY_MEMBERS:
            # A text with digits or dashes may be a key that was written in the wrong place.
            name = f" {member}" if re.fullmatch(r"[A-Za-z_]{1,32}", str(member)) else ""
            raise SettingsError(f"{place} has an unknown member{name}{suggest_known_word(str(member), _KEY_MEMBERS)}")
    if ("key" in entry) == ("key_sha256" in entry):
        raise SettingsError(f"{place} must have either a key or its key_sha256")
    try:
        return ClientKey.model_validate(_hash_plain_key(entry, place))
    except ValidationError as error:
        raise SettingsError(explain_mistakes(error, lambda member: f"{place}: {member}", _SECRET_MEMBERS)) from None


def _hash_plain_key(entry: dict[str, object], place: str) -> dict[str, object]:
    members = dict(entry)
    if "key" in members:
        key = members.pop("key")
        if not isinstance(key, str):
            raise SettingsError(f"{place}: key must be text: put it in quotes")
        if not re.fullmatch(r"[!-~]+", key):
            raise SettingsError(f"{place}: key must be printable ASCII without spaces, as it is sent in an HTTP header")
        members["key_sha256"] = hashlib.sha256(key.encode()).hexdigest()
    elif isinstance(digest := members["key_sha256"], str):
        members["key_sha256"] = digest.lower()
    return members


def _require_unique_keys(keys: tuple[ClientKey, ...], path: str | Path) -> None:
    names: dict[str, int] = {}
    digests: dict[str, int] = {}
    for number, key in enumerate(keys, 1):
        for what, seen, value in (("name", names, key.name), ("key", digests, key.key_sha256)):
            before = seen.setdefault(value, number)
            if before != number:
                raise SettingsError(f"{path}: entry {number} has the same {what} as entry {before}")
