"""Parses Kimi K2 output as vLLM does: text with markers becomes reasoning, content and tool-call deltas.

The states are those of vLLM `parser/kimi_k2.py`: a tool section ends reasoning, and text after the section is dropped.
A marker without a transition in the current state becomes text. This happens when a generation is resumed inside a tool
section. Other differences depend on the version: the parser engine withholds white space and the brace that closes
arguments; the older parsers complete arguments that were cut off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from proxy.sim.model.tokenizer import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKERS,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Phase(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()
    NAME = auto()
    ARGUMENTS = auto()


_TRANSITIONS_WITH_REASONING: Final[dict[tuple[Phase, str], Phase]] = {
    (Phase.REASONING, MARKERS[THINK]): Phase.REASONING,
    (Phase.REASONING, MARKERS[THINK_END]): Phase.CONTENT,
    (Phase.CONTENT, MARKERS[THINK_END]): Phase.CONTENT,
}
_TRANSITIONS_OF_TOOL_CALLS: Final[dict[tuple[Phase, str], Phase]] = {
    (Phase.REASONING, MARKERS[SECTION_BEGIN]): Phase.SECTION,
    (Phase.CONTENT, MARKERS[SECTION_BEGIN]): Phase.SECTION,
    (Phase.SECTION, MARKERS[CALL_BEGIN]): Phase.NAME,
    (Phase.NAME, MARKERS[ARGUMENT_BEGIN]): Phase.ARGUMENTS,
    (Phase.ARGUMENTS, MARKERS[CALL_END]): Phase.SECTION,
    (Phase.ARGUMENTS, MARKERS[SECTION_END]): Phase.SECTION,
    (Phase.SECTION, MARKERS[SECTION_END]): Phase.SECTION,
}
_MARKERS: Final = tuple(sorted({marker for _, marker in (*_TRANSITIONS_WITH_REASONING, *_TRANSITIONS_OF_TOOL_CALLS)}))
_CALL_HEADER_PATTERN: Final = re.compile(r"(.+:\d+)")


@dataclass(slots=True)
class _MessageAdditions:
    """The parts that one piece of text adds to the message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def delta(self) -> dict[str, Any] | None:
        parts = {"content": self.content, "reasoning": self.reasoning, "tool_calls": self.calls}
        return {name: part for name, part in parts.items() if part} or None


