"""Reading the text of the Kimi K2 family: what vLLM's parser says, however the text is cut."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from proxy.dialects.grammars import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKERS,
    SECTION_BEGIN,
    SECTION_BEGIN_ID,
    SECTION_END,
    THINK_BEGIN,
    THINK_END,
    KimiGrammar,
    KimiParser,
    KimiPhase,
)
from proxy.sim.model import parser as sim
from proxy.sim.model import tokenizer


class Said(NamedTuple):
    """The content of a whole answer. `calls`: index → id, name, arguments."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, tuple[str, str, str]] = {}  # noqa: RUF012


def added_up(deltas: list[dict[str, Any] | None]) -> Said:
    """Assemble deltas as a client does. Fails if a call is reported twice, or its arguments before its name."""
    said = [delta for delta in deltas if delta]
    calls: dict[int, tuple[str, str, str]] = {}
    for part in (part for delta in said for part in delta.get("tool_calls", ())):
        function = part["function"]
        if "id" in part:
            assert part["index"] not in calls
            assert part["type"] == "function"
            calls[part["index"]] = part["id"], function["name"], function.get("arguments", "")
        else:
            assert function["arguments"]
            call_id, name, arguments = calls[part["index"]]
            calls[part["index"]] = call_id, name, arguments + function["arguments"]
    assert all(delta[field] for delta in said for field in delta)
    reasoning, content = ("".join(delta.get(field, "") for delta in said) for field in ("reasoning", "content"))
    return Said(reasoning, content, calls)


def read(*pieces: str, in_reasoning: bool = True, shows_blanks: bool = False, reports_half_calls: bool = True) -> Said:
    parser = KimiParser(in_reasoning=in_reasoning, shows_blanks=shows_blanks, reports_half_calls=reports_half_calls)
    return added_up([*map(parser.parse_text, pieces), parser.parse_text("", finished=True)])


def call(call_id: str, arguments: str = "{}") -> str:
    return f"{CALL_BEGIN}{call_id}{ARGUMENT_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return f"{SECTION_BEGIN}{''.join(calls)}{SECTION_END}"


CODE = '{"code": "if (a <b> c) print(\\"<|tool\\" + \'</think\')", "city": "北京 🙂", "list": [{"x": 1}, {}]}'
THINKING = (
    "The user wants <b>two</b> things: a < b and the weather in 北京.\n\nFirst the code.\n"
    + THINK_END
    + "I will run it and look <here>. "
    + section(
        call(" functions.run_code:0\n", CODE), call("functions.get_weather:1", '{"city": "北京", "unit": "<°C>"}')
    )
)
THINKING_SAID = Said(
    "The user wants <b>two</b> things: a < b and the weather in 北京.\n\nFirst the code.",
    "I will run it and look <here>. ",
    {
        0: ("functions.run_code:0", "run_code", CODE),
        1: ("functions.get_weather:1", "get_weather", '{"city": "北京", "unit": "<°C>"}'),
    },
)

F0 = {0: ("functions.f:0", "f", "{}")}

