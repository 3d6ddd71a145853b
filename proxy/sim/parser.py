"""Kimi K2 output parsing as vLLM does it: text with markers to reasoning, content and tool-call deltas.

The state machine is that of vLLM `parser/kimi_k2.py`: a tool section ends reasoning, text after the section is
suppressed, and a marker without a transition in the current state leaks as text, which is what happens when a
generation is resumed inside a tool section.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from proxy.sim.tokenizer import (
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


_NEXT: Final[dict[tuple[Phase, str], Phase]] = {
    (Phase.REASONING, MARKERS[THINK]): Phase.REASONING,
    (Phase.REASONING, MARKERS[THINK_END]): Phase.CONTENT,
    (Phase.CONTENT, MARKERS[THINK_END]): Phase.CONTENT,
    (Phase.REASONING, MARKERS[SECTION_BEGIN]): Phase.SECTION,
    (Phase.CONTENT, MARKERS[SECTION_BEGIN]): Phase.SECTION,
    (Phase.SECTION, MARKERS[CALL_BEGIN]): Phase.NAME,
    (Phase.NAME, MARKERS[ARGUMENT_BEGIN]): Phase.ARGUMENTS,
    (Phase.ARGUMENTS, MARKERS[CALL_END]): Phase.SECTION,
    (Phase.ARGUMENTS, MARKERS[SECTION_END]): Phase.SECTION,
    (Phase.SECTION, MARKERS[SECTION_END]): Phase.SECTION,
}
_MARKERS: Final = tuple(sorted({marker for _, marker in _NEXT}))


class KimiParser:
    """Parses one choice incrementally; each `feed` returns the delta message, None when there is nothing to say."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._phase = _start_phase(prompt)
        self._buffer = ""
        self._name = ""
        self._calls = 0

    @property
    def called_tools(self) -> bool:
        return self._calls > 0

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any] | None:
        self._buffer += text
        delta: dict[str, Any] = {}
        while (found := self._next_marker()) is not None:
            begin, marker = found
            self._say(self._buffer[:begin], delta)
            self._buffer = self._buffer[begin + len(marker) :]
            self._pass(marker, delta)
        ready = len(self._buffer) if finished else len(self._buffer) - _unfinished_marker(self._buffer)
        self._say(self._buffer[:ready], delta)
        self._buffer = self._buffer[ready:]
        return delta or None

    def _next_marker(self) -> tuple[int, str] | None:
        if "<" not in self._buffer:
            return None
        found = [(begin, marker) for marker in _MARKERS if (begin := self._buffer.find(marker)) >= 0]
        return min(found, default=None)

    def _pass(self, marker: str, delta: dict[str, Any]) -> None:
        phase = _NEXT.get((self._phase, marker))
        if phase is None:
            self._say(marker, delta)
            return
        if phase is Phase.ARGUMENTS:
            self._open_call(delta)
        self._phase = phase

    def _say(self, text: str, delta: dict[str, Any]) -> None:
        if not text or self._phase is Phase.SECTION:
            return
        if self._phase is Phase.NAME:
            self._name += text
        elif self._phase is Phase.ARGUMENTS:
            delta.setdefault("tool_calls", []).append({"index": self._calls - 1, "function": {"arguments": text}})
        else:
            field = "reasoning" if self._phase is Phase.REASONING else "content"
            delta[field] = delta.get(field, "") + text

    def _open_call(self, delta: dict[str, Any]) -> None:
        call_id, self._name = self._name.strip(), ""
        name = call_id.split(":")[0].removeprefix("functions.")
        call = {"id": call_id, "type": "function", "index": self._calls, "function": {"name": name}}
        delta.setdefault("tool_calls", []).append(call)
        self._calls += 1


def parse_whole(prompt: Sequence[int], text: str) -> tuple[dict[str, Any], bool]:
    """The fields of a non-streamed message, and whether it calls tools."""
    parser = KimiParser(prompt)
    delta = parser.feed(text, finished=True) or {}
    calls: list[dict[str, Any]] = []
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            function = {"name": part["function"]["name"], "arguments": ""}
            calls.append({"id": part["id"], "type": "function", "function": function})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    fields = {"content": delta.get("content")}
    if calls:
        fields["tool_calls"] = calls
    return fields | {"reasoning": delta.get("reasoning")}, bool(calls)


def _start_phase(prompt: Sequence[int]) -> Phase:
    for token in reversed(prompt):
        if token == THINK:
            return Phase.REASONING
        if token in (THINK_END, SECTION_BEGIN):
            return Phase.CONTENT
    return Phase.CONTENT


def _unfinished_marker(text: str) -> int:
    """How many last characters could be the beginning of a marker."""
    begin = text.rfind("<")
    if begin < 0 or not any(marker.startswith(text[begin:]) for marker in _MARKERS):
        return 0
    return len(text) - begin