class SimulatedKimiParser:
    """Parses one choice piece by piece. Each `feed` returns the next delta, or None if there is nothing to report.

    `reads_tools` False: the engine has no tool-call parser, and tool sections are content.
    """

    def __init__(self, start: Phase, *, reads_tools: bool = True, is_engine: bool = True) -> None:
        self.phase = start
        self.called_tools = False
        self._transitions = (
            _TRANSITIONS_WITH_REASONING | _TRANSITIONS_OF_TOOL_CALLS if reads_tools else _TRANSITIONS_WITH_REASONING
        )
        self._reads_tools = reads_tools
        self._is_engine = is_engine
        self._buffer = ""
        self._after_reasoning = ""
        """White space that is reasoning only if more reasoning follows."""
        self._before_content = ""
        """White space that is content only if more content follows."""
        self._has_content = False
        self._begun_calls = 0
        self._made_up_ids = 0
        self._name = ""
        self._is_named = False
        self._arguments = ""
        self._sent_arguments = 0

    def parse_text(self, text: str, *, finished: bool = False) -> dict[str, Any] | None:
        said = _MessageAdditions()
        self._buffer += text
        while (found := self._next_marker()) is not None:
            begin, marker = found
            self._add_text(self._buffer[:begin], said)
            self._buffer = self._buffer[begin + len(marker) :]
            self._pass_marker(marker, said)
        ready = len(self._buffer) if finished else len(self._buffer) - _unfinished_marker(self._buffer)
        self._add_text(self._buffer[:ready], said)
        self._buffer = self._buffer[ready:]
        if finished:
            end = _MessageAdditions()
            self._finish_call(end)
            said.calls += end.calls
        if self._is_engine:
            self._withhold_space(said, finished)
        self.called_tools = self.called_tools or bool(said.calls)
        return said.delta()

    def _next_marker(self) -> tuple[int, str] | None:
        if "<" not in self._buffer:
            return None
        found = [(begin, marker) for marker in _MARKERS if (begin := self._buffer.find(marker)) >= 0]
        return min(found, default=None)

    def _pass_marker(self, marker: str, said: _MessageAdditions) -> None:
        phase = self._transitions.get((self.phase, marker))
        if phase is None:
            if marker == MARKERS[SECTION_BEGIN] and self.phase is Phase.REASONING:
                self.phase = Phase.CONTENT
            self._add_text(marker, said)
            return
        if self.phase is Phase.ARGUMENTS and self._is_engine:
            self._end_arguments(said)
        self.phase = phase
        if phase is Phase.NAME:
            self._begun_calls += 1
            self._name = self._arguments = ""
            self._sent_arguments = 0
            self._is_named = False
        elif phase is Phase.ARGUMENTS and not self._is_engine:
            self._report_name(said)

    def _add_text(self, text: str, said: _MessageAdditions) -> None:
        if not text:
            return
        match self.phase:
            case Phase.REASONING:
                said.reasoning += text
            case Phase.CONTENT:
                said.content += text
            case Phase.NAME:
                self._name += text
            case Phase.ARGUMENTS:
                self._arguments += text
                if not self._is_named:
                    self._report_name(said)
                withheld = self._is_engine and text[-1] in "}]" and not closing_markers(self._arguments)
                self._report_arguments(said, len(self._arguments) - withheld)
            case Phase.SECTION:
                pass

    def _report_name(self, said: _MessageAdditions, **function: str) -> None:
        if header := _CALL_HEADER_PATTERN.match(self._name.strip()):
            call_id = header[1]
            if name := call_id.split(":")[0].removeprefix("functions."):
                self._report_call(said, call_id, name, **function)

    def _report_call(self, said: _MessageAdditions, call_id: str, name: str, **function: str) -> None:
        self._is_named = True
        index = self._begun_calls - 1
        call = {"id": call_id, "type": "function", "index": index, "function": {"name": name} | function}
        said.calls.append(call)

    def _report_arguments(self, said: _MessageAdditions, end: int) -> None:
        text = self._arguments[self._sent_arguments : end]
        if not text or not self._is_named:
            return
        self._sent_arguments = end
        index = self._begun_calls - 1
        if self._is_engine and said.calls and said.calls[-1]["index"] == index:
            function = said.calls[-1]["function"]
            function["arguments"] = function.get("arguments", "") + text
        else:
            said.calls.append({"index": index, "function": {"arguments": text}})

    def _end_arguments(self, said: _MessageAdditions) -> None:
        if not self._is_named and not self._arguments:
            self._report_name(said, arguments="")
            self._report_made_up_name(said)
        self._report_arguments(said, len(self._arguments))

    def _report_made_up_name(self, said: _MessageAdditions) -> None:
        """Report a call without arguments whose header is no id (vLLM 0.32 `parser_engine.py`, `_handle_tool_end`)."""
        if not self._is_named and self._name:
            self._report_call(said, f"functions.{self._name}:{self._made_up_ids}", self._name, arguments="")
            self._made_up_ids += 1

    def _finish_call(self, said: _MessageAdditions) -> None:
        """Complete a tool call in whose middle the text ends."""
        if self.phase is Phase.ARGUMENTS:
            if self._is_engine:
                self._end_arguments(said)
            else:
                # Many older parsers hold arguments as an object, read from partial JSON, and send at the end what they
                # have not sent of it (`get_remaining_unstreamed_args`). It was never generated.
                self._arguments += closing_markers(self._arguments)
                self._report_arguments(said, len(self._arguments))
        elif self.phase is Phase.NAME and self._is_engine and self._name.strip():
            self._report_name(said, arguments="")
            self._report_made_up_name(said)

    def _withhold_space(self, said: _MessageAdditions, finished: bool) -> None:
        if said.reasoning:
            text = self._after_reasoning + said.reasoning
            said.reasoning = text.rstrip()
            self._after_reasoning = text[len(said.reasoning) :]
        if self._has_content or not self._reads_tools:
            return
        text = self._before_content + said.content
        self._before_content = ""
        self._has_content = bool(text.strip())
        if self._has_content or (finished and not self._begun_calls):
            said.content = text
        else:
            said.content = ""
            self._before_content = "" if self._begun_calls else text


def parse_complete_text(
    text: str, *, is_thinking: bool, reads_tools: bool = True, is_engine: bool = True
) -> tuple[dict[str, Any], bool]:
    """Return the message of an answer that is not streamed, and whether it calls tools.

    The prompt is not read, so the content of a generation that was resumed after its reasoning counts as reasoning.
    """
    start = Phase.REASONING if is_thinking else Phase.CONTENT
    parser = SimulatedKimiParser(start, reads_tools=reads_tools, is_engine=is_engine)
    delta = parser.parse_text(text, finished=True) or {}
    calls: dict[int, dict[str, Any]] = {}
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            function = {"name": part["function"]["name"], "arguments": ""}
            calls[part["index"]] = {"id": part["id"], "type": "function", "function": function}
        calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
    if calls and parser.phase is Phase.ARGUMENTS and not is_engine:
        # A regular expression finds whole calls only.
        calls.popitem()
    for call in calls.values():
        call["function"]["arguments"] = call["function"]["arguments"] or "{}"
    fields = {"content": delta.get("content")}
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields | {"reasoning": delta.get("reasoning")}, bool(calls)


def start_phase(prompt: Sequence[int]) -> Phase:
    """Return the phase in which the generation after a prompt begins.

    The last marker of the prompt decides (`is_reasoning_end`).
    """
    for token in reversed(prompt):
        if token == THINK:
            return Phase.REASONING
        if token in (THINK_END, SECTION_BEGIN):
            return Phase.CONTENT
    return Phase.CONTENT


def closing_markers(text: str) -> str:
    """Return the text that completes a cut JSON text: the end of a string, and brackets.

    For an empty text, an object.
    """
    if not text.strip():
        return "{}"
    brackets: list[str] = []
    is_string = is_escaped = False
    for character in text:
        if is_string:
            is_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_string = True
        elif character in "{[":
            brackets.append("}" if character == "{" else "]")
        elif character in "}]" and brackets:
            brackets.pop()
    return '"' * is_string + "".join(reversed(brackets))


def _unfinished_marker(text: str) -> int:
    """Return how many of the last characters may be the beginning of a marker."""
    begin = text.rfind("<")
    if begin < 0 or not any(marker.startswith(text[begin:]) for marker in _MARKERS):
        return 0
    return len(text) - begin
