"""The events of SGLang's `/generate`: each has the answer so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.segment import Meaning, Segment
from proxy.wire import sglang
from proxy.wire.finish import is_given_up
from proxy.wire.openai import DONE
from proxy.wire.python_json import loads
from proxy.wire.sglang_errors import error_of
from proxy.wire.weight import LONG_BYTES, MAX_ANSWER_ELEMENTS, is_heavier

if TYPE_CHECKING:
    from proxy.wire.sse import Event

_FIRST_PAIR: Final = 0x10000
"""The first character that takes a pair of surrogates."""
_OF_THE_PROMPT: Final = ("id", "prompt_tokens", "cached_tokens")


class Events(Segment):
    """A stream whose every event has the answer so far, and the last one the reason for its end."""

    has_usage_chunk = False

    __slots__ = ()

    def read(self, event: Event) -> Meaning:
        """Take the next event."""
        self.payload, self.data = None, event.data
        if event.data is None:
            return Meaning.OTHER
        if event.data == DONE:
            self.done = True
            return Meaning.DONE
        if not event.data or event.data.isspace():
            return Meaning.OTHER
        if len(event.data) > LONG_BYTES and is_heavier(event.data, MAX_ANSWER_ELEMENTS):
            return Meaning.MALFORMED
        try:
            self.payload = payload = loads(event.data)
        except orjson.JSONDecodeError:
            return Meaning.MALFORMED
        if told := error_of(payload):
            self.payload, self.data = loads(told.body), told.body
            return Meaning.ERROR
        usage = sglang.usage_of(payload)
        if usage is None:
            is_answer = not isinstance(payload, dict) or "text" in payload or "output_ids" in payload
            return Meaning.MALFORMED if payload and is_answer else Meaning.OTHER
        self.usage = usage
        if (finish := finish_of(payload)) is not None:
            if is_given_up(finish):
                self.is_mute = False
                return Meaning.ABORTED
            self.finish_reasons[0] = str(finish)
        return Meaning.CONTENT


class WatchedEvents(Events):
    """The same, with what each event adds to the answer in the shape of a completion's chunk: `meta_info`, and the log
    probabilities of the tokens, lists that grow likewise, are in its only choice.
    """

    __slots__ = ("_ids", "_is_half", "_text")

    def __init__(self) -> None:
        super().__init__()
        self._text = self._ids = 0
        self._is_half = False
        """The text so far ends in the first half of a surrogate pair."""

    def read(self, event: Event) -> Meaning:
        """See Segment. An event without the whole answer cannot be read, as it does not say what it adds."""
        meaning = super().read(event)
        if meaning not in (Meaning.CONTENT, Meaning.ABORTED):
            return meaning
        payload = self.payload
        meta, text, ids = payload["meta_info"], payload.get("text"), payload.get("output_ids")
        if not (isinstance(text, str) and isinstance(ids, list)) or len(text) < self._text or len(ids) < self._ids:
            if meaning is Meaning.CONTENT:
                return Meaning.MALFORMED
            self.is_mute = True
            self.payload = _chunk(meta, "", [], {})
            return meaning
        told = {name: meta[name][self._ids :] for name in sglang.OUTPUT_LOGPROBS if isinstance(meta.get(name), list)}
        self.payload = _chunk(meta, self._other_half(text) + text[self._text :], ids[self._ids :], told)
        self.is_mute = len(text) == self._text and len(ids) == self._ids
        self._text, self._ids, self._is_half = len(text), len(ids), _ends_in_half(text)
        return meaning

    def _other_half(self, text: str) -> str:
        """Return what makes one character of the half that was read last; empty if there is none."""
        if not self._is_half or (character := ord(text[self._text - 1])) < _FIRST_PAIR:
            return ""
        return chr(0xDC00 + (character - _FIRST_PAIR) % 0x400)


def _chunk(meta: dict[str, Any], text: str, ids: list[Any], logprobs: dict[str, list[Any]]) -> dict[str, Any]:
    """Return what an event adds to an answer in the shape of a completion's chunk."""
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


def _ends_in_half(text: str) -> bool:
    """Whether the last character is the first half of a surrogate pair."""
    return bool(text) and 0xD800 <= ord(text[-1]) < 0xDC00


class AnswerSoFar:
    """What a client of `/generate` is told, from the chunks of a watched answer: one event has all of it."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._meta: dict[str, Any] = {}

    def add(self, payload: dict[str, Any]) -> bytes:
        """See WatchedWhole."""
        (choice,) = payload["choices"]
        self._text += choice["text"]
        self._ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(name, []).extend(entries)
        # What is told of the prompt is the first engine's: another one has a part of the answer in its prompt.
        first: dict[str, Any] = {name: self._meta[name] for name in _OF_THE_PROMPT if name in self._meta}
        self._meta = {**self._meta, **choice.get("meta_info", {}), **first, "completion_tokens": len(self._ids)}
        reason = choice.get("finish_reason")
        if reason == "length":
            self._meta["finish_reason"] = {"type": "length", "length": len(self._ids)}
        elif reason == "stop":
            self._meta["finish_reason"] = {"type": "stop", "matched": choice.get("matched_stop")}
        elif reason is None:
            self._meta["finish_reason"] = None
        return b""

    def cut(self, tokens: int) -> None:
        """See WatchedWhole. Text is not taken back, unless all is: what is generated again is not told again."""
        if not tokens:
            self._text, self._meta = "", {}
        del self._ids[tokens:]
        for entries in self._logprobs.values():
            del entries[tokens:]

    def values(self) -> dict[str, Any]:
        """See WatchedWhole."""
        logprobs = {name: [*entries] for name, entries in self._logprobs.items()}
        return {"text": self._text, "output_ids": [*self._ids], "meta_info": {**self._meta, **logprobs}}


def finish_of(payload: dict[str, Any]) -> Any:
    """Why an answer has ended; None while it goes on."""
    meta = payload.get("meta_info")
    return (meta.get("finish_reason") or None) if isinstance(meta, dict) else None
