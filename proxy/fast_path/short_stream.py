"""A streamed answer that is limited to a few tokens: a few events of well-known kinds. No IO.

What a long or an unusual answer takes is not made for it: a Delivery with its Transcript, and the Relay. As soon as it
turns out to be one of these, they are made, and read what has arrived so far; what the client has of it by then
they write once more, and FastStream passes it over. So all that is done here comes to what they would do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from proxy.dialects.segment import PROMPT_IDS
from proxy.flow.chunk_writer import without_token_ids
from proxy.flow.relay import END_MARK_SECONDS
from proxy.wire.openai import DONE, data_event, with_prompt_details

if TYPE_CHECKING:
    from proxy.call import Call
    from proxy.connectors.attempt import Attempt
    from proxy.errors import UpstreamError
    from proxy.fast_path.stream import FastStream
    from proxy.flow.relay import Relay
    from proxy.observe.record import RequestRecord

MOST_PARTS: Final = 2
"""Of an answer that is read here. With more the same-looking tokens of a long answer are what counts; see
upstream/fast_forward.py."""
_MOST_BYTES: Final = 16 * 1024
_are_events: Final = re.compile(rb"(?:data: [^\r\n]+\n\n)+").fullmatch
"""Whole events of one line of data."""
_MEMBERS: Final = ("index", "delta", "text", "token_ids", "logprobs", "finish_reason", "stop_reason")
"""Those of a choice that are looked at here."""
# What a delta of text says. Calls of tools, and whatever else there may be, are not read here.
_TEXTS: Final = frozenset({"role", "content", "reasoning", "reasoning_content"})
_TEXT_TYPES: Final = {str, type(None)}
_INTEGERS: Final = {int}
_ODD_SHAPES: Final = (AttributeError, LookupError, TypeError, ValueError)


class Owner(Protocol):
    """Whose answer it is."""

    def first_output(self) -> None:
        """The decoder has begun to answer."""

    def told_gap(self, seconds: float) -> None:
        """So long was it from the first part to the second."""

    def lengthen(self) -> Relay:
        """Have a Relay take the answer, beginning with `seen`."""

    def finished(self) -> None:
        """The answer is whole."""


class _Odd(Exception):
    """An event is not of the kinds that are read here."""


class ShortStream:
    """A Sink for the decoder's answer to a call for one sequence, in the engine's own bytes."""

    __slots__ = (
        *("seen", "sent_bytes", "unsent", "usage", "writes", "written_at"),
        *("_attempt", "_client", "_owner", "_record", "_relay"),
        *("_hides_ids", "_include_usage", "_idle_seconds"),
        *("_held", "_parts", "_is_finished", "_is_done", "_is_whole", "_has_prompt"),
    )

    def __init__(
        self,
        attempt: Attempt,
        call: Call,
        client: FastStream,
        owner: Owner,
        record: RequestRecord,
        idle_seconds: float,
        *,
        hides_ids: bool,
    ) -> None:
        """`call`: as the client sent it. `hides_ids`: what the decoder tells of ids is not for the client."""
        self.seen: list[bytes] = []
        """What has arrived."""
        self.sent_bytes = 0
        """How much of the answer was written, without framing."""
        self.unsent = b""
        """The end of a whole answer, which is to be written before the end mark."""
        self.usage: dict[str, Any] | None = None
        """The usage of the whole answer; None: it was not told yet."""
        self.writes = 0
        """How many writes had part of the answer."""
        self.written_at = 0.0
        """When the first was, on the clock of the record."""
        self._attempt = attempt
        self._client = client
        self._owner = owner
        self._record = record
        self._relay: Relay | None = None
        self._hides_ids = hides_ids
        self._include_usage = call.include_usage
        self._idle_seconds = idle_seconds
        self._held = b""
        """The role chunk, until there is a part of the answer."""
        self._parts = 0
        self._is_finished = self._is_done = self._is_whole = self._has_prompt = False

    # Sink

    def received(self, data: bytes) -> bool:
        if self._relay is not None:
            return self._relay.received(data)
        before = self._parts
        try:
            output = self._read(data)
        except _Odd:
            return self._lengthen().received(data)
        self.seen.append(data)
        has_parts = self._parts > before
        if output:
            if self._is_whole:
                self.unsent = output
            else:
                self.sent_bytes += len(output)
                if self._client.write(output):
                    self._lengthen().hold()
        if has_parts:
            self._tick()
        return has_parts

    def ended(self, error: UpstreamError | None) -> None:
        if self._relay is not None:
            self._relay.ended(error)
        elif self._is_done:  # the answer is whole, whatever becomes of the connection
            self._owner.finished()
        else:
            self._lengthen().ended(error)

    # How

    def _tick(self) -> None:
        """Part of the answer went to the client."""
        self.writes += 1
        record = self._record
        now = record.clock()
        if self.writes == 1:
            self.written_at = now
            if record.first_token_seconds is None:
                record.first_token_seconds = now - record.started
        elif self.writes == 2:
            self._owner.told_gap(now - self.written_at)

    def _lengthen(self) -> Relay:
        relay = self._relay = self._owner.lengthen()
        return relay

    def _read(self, data: bytes) -> bytes:
        """What the client gets of whole events. Raises _Odd, and then nothing has happened.

        One function for all of them, as each function that is called costs more than what it does.
        """
        if len(data) > _MOST_BYTES or self._is_done or not _are_events(data):
            raise _Odd
        parts, is_finished, has_prompt = self._parts, self._is_finished, self._has_prompt
        held, usage = self._held, self.usage
        output: list[bytes] = []
        events = data[len(b"data: ") : -2].split(b"\n\ndata: ")
        is_done = events[-1] == DONE
        if is_done:
            events.pop()
        for written in events:
            told = shown = written
            if not has_prompt and (begin := told.find(PROMPT_IDS)) >= 0:  # see Segment
                has_prompt = True
                begin += len(PROMPT_IDS) - 1
                end = told.find(b"]", begin) + 1
                told = b"%bnull%b" % (told[:begin], told[end:])
                if self._hides_ids:
                    shown = told
            try:
                payload = orjson.loads(told)
                choices = payload.get("choices")
                of_all = payload.get("usage")
                if choices:
                    (choice,) = choices
                    index, delta, text, ids, logprobs, reason, stop = map(choice.get, _MEMBERS)
                    if delta is None:
                        if type(text) is not str:
                            raise _Odd
                    elif not (delta.keys() <= _TEXTS and _TEXT_TYPES.issuperset(map(type, delta.values()))):
                        raise _Odd
                    else:
                        text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
                    is_opening = reason is None and not ids and not text
                    if (
                        stop == "recomputed"
                        or (index != 0 and "index" in choice)
                        or of_all
                        or is_finished
                        or logprobs is not None
                        or (ids and (type(ids) is not list or set(map(type, ids)) != _INTEGERS))
                        or (reason is None and not delta and ids and delta is not None)
                        or (is_opening and (delta is None or "role" not in delta or parts or held))
                    ):
                        raise _Odd
                    is_finished = reason is not None
                elif (
                    payload.get("error")
                    or not (type(of_all) is dict and of_all)
                    or not is_finished
                    or usage is not None
                ):
                    raise _Odd
                else:
                    attempt = self._attempt
                    usage = of_all
                    if attempt.kv_handed_over:
                        usage = with_prompt_details(of_all, attempt.timeline.usage.prompt_details)
                    if self._include_usage:
                        raw = b"data: %b\n\n" % shown
                        output.append(raw if usage is of_all else data_event({**payload, "usage": usage}))
                    continue
            except _ODD_SHAPES:
                raise _Odd from None
            raw = b"data: %b\n\n" % (without_token_ids(shown) if self._hides_ids else shown)
            if is_opening:
                held = raw
                continue
            parts += 1
            if held:
                raw, held = held + raw, b""
            output.append(raw)
        if (parts > MOST_PARTS and not is_finished) or (is_done and (not is_finished or usage is None)):
            raise _Odd
        attempt = self._attempt
        if parts and not self._parts:
            attempt.kv_arrived()
            self._owner.first_output()
            if not is_done:
                attempt.response.limit_silence(self._idle_seconds)
        if is_done:
            self._is_whole = attempt.response.is_whole
            if not self._is_whole:
                attempt.response.limit_silence(END_MARK_SECONDS)
        self._parts, self._is_finished, self._is_done, self._has_prompt = parts, is_finished, is_done, has_prompt
        self._held, self.usage = held, usage
        return b"".join(output)
