"""Kimi K2 output is parsed the same however it is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from proxy.sim.parser import KimiParser, parse_whole
from proxy.sim.tokenizer import SECTION_BEGIN, THINK, THINK_END

TEXT = (
    "Let me see.</think>I will <b>look</b>. <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    '<|tool_call_argument_begin|>{"what":"x < y"}<|tool_call_end|><|tool_call_begin|>functions.ask:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> not shown"
)


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_deltas_add_up_to_the_whole_message(cuts: list[int]) -> None:
    whole, called = parse_whole([THINK], TEXT)
    assert called
    parser = KimiParser([THINK])
    edges = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[begin:end] for begin, end in pairwise(edges)]
    deltas = [parser.feed(piece) for piece in pieces] + [parser.feed("", finished=True)]
    said = [delta for delta in deltas if delta is not None]
    assert "".join(delta.get("reasoning", "") for delta in said) == whole["reasoning"] == "Let me see."
    assert "".join(delta.get("content", "") for delta in said) == whole["content"] == "I will <b>look</b>. "
    arguments = ["", ""]
    names = []
    for call in (call for delta in said for call in delta.get("tool_calls", ())):
        arguments[call["index"]] += call["function"].get("arguments", "")
        names += [call["function"]["name"]] if "id" in call else []
    assert names == ["find", "ask"]
    assert arguments == ['{"what":"x < y"}', "{}"]


def test_a_resumed_generation_starts_where_the_nearest_marker_says() -> None:
    assert KimiParser([THINK, 97]).feed("b") == {"reasoning": "b"}
    assert KimiParser([THINK, 97, THINK_END]).feed("b") == {"content": "b"}


def test_markers_leak_when_resumed_inside_a_tool_section() -> None:
    assert KimiParser([THINK, SECTION_BEGIN]).feed("<|tool_call_begin|>f") == {"content": "<|tool_call_begin|>f"}