# What vLLM 0.32 says of each, fed token by token.
ANSWERS: dict[str, tuple[str, Said]] = {
    "a whole answer": (THINKING, THINKING_SAID),
    "nothing": ("", Said()),
    "reasoning without an end": ("Hm, <b>", Said("Hm, <b>")),
    "reasoning begun twice": (f"{THINK_BEGIN}Hm {THINK_BEGIN}so", Said("Hm so")),
    "reasoning ended twice": (f"Hm{THINK_END}a{THINK_END}b", Said("Hm", "ab")),
    "reasoning begun in content": (f"Hm{THINK_END}a{THINK_BEGIN}b", Said("Hm", f"a{THINK_BEGIN}b")),
    "white space around reasoning": (f" \nHm \n Hm \n{THINK_END}\n a \n", Said(" \nHm \n Hm", "\n a \n")),
    "white space only": (f" {THINK_END}\n", Said("", "\n")),
    "white space before calls": (f"Hm{THINK_END}\n\n{section(call('functions.f:0'))}\n", Said("Hm", "", F0)),
    "white space before a section without calls": (f"{THINK_END}\n\n{section()}", Said("", "\n\n")),
    "white space before half a marker at the end": ("Hm <|tool", Said("Hm<|tool")),
    "half a marker of content at the end": (f"{THINK_END} a <|tool", Said("", " a <|tool")),
    "calls straight out of reasoning": (f"Hm {section(call('functions.f:0'))}", Said("Hm", "", F0)),
    "content behind calls": (f"{section(call('functions.f:0'))} bye {THINK_END} bye", Said("", "", F0)),
    "text between calls": (
        f"{SECTION_BEGIN}one {call('functions.f:0')} two {call('g:7', '[]')} three{SECTION_END}",
        Said("", "", F0 | {1: ("g:7", "g", "[]")}),
    ),
    "two sections": (
        f"{section(call('functions.f:0'))} and {section(call('functions.g:1', '[]'))}",
        Said("", "", F0 | {1: ("functions.g:1", "g", "[]")}),
    ),
    "a call behind the section": (
        section(call("functions.f:0")) + call("functions.g:1"),
        Said("", "", F0 | {1: ("functions.g:1", "g", "{}")}),
    ),
    "a section that ends inside arguments": (
        f"{SECTION_BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}{{}}{SECTION_END} {call('functions.g:1')}",
        Said("", "", F0 | {1: ("functions.g:1", "g", "{}")}),
    ),
    "a name with dots and more behind the id": (
        section(call("functions.a.b:12 or so")),
        Said("", "", {0: ("functions.a.b:12", "a.b", "{}")}),
    ),
    "arguments with white space": (
        section(call("functions.f:0", ' {"a": "}"} \n')),
        Said("", "", {0: ("functions.f:0", "f", ' {"a": "}"} \n')}),
    ),
    "arguments with other markers": (
        section(call("functions.f:0", THINK_BEGIN + CALL_BEGIN + ARGUMENT_BEGIN + SECTION_BEGIN + THINK_END)),
        Said(
            "", "", {0: ("functions.f:0", "f", THINK_BEGIN + CALL_BEGIN + ARGUMENT_BEGIN + SECTION_BEGIN + THINK_END)}
        ),
    ),
    "no arguments": (section(call("functions.f:0", "")), Said("", "", {0: ("functions.f:0", "f", "")})),
    "an end inside arguments": (
        f'{SECTION_BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}{{"a": "<|tool_call',
        Said("", "", {0: ("functions.f:0", "f", '{"a": "<|tool_call')}),
    ),
    "an end before the arguments": (
        f"{SECTION_BEGIN}{CALL_BEGIN}functions.f:0",
        Said("", "", {0: ("functions.f:0", "f", "")}),
    ),
    "an end inside an id": (
        f"{SECTION_BEGIN}{CALL_BEGIN}functions.get_wea",
        Said("", "", {0: ("functions.functions.get_wea:0", "functions.get_wea", "")}),
    ),
    "an end before an id": (f"{SECTION_BEGIN}{CALL_BEGIN}", Said()),
    "an id that is none": (section(call("f"), call("functions.f:1")), Said("", "", {1: ("functions.f:1", "f", "{}")})),
    "a malformed id after a call": (section(call("functions.f:0"), call("g")), Said("", "", F0)),
    "an id without a name": (section(call("functions.:0"), call("")), Said()),
    "a malformed id without arguments": (
        section(call("f", ""), call(""), call("g", "")),
        Said("", "", {0: ("functions.f:0", "f", ""), 2: ("functions.g:1", "g", "")}),
    ),
    "a malformed id after white space, and an end": (
        f"{THINK_END}\n{SECTION_BEGIN}{CALL_BEGIN}f{ARGUMENT_BEGIN}",
        Said("", "", {0: ("functions.f:0", "f", "")}),
    ),
    "markers inside an id": (
        f"{SECTION_BEGIN}{CALL_BEGIN}f{CALL_END}{SECTION_END}{THINK_BEGIN}:0{ARGUMENT_BEGIN}{{}}",
        Said("", "", {0: (f"f{CALL_END}{SECTION_END}{THINK_BEGIN}:0", f"f{CALL_END}{SECTION_END}{THINK_BEGIN}", "{}")}),
    ),
    "markers of calls outside a section": (
        f"a{call('b')}{SECTION_END}{THINK_END}c{call('d')}{SECTION_END}",
        Said(f"a{call('b')}{SECTION_END}", f"c{call('d')}{SECTION_END}"),
    ),
    "markers that run into each other": (
        f"a<|tool_<think{THINK_END}<</think<|{SECTION_BEGIN}<",
        Said("a<|tool_<think", "<</think<|"),
    ),
}


@pytest.mark.parametrize(("text", "said"), ANSWERS.values(), ids=ANSWERS)
def test_answer_is_read_as_vllm_reads_it(text: str, said: Said) -> None:
    assert read(text) == said


@pytest.mark.parametrize(("text", "said"), ANSWERS.values(), ids=ANSWERS)
def test_every_single_cut_and_every_character_alone_come_to_the_same(text: str, said: Said) -> None:
    assert read(*text) == said
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == said


@given(answer=st.sampled_from(list(ANSWERS.values())), data=st.data())
def test_any_cuts_come_to_the_same(answer: tuple[str, Said], data: st.DataObject) -> None:
    text, said = answer
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    assert read(*(text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))) == said


