"""Kimi K2 output is parsed the same however it is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sim.model.parser import Phase, SimulatedKimiParser, closing_markers, parse_complete_text, start_phase
from proxy.sim.model.tokenizer import ASSISTANT, CALL_BEGIN, SECTION_BEGIN, THINK, THINK_END

TEXT = (
    "Let me see.</think>I will <b>look</b>. <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    '<|tool_call_argument_begin|>{"what":"x < y"}<|tool_call_end|><|tool_call_begin|>functions.ask:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> not shown"
)


CALL = '<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"a":"b"}'

both_kinds = pytest.mark.parametrize("is_engine", [False, True], ids=["parsers", "engine"])


def said(parser: SimulatedKimiParser, text: str) -> list[dict[str, Any]]:
    """Return the deltas of a text that arrives one character at a time and then ends."""
    deltas = [parser.parse_text(character) for character in text] + [parser.parse_text("", finished=True)]
    return [delta for delta in deltas if delta is not None]


def arguments(deltas: list[dict[str, Any]]) -> str:
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return "".join(call["function"].get("arguments", "") for call in calls)


@both_kinds
@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_deltas_add_up_to_the_whole_message(is_engine: bool, cuts: list[int]) -> None:
    whole, called = parse_complete_text(TEXT, is_thinking=True, is_engine=is_engine)
    assert called
    parser = SimulatedKimiParser(Phase.REASONING, is_engine=is_engine)
    edges = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[begin:end] for begin, end in pairwise(edges)]
    deltas = [parser.parse_text(piece) for piece in pieces] + [parser.parse_text("", finished=True)]
    said = [delta for delta in deltas if delta is not None]
    assert "".join(delta.get("reasoning", "") for delta in said) == whole["reasoning"] == "Let me see."
    assert "".join(delta.get("content", "") for delta in said) == whole["content"] == "I will <b>look</b>. "
    told = ["", ""]
    names = []
    for call in (call for delta in said for call in delta.get("tool_calls", ())):
        told[call["index"]] += call["function"].get("arguments", "")
        names += [call["function"]["name"]] if "id" in call else []
    assert names == ["find", "ask"]
    assert told == ['{"what":"x < y"}', "{}"]


def test_generation_starts_where_the_nearest_marker_of_its_prompt_says() -> None:
    assert start_phase([THINK, 97]) is Phase.REASONING
    assert start_phase([THINK, 97, THINK_END, 97]) is Phase.CONTENT
    assert start_phase([THINK, SECTION_BEGIN, CALL_BEGIN]) is Phase.CONTENT
    assert start_phase([ASSISTANT]) is Phase.CONTENT


@both_kinds
def test_markers_leak_when_resumed_inside_a_tool_section(is_engine: bool) -> None:
    rest = 'find:0<|tool_call_argument_begin|>{"a":"b"}<|tool_call_end|><|tool_calls_section_end|>'
    deltas = said(SimulatedKimiParser(start_phase([THINK, SECTION_BEGIN, CALL_BEGIN]), is_engine=is_engine), rest)
    assert "".join(delta["content"] for delta in deltas) == rest


def test_indices_count_from_zero_in_every_parser() -> None:
    resumed = said(SimulatedKimiParser(Phase.CONTENT), CALL.replace("find:0", "find:1"))
    assert [call["index"] for delta in resumed for call in delta["tool_calls"]][:1] == [0]
    assert resumed[0]["tool_calls"][0]["id"] == "functions.find:1"


def test_engine_withholds_white_space_that_may_end_the_reasoning() -> None:
    parser = SimulatedKimiParser(Phase.REASONING)
    assert [parser.parse_text(text) for text in ("one ", " ", "two\n")] == [
        {"reasoning": "one"},
        None,
        {"reasoning": "  two"},
    ]
    assert parser.parse_text(" </think>so") == {"content": "so"}
    cut = SimulatedKimiParser(Phase.REASONING)
    cut.parse_text("one ")
    assert cut.parse_text("", finished=True) is None, "what is withheld is lost at the end"
    older = SimulatedKimiParser(Phase.REASONING, is_engine=False)
    assert older.parse_text("one ") == {"reasoning": "one "}


def test_engine_drops_white_space_that_is_all_there_is_before_a_call() -> None:
    assert [*said(SimulatedKimiParser(Phase.CONTENT), "\n" + CALL)[0]] == ["tool_calls"]
    assert said(SimulatedKimiParser(Phase.CONTENT), " \n") == [{"content": " \n"}]
    assert said(SimulatedKimiParser(Phase.CONTENT), " a")[0] == {"content": " a"}


def test_brace_that_ends_arguments_waits_for_the_next_text() -> None:
    parser = SimulatedKimiParser(Phase.CONTENT)
    assert arguments([parser.parse_text(CALL) or {}]) == '{"a":"b"'
    assert parser.parse_text("", finished=True) == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    whole = CALL + "<|tool_call_end|>"
    assert arguments(said(SimulatedKimiParser(Phase.CONTENT), whole)) == '{"a":"b"}'


def test_engine_tells_a_name_with_the_first_of_its_arguments() -> None:
    head = CALL[: CALL.index("{")]
    named = {"id": "functions.find:0", "type": "function", "index": 0}
    parser = SimulatedKimiParser(Phase.CONTENT)
    assert parser.parse_text(head) is None
    assert parser.parse_text("{") == {"tool_calls": [named | {"function": {"name": "find", "arguments": "{"}}]}
    older = SimulatedKimiParser(Phase.CONTENT, is_engine=False)
    assert older.parse_text(head) == {"tool_calls": [named | {"function": {"name": "find"}}]}


def test_cut_name_is_reported_as_a_call_by_the_engine() -> None:
    parser = SimulatedKimiParser(Phase.CONTENT)
    parser.parse_text(CALL[: CALL.index("ind:0")])
    function = {"name": "functions.f", "arguments": ""}
    call = {"id": "functions.functions.f:0", "type": "function", "index": 0, "function": function}
    assert parser.parse_text("", finished=True) == {"tool_calls": [call]}
    older = SimulatedKimiParser(Phase.CONTENT, is_engine=False)
    older.parse_text(CALL[: CALL.index("ind:0")])
    assert older.parse_text("", finished=True) is None


@pytest.mark.parametrize(
    ("told", "added"), [("", "{}"), ("{", "}"), ('{"a', '"}'), ('{"a":', "}"), ('{"a":"b', '"}'), ('{"a":"b"}', "")]
)
def test_older_parsers_complete_arguments_that_are_cut_off(told: str, added: str) -> None:
    parser = SimulatedKimiParser(Phase.CONTENT, is_engine=False)
    assert arguments([parser.parse_text(CALL[: CALL.index("{")] + told) or {}]) == told
    assert arguments([parser.parse_text("", finished=True) or {}]) == added


@given(
    st.recursive(
        st.one_of(st.booleans(), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    ),
)
def test_complete_document_has_no_missing_part(value: Any) -> None:
    text = orjson.dumps({"a": value}).decode()
    assert closing_markers(text) == ""
    assert closing_markers(text[:-1]) == "}"


def test_whole_answers_keep_the_calls_their_parser_finds() -> None:
    broken = CALL[:-3]
    engine, called = parse_complete_text(broken, is_thinking=False)
    assert called
    assert engine["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"a":"'}
    older, called = parse_complete_text(broken, is_thinking=False, is_engine=False)
    assert not called
    assert "tool_calls" not in older


def test_whole_answers_take_resumed_content_for_reasoning() -> None:
    fields, _ = parse_complete_text("so it is.", is_thinking=True)
    assert (fields["reasoning"], fields["content"]) == ("so it is.", None)


def test_without_a_tool_parser_sections_are_content() -> None:
    deltas = said(SimulatedKimiParser(Phase.REASONING, reads_tools=False), "hm" + CALL)
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == CALL
