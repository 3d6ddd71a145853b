"""A part that is written out in the prompt is played, from wherever it was broken off."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.sim.model.tokenizer import END, decode_tokens, render_chat
from proxy.sim.model.writer import DeterministicWriter, rest_of_turn

PART = [
    {"say": "I look.", "calls": [{"name": "read", "arguments": {"path": "a [b]"}}]},
    {"think": "Is it done?", "say": "It is."},
]
TOOLS = [{"type": "function", "function": {"name": "read"}}]
ASKED = {"role": "user", "content": f"Well, play: {orjson.dumps(PART).decode()} and then stop."}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"id": "functions.read:0", "function": {"name": "read", "arguments": '{"path":"a [b]"}'}}],
}
RETURNED = {"role": "tool", "tool_call_id": "functions.read:0", "content": "x"}


def prompt(*messages: dict[str, Any], thinking: bool = True, **fields: Any) -> list[int]:
    kwargs = {"chat_template_kwargs": {"thinking": thinking}}
    return render_chat({"messages": [ASKED, *messages], "tools": TOOLS, **kwargs, **fields})


def written(ids: list[int]) -> list[int]:
    writer = DeterministicWriter(ids, eos_after=10)
    said = [writer.next()]
    while said[-1] != END:
        said.append(writer.next())
    return said


@pytest.mark.parametrize("thinking", [False, True])
def test_each_turn_is_played(thinking: bool) -> None:
    first = decode_tokens(written(prompt(thinking=thinking)), keep_markers=True)
    second = decode_tokens(written(prompt(CALLED, RETURNED, thinking=thinking)), keep_markers=True)
    assert first.removeprefix("I know my part.</think>") == (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
        '{"path":"a [b]"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    assert second == ("Is it done?</think>" if thinking else "") + "It is.<|im_end|>"


def test_script_continues_at_any_interruption() -> None:
    ids = prompt()
    said = written(ids)
    assert all(written(ids + said[:count]) == said[count:] for count in range(len(said)))


def test_script_is_not_played_without_tools_or_a_role() -> None:
    plain = {"role": "user", "content": "Play it again."}
    assert rest_of_turn(prompt(tools=None)) is None
    assert rest_of_turn(render_chat({"messages": [plain], "tools": TOOLS})) is None
    assert rest_of_turn(render_chat({"messages": [{"role": "user", "content": "play: [{"}], "tools": TOOLS})) is None
    assert rest_of_turn(prompt(CALLED, RETURNED, {"role": "assistant", "content": "It is."}, plain)) is None
