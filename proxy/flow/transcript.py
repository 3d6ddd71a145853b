"""What a decoder's stream has told so far, and what each of its events means for the client. No IO.

An answer is complete only when every choice has a finish reason and the stream said `[DONE]`. vLLM 0.18 to 0.30 ends a
choice that was preempted or failed before its first token without any finish chunk, so a clean end of the HTTP body
proves nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import orjson

from proxy.wire.openai import DONE

if TYPE_CHECKING:
    from proxy.wire.sse import Event


class Meaning(Enum):
    """What an event is, for the relay."""

    OTHER = auto()  # a comment or an object nobody here knows: passed on untouched
    OPENING = auto()  # the role chunk: nothing of the answer yet
    CONTENT = auto()  # part of the answer
    USAGE = auto()  # the usage chunk, without choices
    DONE = auto()  # `[DONE]`
    ERROR = auto()  # the engine's error event
    RECOMPUTED = auto()  # the decoder gives up and asks for a new prefill; not a finish, whatever finish_reason says
    MALFORMED = auto()  # data that is not JSON, or choices that are none


class Transcript:
    """State of one decoder stream; one choice, or the several an engine streams side by side."""

    __slots__ = ("done", "finish_reasons", "open_choices", "payload", "usage")

    def __init__(self) -> None:
        self.payload: Any = None
        """The parsed data of the last event read; None when it was not JSON."""
        self.finish_reasons: dict[int, str] = {}
        self.open_choices: set[int] = set()
        self.usage: dict[str, Any] | None = None
        """The last usage seen."""
        self.done = False

    @property
    def is_complete(self) -> bool:
        """Every choice that began has finished, at least one did, and the stream said so."""
        return self.done and bool(self.finish_reasons) and not self.open_choices

    def read(self, event: Event) -> Meaning:
        """Take the next event."""
        self.payload = None
        if event.data is None:
            return Meaning.OTHER
        if event.data == DONE:
            self.done = True
            return Meaning.DONE
        try:
            self.payload = payload = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            return Meaning.MALFORMED
        if not isinstance(payload, dict):
            return Meaning.OTHER
        usage = payload.get("usage")
        has_usage = isinstance(usage, dict) and bool(usage)
        if has_usage:
            self.usage = usage
        choices = payload.get("choices")
        if choices:
            try:
                return self._read_choices(choices)
            except (AttributeError, TypeError):  # not a list of objects
                return Meaning.MALFORMED
        if payload.get("error"):
            return Meaning.ERROR
        return Meaning.USAGE if has_usage else Meaning.OTHER

    def _read_choices(self, choices: list[dict[str, Any]]) -> Meaning:
        has_content = False
        for choice in choices:
            index = choice.get("index", 0)
            reason = choice.get("finish_reason")
            if choice.get("stop_reason") == "recomputed":
                return Meaning.RECOMPUTED
            if reason is not None:
                self.finish_reasons[index] = reason
                self.open_choices.discard(index)
                has_content = True
                continue
            if index not in self.finish_reasons:  # SGLang sends hidden states after the finish
                self.open_choices.add(index)
            if not _is_opening(choice):
                has_content = True
        return Meaning.CONTENT if has_content else Meaning.OPENING


def _is_opening(choice: dict[str, Any]) -> bool:
    """Is this the chunk `{"delta": {"role": "assistant", "content": ""}}` that precedes a chat choice's first token?"""
    delta = choice.get("delta")
    return (
        delta is not None
        and "role" in delta
        and not choice.get("token_ids")
        and not any(value for name, value in delta.items() if name != "role")
    )
