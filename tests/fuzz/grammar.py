"""Text of the Kimi K2 family in any order, compared with the simulated engines' parser."""

from __future__ import annotations

import re
from typing import Final

from proxy.dialects.grammars import ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, KimiParser
from proxy.sim.model import parser as sim
from tests.dialects.grammars.test_kimi import Said, added_up
from tests.fuzz.cutting import cut, spelled, words

WORDS: Final = words(
    r"""
    <think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>
    <|tool_call_argument_begin|> <|tool_call_end|> functions.f:0 functions. :1 f {"a": "b"} {} [1] \x20 \n \x85
    \xa0 <|tool_call <|tool_calls_section_ </thin <thi <| s_section_begin|> _end|> k>
    """
)


# The simulated engines do not follow vLLM's treatment of invalid ids in all cases.
_NO_ID = re.compile(
    rf"{re.escape(CALL_BEGIN)}(?!\s*(?!functions[.]:)[\w.]+:\d+\s*{re.escape(ARGUMENT_BEGIN)})", re.ASCII
)


def check_grammar(data: bytes) -> None:
    """Check that all cuts of a text are parsed as the simulated engines parse it."""
    kind, text = data[0] if data else 0, spelled(data[1:], WORDS).decode("latin-1")
    in_reasoning, is_old = kind % 2 == 0, kind % 3 == 0
    expected = _read([text], in_reasoning, is_old)
    assert (
        _read([piece.decode("latin-1") for piece in cut(kind, text.encode("latin-1"))], in_reasoning, is_old)
        == expected
    )
    assert _read(list(text), in_reasoning, is_old) == expected
    if not _NO_ID.search(text):
        # The simulated engines treat half a marker at the end less exactly, and complete open arguments.
        text += f".{CALL_END}"
        assert _simulated(text, in_reasoning, is_old) == _read([text], in_reasoning, is_old)


def _read(pieces: list[str], in_reasoning: bool, is_old: bool) -> Said:
    parser = KimiParser(in_reasoning=in_reasoning, shows_blanks=is_old, reports_half_calls=not is_old)
    return added_up([*map(parser.parse_text, pieces), parser.parse_text("", finished=True)])


def _simulated(text: str, in_reasoning: bool, is_old: bool) -> Said:
    parser = sim.SimulatedKimiParser(sim.Phase.REASONING if in_reasoning else sim.Phase.CONTENT, is_engine=not is_old)
    return added_up([parser.parse_text(text), parser.parse_text("", finished=True)])
