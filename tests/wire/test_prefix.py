"""Keys of prefixes: equal as long as the text is, whatever process asks."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import orjson
import pytest

from proxy.dialects.call import measure_prompt
from proxy.settings.model import Cost
from proxy.wire.document import REMOVED, Document
from proxy.wire.prefix import PrefixKeys, PromptPrefixes

TEXT = "".join(f"sentence number {number}. " for number in range(1000))


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **fields}


def prefix_keys(values: dict[str, Any]) -> PrefixKeys:
    return measure_prompt(Document(orjson.dumps(values)), Cost())[1].keys


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Up to how many bytes two prompts have keys in common."""
    left, right = prefix_keys(one), prefix_keys(other)
    equal = [mine == its for mine, its in zip(left.keys, right.keys, strict=False)]
    assert equal == sorted(equal, reverse=True)  # once apart, they stay apart
    assert left.sizes[: sum(equal)] == right.sizes[: sum(equal)]
    return left.sizes[sum(equal) - 1] if any(equal) else 0


def test_longer_conversation_has_the_keys_of_the_shorter_one() -> None:
    size = len(orjson.dumps(chat(TEXT, TEXT)["messages"]))
    assert size * 15 / 16 <= shared(chat(TEXT, TEXT), chat(TEXT, TEXT, "c")) < size
    assert size / 2 * 15 / 16 <= shared(chat(TEXT, TEXT), chat(TEXT, "x", TEXT)) <= size / 2 + 100
    assert shared(chat("x", TEXT), chat("a", TEXT)) == 0
    assert shared(chat(TEXT), chat(TEXT)) == len(orjson.dumps(chat(TEXT)["messages"]))


@pytest.mark.parametrize("name", ["prompt", "text"])
def test_pieces_of_a_prompt_grow_with_their_position(name: str) -> None:
    sizes = prefix_keys({name: TEXT}).sizes
    assert [*sizes[:18], sizes[-1]] == [*range(512, 8193, 512), 8704, 9216, len(TEXT) + 2]
    assert all(end - start <= max(512, start / 8) for start, end in pairwise(sizes))
    assert 4608 <= shared({name: TEXT}, {name: TEXT[:5000] + "!"}) < 5000


@pytest.mark.parametrize("name", ["prompt", "input_ids"])
def test_token_ids_are_cut_into_pieces_as_text_is(name: str) -> None:
    ids = list(range(1000, 2200))
    assert prefix_keys({name: ids}).sizes[-1] == 5 * len(ids) + 1
    assert 5 * 1100 - 512 < shared({name: ids}, {name: [*ids[:1100], 7]}) <= 5 * 1100


@pytest.mark.parametrize("values", [{"prompt": "x" * 10_000_000}, {"prompt": [7] * 1_000_000}, chat("x" * 3_000_000)])
def test_long_prompt_has_few_pieces(values: dict[str, Any]) -> None:
    assert len(prefix_keys(values).keys) <= 200


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"chat_template_kwargs": {"thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_members_that_change_the_rendered_prompt_change_all_keys(fields: dict[str, Any]) -> None:
    assert shared(chat("a"), chat("a", **{"model": "m", **fields})) == 0


@pytest.mark.parametrize("member", [{"role": "system"}, {"name": "n"}, {"tool_calls": [{"id": "1"}]}])
def test_every_part_of_a_message_changes_the_keys(member: dict[str, Any]) -> None:
    other = chat("a")
    other["messages"][0] |= member
    assert shared(chat("a"), other) == 0


def test_reasoning_which_templates_drop_does_not_count() -> None:
    said = chat("a", TEXT, "b", "c")
    for number in (1, 3):
        said["messages"][number]["role"] = "assistant"
    thought = {**said, "messages": [dict(message) for message in said["messages"]]}
    thought["messages"][1]["reasoning_content"] = 'hm, "really"?'
    assert prefix_keys(thought) == prefix_keys(said)


def test_reasoning_of_a_turn_that_calls_tools_counts_until_it_has_ended() -> None:
    call = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{"id": "1"}]}
    tool = {"role": "tool", "tool_call_id": "1", "content": TEXT}
    silent = {name: value for name, value in call.items() if name != "reasoning_content"}
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

    def keys(*messages: dict[str, Any]) -> PrefixKeys:
        return prefix_keys({"model": "m", "messages": list(messages)})

    assert keys(user, call, tool).keys[0] != keys(user, silent, tool).keys[0]
    assert keys(user, call, tool, answer, user) == keys(user, silent, tool, answer, user)


def test_pictures_are_distinguished_by_their_ends() -> None:
    def picture(data: str) -> dict[str, Any]:
        return chat([{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": TEXT}])

    one = "data:image/png;base64," + "A" * 1_000_000
    assert sum(prefix_keys(picture(one)).sizes[-1:]) < len(TEXT) + 20_000
    assert shared(picture(one), picture(one)) > len(TEXT)
    assert shared(picture(one), picture(one[:-1] + "B")) < 10_000
    assert shared(picture(one), picture(one + "A")) < 5_000


@pytest.mark.parametrize(
    "values", [{}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": []}, {"prompt": 7}, {"messages": "no"}]
)
def test_requests_without_a_single_prompt_have_no_keys(values: dict[str, Any]) -> None:
    assert prefix_keys(values) == PrefixKeys()


def test_keys_are_computed_once_and_again_after_changes() -> None:
    document = Document(orjson.dumps({"model": "m", "prompt": ["a", "b"], "n": 2}))
    part = PromptPrefixes(document).copy_with_changes({"prompt": "b", "n": REMOVED})
    assert part.keys is part.keys
    assert part.keys == prefix_keys({"model": "m", "prompt": "b"})
    assert PromptPrefixes(document).copy_with_changes({"n": REMOVED}).keys == PrefixKeys()


def test_keys_are_equal_in_another_process() -> None:
    code = """
from proxy.wire.document import Document
from proxy.wire.prefix import PromptPrefixes
print(PromptPrefixes(Document(b'{"prompt":"%b"}' % (b"x" * 5000))).keys.keys)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(prefix_keys({"prompt": "x" * 5000}).keys)