def test_last_text_may_come_with_the_end() -> None:
    for text, said in ANSWERS.values():
        assert added_up([KimiParser(in_reasoning=True).parse_text(text, finished=True)]) == said


def test_without_reasoning_an_answer_begins_with_content() -> None:
    assert read("a <", "b", in_reasoning=False) == Said("", "a <b")
    assert read(f"{THINK_BEGIN}a{THINK_END}b", in_reasoning=False) == Said("", f"{THINK_BEGIN}ab")


@pytest.mark.parametrize("marker", MARKERS)
def test_half_a_marker_is_held_back_and_nothing_else(marker: str) -> None:
    for cut in range(1, len(marker)):
        parser = KimiParser(in_reasoning=False)
        assert parser.parse_text("a < b " + marker[:cut]) == {"content": "a < b "}
        assert parser.phase is KimiPhase.CONTENT
        assert parser.parse_text("!") == {"content": marker[:cut] + "!"}
    assert KimiParser(in_reasoning=False).parse_text("a<b </x <|x") == {"content": "a<b </x <|x"}


def test_text_is_said_as_soon_as_it_is_known() -> None:
    parser = KimiParser(in_reasoning=True)
    opener = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    for text, delta in (
        ("Hm", {"reasoning": "Hm"}),
        (" \n", {}),
        ("so", {"reasoning": " \nso"}),
        (" ", {}),
        (THINK_END, {}),
        ("\n", {}),
        ("a", {"content": "\na"}),
        (" ", {"content": " "}),
        (SECTION_BEGIN, {}),
        (CALL_BEGIN, {}),
        ("functions.f", {}),
        (":0", {}),
        (ARGUMENT_BEGIN, {"tool_calls": [opener]}),
        ("{", {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
        ("}", {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
        (CALL_END + SECTION_END, {}),
        ("bye", {}),
    ):
        assert parser.parse_text(text) == delta


def test_blanks_are_shown_at_once_where_engines_do_so() -> None:
    parser = KimiParser(in_reasoning=True, shows_blanks=True)
    assert parser.parse_text(" ") == {"reasoning": " "}
    assert parser.parse_text(f"Hm \n{THINK_END}") == {"reasoning": "Hm \n"}
    assert parser.parse_text("\n") == {"content": "\n"}
    assert parser.parse_text(section(call("functions.f:0")), finished=True).keys() == {"tool_calls"}


def test_phase_and_the_calls_are_those_of_the_text_so_far() -> None:
    steps = (
        ("Hm", KimiPhase.REASONING, 0, False),
        (THINK_END, KimiPhase.CONTENT, 0, False),
        (f"a{SECTION_BEGIN}", KimiPhase.TOOL_SECTION, 0, True),
        (f" {CALL_BEGIN}", KimiPhase.TOOL_NAME, 1, True),
        ("functions.f:0", KimiPhase.TOOL_NAME, 1, True),
        (ARGUMENT_BEGIN, KimiPhase.TOOL_ARGUMENTS, 1, True),
        ("{}", KimiPhase.TOOL_ARGUMENTS, 1, True),
        (CALL_END, KimiPhase.TOOL_SECTION, 1, True),
        (call("functions.f:1"), KimiPhase.TOOL_SECTION, 2, True),
        (SECTION_END, KimiPhase.AFTER_TOOL_SECTION, 2, False),
        ("bye", KimiPhase.AFTER_TOOL_SECTION, 2, False),
        (SECTION_BEGIN, KimiPhase.TOOL_SECTION, 2, True),
        (CALL_BEGIN, KimiPhase.TOOL_NAME, 3, True),
        (ARGUMENT_BEGIN, KimiPhase.TOOL_ARGUMENTS, 3, True),
        (SECTION_END, KimiPhase.AFTER_TOOL_SECTION, 3, False),
        (CALL_BEGIN, KimiPhase.TOOL_NAME, 4, True),
    )
    parser = KimiParser(in_reasoning=True)
    for text, phase, calls, in_tools in steps:
        before = parser.phase
        if text in MARKERS:
            parser.parse_text(text[:-1])
            assert parser.phase is before
            text = text[-1]
        parser.parse_text(text)
        assert (parser.phase, parser.call_count, parser.is_in_tool_section) == (phase, calls, in_tools)


@given(cut=st.integers(0, len(THINKING)))
def test_answer_continues_behind_the_text_it_was_primed_with(cut: int) -> None:
    primed = KimiParser(in_reasoning=True)
    before = primed.parse_text(THINKING[:cut])
    after = [*map(primed.parse_text, THINKING[cut:]), primed.parse_text("", finished=True)]
    assert added_up([before, *after]) == THINKING_SAID


IDS = st.sampled_from(["functions.f:0", "functions.a.b:12", " g:3\n", "functions.:0", "no id"])
TEXT = st.text(st.sampled_from('ab <>/|{}":,\n é🙂'), max_size=12)
SPLINTERS = st.lists(TEXT | st.sampled_from([marker[:cut] for marker in MARKERS for cut in range(1, len(marker))])).map(
    "".join
)
CALL = st.tuples(SPLINTERS, IDS, SPLINTERS).map(lambda parts: parts[0] + call(*parts[1:]))
SECTION = st.lists(CALL, max_size=3).map(lambda calls: section(*calls))
TAIL = st.lists(SECTION | SPLINTERS, max_size=3).map("".join)
ENDED = st.tuples(SPLINTERS, st.sampled_from([THINK_END, ""]), SPLINTERS, SECTION, TAIL).map("".join)


@given(
    text=ENDED | st.lists(SPLINTERS | st.sampled_from([THINK_BEGIN, THINK_END])).map("".join),
    cuts=st.lists(st.integers(0), max_size=12),
    is_engine=st.booleans(),
)
@example(text=THINKING, cuts=[], is_engine=True)
@example(text=THINKING, cuts=[], is_engine=False)
@example(text=section(call("functions.:0", "{}")), cuts=[], is_engine=True)
@example(text=section(call("functions.:0", "")), cuts=[], is_engine=True)
@example(text=section(call("no id", "")), cuts=[], is_engine=True)
@example(text=section(call("no id", "")), cuts=[], is_engine=False)
@example(text=section(call("functions.f:0", ""), call("no id", "")), cuts=[], is_engine=True)
def test_simulated_engines_read_the_same(text: str, cuts: list[int], is_engine: bool) -> None:
    """Both follow vLLM, independently of each other; the simulated engines also as it was before its parser engine."""
    text += "."  # half a marker at the very end of reasoning is the one thing they do not take so exactly
    edges = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    theirs = sim.SimulatedKimiParser(sim.Phase.REASONING, is_engine=is_engine)
    said = added_up([*map(theirs.parse_text, pieces), theirs.parse_text("", finished=True)])
    assert read(*pieces, shows_blanks=not is_engine, reports_half_calls=is_engine) == said


@given(pieces=st.lists(SPLINTERS | IDS | st.sampled_from(MARKERS), max_size=16), in_reasoning=st.booleans())
def test_any_heap_of_markers_comes_to_the_same_however_it_is_cut(pieces: list[str], in_reasoning: bool) -> None:
    text = "".join(pieces)
    said = read(text, in_reasoning=in_reasoning)
    assert read(*pieces, in_reasoning=in_reasoning) == said
    assert read(*text, in_reasoning=in_reasoning) == said


@given(pieces=st.lists(SPLINTERS | IDS | st.sampled_from(MARKERS), max_size=16))
def test_parser_never_retracts_a_delta(pieces: list[str]) -> None:
    for text in accumulate(pieces):
        assume(len(text) < 400)
        whole = read("".join(pieces))
        so_far = added_up([KimiParser(in_reasoning=True).parse_text(text)])
        assert whole.reasoning.startswith(so_far.reasoning)
        assert whole.content.startswith(so_far.content)
        for index, (call_id, name, arguments) in so_far.calls.items():
            assert whole.calls[index][:2] == (call_id, name)
            assert whole.calls[index][2].startswith(arguments)


def test_markers_are_those_of_the_tokenizer() -> None:
    assert {tokenizer.MARKERS[token] for token in tokenizer.MARKERS} >= set(MARKERS)
    assert tokenizer.MARKERS[SECTION_BEGIN_ID] == SECTION_BEGIN


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_assistant|>assistant<|im_middle|><think>", True),
        ("<|im_assistant|>assistant<|im_middle|><think></think>", False),
        (f"{THINK_BEGIN}Hm {THINK_END}Yes.<|im_end|><|im_assistant|>assistant<|im_middle|>{THINK_BEGIN}", True),
        (f"{THINK_BEGIN}Hm{SECTION_BEGIN}", False),
        (f"{THINK_END}{THINK_BEGIN}{SECTION_BEGIN}{SECTION_END}", False),
        ("<|im_assistant|>assistant<|im_middle|>", None),
        ("", None),
    ],
)
def test_nearest_marker_says_whether_an_answer_begins_in_reasoning(prompt: str, opens: bool | None) -> None:
    assert KimiGrammar().begins_with_reasoning(prompt) is opens


@pytest.mark.parametrize(
    ("prompt", "is_kimi"),
    [
        ("Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>", True),
        ("<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
        ("<|im_assistant|>assistant\n", False),
        ("", False),
    ],
)
def test_chat_template_tells_the_family(prompt: str, is_kimi: bool) -> None:
    assert KimiGrammar().recognises(tokenizer.encode_text(prompt)) is is_kimi
