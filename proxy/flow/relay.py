"""The decoder's stream to the client: event by event, in the call stack of the socket's read.

The relay's task sleeps while tokens flow; it wakes once to commit the headers, whenever the client falls behind, and
at the end. What the client gets of each event is the Delivery's to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from proxy.dialects.segment import Meaning
from proxy.errors import Failure
from proxy.flow.bypass import Bypass
from proxy.flow.guard import UNWRITABLE, report
from proxy.resume.overlap import Mismatch
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.engine_members import names_engine_members
from proxy.wire.sse import EventSplitter, EventTooLong

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from proxy.connectors.attempt import Attempt
    from proxy.errors import UpstreamError
    from proxy.flow.client import ClientWriter
    from proxy.flow.delivery import Delivery
    from proxy.flow.token_clock import TokenClock
    from proxy.resume.transcript import Transcript
    from proxy.settings import Timeouts
    from proxy.wire.sse import Event


END_MARK_SECONDS: Final = 1.0
"""How long the end mark of a body may take when the answer in it is whole."""


class OutputListener(Protocol):
    """Hears of an attempt's first output; a UnitGuard is one."""

    def first_output(self) -> None:
        """The decoder has begun to answer."""


class Relay(Bypass):
    """Copies one attempt's stream. A Sink for the engine's answer."""

    def __init__(
        self,
        attempt: Attempt,
        delivery: Delivery,
        guard: OutputListener,
        client: ClientWriter | None = None,
        clock: TokenClock | None = None,
    ) -> None:
        """`client` None: the answer is collected and not streamed. The guard is told of the first output, the clock of
        each write that holds part of the answer; they are for an answer that is streamed.
        """
        super().__init__()
        self.segment = delivery.begin_stream()
        self._attempt = attempt
        self._delivery = delivery
        self._guard = guard
        self._client = client
        self._clock = clock
        self._splitter = EventSplitter()
        self.malformed_events = 0
        """Events that cannot be read. They are passed on where the client gets the engine's own bytes."""
        self._opened = False
        self._is_over = False
        """The answer has ended, by `[DONE]` or otherwise: what follows is not of it."""
        self._ended = False
        self._idle_seconds = 0.0
        self.error: UpstreamError | None = None
        """Why the stream has ended; None: it is complete, if it has ended."""
        self._has_begun = False
        self._wake = _nobody_waits

    @property
    def is_ended(self) -> bool:
        """Nothing more comes of this stream."""
        return self._ended

    def begin(
        self, timeouts: Timeouts, wake: Callable[[], None], seen: bytes = b"", transcript: Transcript | None = None
    ) -> None:
        """Copy from now on. `wake` is called when the client must be attended to before more is read for it, and when
        the stream has ended; from within the read callback, which may not have given all of its output then.

        `seen`: what has arrived already, and somebody else has timed. `transcript`: of all that has arrived, if parts
        in the middle of the answer are not in what was seen.
        """
        self._wake = wake
        self._has_begun = True
        response = self._attempt.response
        self._idle_seconds = timeouts.idle_seconds
        response.limit_silence(self._attempt.first_token_seconds or timeouts.first_token_seconds)
        if seen:
            clock, self._clock = self._clock, None
            self.received(seen)
            self._clock, self._shape, self._is_bypassed = clock, None, False
            if transcript is not None:
                self._delivery.transcript = transcript
            self._forward_tokens()
        response.attach(self)

    def is_of(self, attempt: Attempt) -> bool:
        """Whether it copies this attempt's stream."""
        return self._attempt is attempt

    def hand_over(self, guard: OutputListener) -> None:
        """Another one is told of the first output from now on: whoever runs what was begun."""
        self._guard = guard
        if self._opened:
            guard.first_output()

    async def run(self, timeouts: Timeouts) -> None:
        """Copy until the answer is complete, up to `[DONE]`, which `ClientStream.finish` adds. It may have
        begun already.

        Raises UpstreamError when it ends before that, ClientStalled.
        """
        response = self._attempt.response
        awake = asyncio.Event()
        if self._has_begun:
            self._wake = awake.set
            awake.set()
        else:
            self.begin(timeouts, awake.set)
        try:
            while True:
                await awake.wait()
                awake.clear()
                if self._ended:
                    break
                assert self._client is not None
                await self._client.attend()
                self._forward_tokens()
                response.resume()
        finally:
            self._let_go()
        if self.error is not None:
            raise self.error

    # Sink

    def received(self, data: bytes) -> bool:
        if self._is_bypassed:
            self._look_back(self._clock, self._delivery.shapes)
        if self._is_over:
            self._end(None)  # there is more after `[DONE]`: its end is not waited for
            return False
        try:
            events = self._splitter.feed(data)
        except EventTooLong:
            self._end(self._attempt.response.fail(Failure.BAD_ANSWER, "an event of the stream is too long"))
            return False
        output: list[bytes] = []
        has_content = is_progress = False
        for event in events:
            meaning = self.segment.read(event)
            try:
                if meaning is Meaning.CONTENT:
                    # Where ids are not told, an empty chunk may be a token that shows nothing.
                    is_progress |= not (self.segment.is_mute and self._delivery.tells_ids)
                    if not self._opened:
                        self._open()
                    if part := self._delivery.content(self.segment, event):
                        output.append(part)
                        has_content = True
                    if self._delivery.is_stopped:
                        self._end(None)
                else:
                    self._read_other(meaning, event, output)
            except Mismatch:
                fail = self._attempt.response.fail
                self._end(fail(Failure.NOT_RESUMED, "did not continue the answer it was given"))
            except UnreadableMember as odd:
                self._end_unreadable(f"sent an event that cannot be read: {odd}")
            except Exception as error:
                report(error)
                self._end_unreadable(UNWRITABLE)
            if self._ended or self.segment.done:
                break
        if output:
            self._give(b"".join(output))
        if has_content and self._clock is not None:
            self._clock.tick()
        self._forward_tokens()
        return is_progress

    def _forward_tokens(self) -> None:
        """Have the next events bypass this relay, if they are tokens that look like one before."""
        delivery, client = self._delivery, self._client
        shape = delivery.shape
        if shape is None or self._is_bypassed or self._is_over or not self._splitter.is_empty:
            return
        is_observed = delivery.is_observed
        transcript = delivery.transcript if is_observed else None
        hides_ids = is_observed and not delivery.writer.wants_ids
        if self._let_pass(shape, self._attempt.response, client, self._clock, transcript, hides_ids=hides_ids):
            if client is not None:
                client.protocol.on_full = self.hold
            self.segment.forget_event()  # it may be the last one for long

    def _give(self, output: bytes) -> None:
        if self._client is not None and self._client.write(output):
            self.hold()

    def hold(self) -> None:
        """Hold the engine back until the client has been attended to."""
        # At once: libuv reads up to 32 times before it runs anything else, which is 8 MiB of a fast engine.
        self._attempt.response.pause()
        self._wake()

    def ended(self, error: UpstreamError | None) -> None:
        if self._is_bypassed:
            self._look_back(self._clock, self._delivery.shapes)
        if self.segment.is_complete:  # after `[DONE]` the answer is whole, whatever becomes of the connection
            error = None
        elif error is None:
            error = self._attempt.response.fail(Failure.BROKEN, "the stream ended before the answer was complete")
        self._end(error)

    def _read_other(self, meaning: Meaning, event: Event, output: list[bytes]) -> None:
        """Treat an event that is not content."""
        segment, delivery, attempt = self.segment, self._delivery, self._attempt
        part = b""
        if meaning is Meaning.OPENING:  # no sign of the KV cache: vLLM up to 0.30 sends it also when that did not come
            delivery.opening(segment, event)
        elif meaning is Meaning.USAGE:
            details = attempt.timeline.usage.prompt_details
            part = delivery.usage_chunk(segment, event, details, handed_over=attempt.kv_handed_over)
        elif meaning is Meaning.DONE:
            if not segment.is_complete:
                self._end(self._unfinished())
            # The answer is whole. What is left is the end mark of the body, for the connection's sake.
            self._is_over = True
            attempt.response.limit_silence(END_MARK_SECONDS)
        elif meaning is Meaning.ERROR:
            self._end(_engine_error(attempt, segment.payload, segment.data))
        elif meaning is Meaning.RECOMPUTED:
            part = self._read_last_words()
            given_up = attempt.response.fail(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
            self._end(None if delivery.is_stopped else given_up)
        elif meaning is Meaning.ABORTED:
            if self._opened or not segment.is_mute:
                part = self._read_last_words()
            aborted = attempt.response.fail(Failure.ABORTED, "stopped working on the answer")
            self._end(None if delivery.is_stopped else aborted)
        else:
            if meaning is Meaning.MALFORMED:
                self.malformed_events += 1
                if not delivery.passes_bytes or names_engine_members(event.raw):
                    # It may hold a part of the answer, which the client would miss without a word.
                    self._end_unreadable("sent an event that cannot be read")
                    return
                delivery.lose_track()
            part = delivery.other(segment, event)
        if part:
            output.append(part)

    def _read_last_words(self) -> bytes:
        """Return what the client gets of the event with which a decoder gives up."""
        if not self._opened:
            self._open()
        return self._delivery.recomputed(self.segment)

    def _unfinished(self) -> UpstreamError:
        """The error for a stream that said `[DONE]` but never finished its answer."""
        fail = self._attempt.response.fail
        if self._delivery.is_touched:
            return fail(Failure.BROKEN, "the stream ended without a finish reason")
        if not self._opened:
            self._opened = True
            self._attempt.kv_lost()
        # So ends in vLLM 0.18 to 0.30 what was preempted before its first token, and what could not load its KV cache.
        return fail(Failure.RECOMPUTED, "the stream ended before its first token")

    def _open(self) -> None:
        self._opened = True
        self._attempt.kv_arrived()
        self._attempt.response.limit_silence(self._idle_seconds, True)
        self._guard.first_output()

    def _end(self, error: UpstreamError | None) -> None:
        if not self._ended:
            self._ended, self._is_over, self.error = True, True, error
            wake = self._wake
            self._let_go()
            wake()

    def _end_unreadable(self, message: str) -> None:
        """End at an event after which it is not known what the client has."""
        self._delivery.lose_track()
        self._end(self._attempt.response.unreadable(message))

    def _let_go(self) -> None:
        """Of those who know this relay, and would be cycles of garbage with it."""
        self._wake = _nobody_waits
        if self._tokens is not None and self._client is not None:
            self._client.protocol.on_full = None
        self._tokens = self._shape = None
        self._is_bypassed = False


def _nobody_waits() -> None:
    """Before a stream is copied."""


def _engine_error(attempt: Attempt, payload: dict[str, Any], data: bytes | None) -> UpstreamError:
    """The error an engine reported inside its stream, which vLLM commits to 200 before it begins the work."""
    told = payload["error"]
    code = told.get("code") if isinstance(told, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    json_type = {"content-type": "application/json"}
    return attempt.response.refuse("reported an error in its stream", status, data, json_type)
