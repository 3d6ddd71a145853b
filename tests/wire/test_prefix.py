"""Keys of prefixes: equal as long as the text is, whatever process asks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from proxy.wire.document import REMOVED
from proxy.wire.prefix import PrefixKeys, Prompt, prefix_keys

TEXT = "".join(f"sentence number {number}. " for number in range(1000))


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **fields}


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many pieces two prompts have in common; it is the same for keys and sizes."""
    pairs = list(zip(prefix_keys(one).keys, prefix_keys(other).keys, strict=False))
    equal = [left == right for left, right in pairs]
    assert equal == sorted(equal, reverse=True)  # once apart, they stay apart
    return sum(equal)


def test_a_longer_conversation_has_the_keys_of_the_shorter_one() -> None:
    assert shared(chat("a", "b"), chat("a", "b", "c")) == 2
    assert shared(chat("a", "b"), chat("a", "x", "b")) == 1
    assert shared(chat("x", "b"), chat("a", "b")) == 0


@pytest.mark.parametrize("name", ["prompt", "text"])
def test_text_is_cut_into_pieces_of_two_kibibytes(name: str) -> None:
    keys = prefix_keys({name: TEXT})
    assert keys.sizes == (*range(2048, len(TEXT), 2048), len(TEXT))
    assert shared({name: TEXT}, {name: TEXT[:5000] + "!"}) == 2


@pytest.mark.parametrize("name", ["prompt", "input_ids"])
def test_token_ids_are_cut_into_pieces_of_512(name: str) -> None:
    ids = list(range(1200))
    assert prefix_keys({name: ids}).sizes == (512, 1024, 1200)
    assert shared({name: ids}, {name: [*ids[:1100], 7]}) == 2


def test_a_long_prompt_has_larger_pieces_and_no_more_than_512() -> None:
    assert len(prefix_keys({"prompt": "x" * 10_000_000}).keys) <= 512
    assert len(prefix_keys({"prompt": [7] * 1_000_000}).keys) <= 512
    assert len(prefix_keys(chat("x" * 3_000_000, "y" * 10)).keys) <= 513


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"chat_template_kwargs": {"thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_what_changes_the_rendered_prompt_changes_all_keys(fields: dict[str, Any]) -> None:
    assert shared(chat("a"), chat("a", **{"model": "m", **fields})) == 0


@pytest.mark.parametrize("member", [{"role": "system"}, {"name": "n"}, {"tool_calls": [{"id": "1"}]}])
def test_all_that_a_message_says_counts(member: dict[str, Any]) -> None:
    other = chat("a")
    other["messages"][0] |= member
    assert shared(chat("a"), other) == 0


def test_reasoning_which_templates_drop_does_not_count() -> None:
    other = chat("a", "b")
    other["messages"][0]["reasoning_content"] = "hm"
    assert shared(chat("a", "b"), other) == 2


def test_pictures_are_told_apart_by_their_ends() -> None:
    def picture(data: str) -> dict[str, Any]:
        return chat([{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": TEXT}])

    one = "data:" + "A" * 1_000_000
    assert sum(prefix_keys(picture(one)).sizes[-1:]) < len(TEXT) + 20_000
    assert shared(picture(one), picture(one)) > 1
    assert shared(picture(one), picture(one[:-1] + "B")) < shared(picture(one), picture(one))
    assert shared(picture(one), picture(one + "A")) == 0


@pytest.mark.parametrize(
    "values", [{}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": []}, {"prompt": 7}, {"messages": "no"}]
)
def test_what_is_no_single_prompt_has_no_keys(values: dict[str, Any]) -> None:
    assert prefix_keys(values) == PrefixKeys()


def test_keys_are_computed_once_and_those_of_a_part_anew() -> None:
    prompt = Prompt({"model": "m", "prompt": ["a", "b"], "n": 2})
    part = prompt.changed({"prompt": "b", "n": REMOVED})
    assert part.keys is part.keys
    assert part.keys == prefix_keys({"model": "m", "prompt": "b"})


def test_another_process_finds_the_same_keys() -> None:
    code = "from proxy.wire.prefix import prefix_keys; print(prefix_keys({'prompt': 'x' * 5000}).keys)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(prefix_keys({"prompt": "x" * 5000}).keys)
