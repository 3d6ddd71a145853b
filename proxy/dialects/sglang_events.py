"""Reads the events of SGLang's `/generate`. Each event has the whole answer so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.segment import Meaning, Segment
from proxy.wire import sglang
from proxy.wire.openai import DONE_DATA, is_abort_reason
from proxy.wire.python_json import loads
from proxy.wire.sglang import find_event_error
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier_json

if TYPE_CHECKING:
    from proxy.wire.sse import Event

_FIRST_SURROGATE_PAIR: Final = 0x10000
"""The first character that UTF-16 encodes as a pair of surrogates."""
_PROMPT_MEMBERS: Final = ("id", "prompt_tokens", "cached_tokens")


class GenerateEvents(Segment):
    """The reader of a stream whose events have the whole answer so far. The last event has the finish reason."""

    has_usage_chunk = False

    def read_event(self, event: Event) -> Meaning:
        """Read the next event of a decoder's stream, and return its meaning."""
        self.payload, self.event_data = None, event.data
        if event.data is None:
            return Meaning.OTHER
        if event.data == DONE_DATA:
            self.has_done_event = True
            return Meaning.DONE
        if not event.data or event.data.isspace():
            return Meaning.OTHER
        if len(event.data) > LONG_BYTES and is_heavier_json(event.data, MAX_ANSWER_ELEMENTS):
            return Meaning.MALFORMED
        try:
            self.payload = payload = loads(event.data)
        except orjson.JSONDecodeError:
            return Meaning.MALFORMED
        if error := find_event_error(payload):
            self.payload, self.event_data = loads(error.body), error.body
            return Meaning.ERROR
        usage = sglang.usage_of_event(payload)
        if usage is None:
            is_answer = not isinstance(payload, dict) or "text" in payload or "output_ids" in payload
            return Meaning.MALFORMED if payload and is_answer else Meaning.OTHER
        self.usage = usage
        if (finish := read_finish_reason(payload)) is not None:
            if is_abort_reason(finish):
                self.is_empty_event = False
                return Meaning.ABORTED
            self.finish_reasons[0] = str(finish)
        return Meaning.CONTENT


class WatchedGenerateEvents(GenerateEvents):
    """The reader of a watched stream. It converts each event to a completion's chunk with the new part of the answer.

    The only choice of the chunk also has `meta_info` and the log probabilities of the new tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text = self._ids = 0
        self._ends_with_half_pair = False
        """Whether the text so far ends in the first half of a surrogate pair."""

    def read_event(self, event: Event) -> Meaning:
        """Read an event. It is malformed without the whole answer so far: its new part cannot be computed."""
        meaning = super().read_event(event)
        if meaning not in (Meaning.CONTENT, Meaning.ABORTED):
            return meaning
        payload = self.payload
        meta, text, ids = payload["meta_info"], payload.get("text"), payload.get("output_ids")
        if not (isinstance(text, str) and isinstance(ids, list)) or len(text) < self._text or len(ids) < self._ids:
            if meaning is Meaning.CONTENT:
                return Meaning.MALFORMED
            self.is_empty_event = True
            self.payload = _make_chunk(meta, "", [], {})
            return meaning
        logprobs = {
            name: meta[name][self._ids :] for name in sglang.OUTPUT_LOGPROBS if isinstance(meta.get(name), list)
        }
        self.payload = _make_chunk(meta, self._second_surrogate(text) + text[self._text :], ids[self._ids :], logprobs)
        self.is_empty_event = len(text) == self._text and len(ids) == self._ids
        self._text, self._ids, self._ends_with_half_pair = len(text), len(ids), _ends_with_high_surrogate(text)
        return meaning

    def _second_surrogate(self, text: str) -> str:
        """Return the second half of a surrogate pair if the text so far ends with the first half; otherwise nothing."""
        if not self._ends_with_half_pair or (character := ord(text[self._text - 1])) < _FIRST_SURROGATE_PAIR:
            return ""
        return chr(0xDC00 + (character - _FIRST_SURROGATE_PAIR) % 0x400)


def _make_chunk(meta: dict[str, Any], text: str, ids: list[Any], logprobs: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the new part of an answer as a completion's chunk."""
    reason = meta.get("finish_reason")
    reason = reason if isinstance(reason, dict) else {}
    choice = {
        "index": 0,
        "text": text,
        "logprobs": {name: entries for name, entries in logprobs.items() if entries} or None,
        "finish_reason": reason.get("type"),
        "matched_stop": reason.get("matched"),
        "token_ids": ids,
        "meta_info": meta,
    }
    return {"choices": [choice]}


def _ends_with_high_surrogate(text: str) -> bool:
    """Return whether the last character is the first half of a surrogate pair."""
    return bool(text) and 0xD800 <= ord(text[-1]) < 0xDC00


class GenerateAnswerAssembler:
    """Assembles the answer so far for a client of `/generate` from the chunks of a watched stream."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._meta: dict[str, Any] = {}

    def add_chunk(self, payload: dict[str, Any]) -> bytes:
        (choice,) = payload["choices"]
        self._text += choice["text"]
        self._ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(name, []).extend(entries)
        # Keep the first engine's facts about the prompt: a later engine has a part of the answer in its prompt.
        first: dict[str, Any] = {name: self._meta[name] for name in _PROMPT_MEMBERS if name in self._meta}
        self._meta = {**self._meta, **choice.get("meta_info", {}), **first, "completion_tokens": len(self._ids)}
        reason = choice.get("finish_reason")
        if reason == "length":
            self._meta["finish_reason"] = {"type": "length", "length": len(self._ids)}
        elif reason == "stop":
            self._meta["finish_reason"] = {"type": "stop", "matched": choice.get("matched_stop")}
        elif reason is None:
            self._meta["finish_reason"] = None
        return b""

    def truncate_to_tokens(self, tokens: int) -> None:
        """Remove text only if no token is kept, because the text of repeated tokens is skipped."""
        if not tokens:
            self._text, self._meta = "", {}
        del self._ids[tokens:]
        for entries in self._logprobs.values():
            del entries[tokens:]

    def values(self) -> dict[str, Any]:
        logprobs = {name: [*entries] for name, entries in self._logprobs.items()}
        return {"text": self._text, "output_ids": [*self._ids], "meta_info": {**self._meta, **logprobs}}


def read_finish_reason(payload: dict[str, Any]) -> Any:
    """Return the finish reason of an answer; None until the answer has ended."""
    meta = payload.get("meta_info")
    return (meta.get("finish_reason") or None) if isinstance(meta, dict) else None
