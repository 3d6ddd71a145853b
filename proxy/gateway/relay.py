"""Reads the stream of one decoder event by event, in callbacks of the connection, without a task.

The Delivery decides what the client gets of each event. Tokens of a known shape bypass this module, see FastForward.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from proxy.common.errors import Failure, GatewayError
from proxy.dialects.segment import ABORTED, CONTENT, DONE, ERROR, MALFORMED, OPENING, RECOMPUTED, USAGE
from proxy.gateway.delivery import MAX_ATTEMPTS
from proxy.resume.overlap import AnswerMismatch
from proxy.upstream.fast_forward import TokenFormat
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.openai import names_engine_members
from proxy.wire.sse import EventSplitter, EventTooLong

if TYPE_CHECKING:
    from typing import Any

    from proxy.common.errors import UpstreamError
    from proxy.connectors.legs import Attempt
    from proxy.dialects.segment import Meaning
    from proxy.gateway.client_writer import ClientWriter
    from proxy.gateway.delivery import Delivery
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord
    from proxy.wire.sse import Event, TokenShape


END_MARK_SECONDS: Final = 1.0
"""Longest wait for the end mark of a body after the answer is complete."""
_NO_IDS: Final[frozenset[int]] = frozenset()


logger = logging.getLogger("proxy.flow.guard")

UNWRITABLE = "the answer has a form that the gateway cannot write for its client"


def log_unexpected(error: Exception) -> None:
    """Log the place of an unexpected exception, but not its text, which may quote the answer."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    logger.error("answer: cannot be written for its client: %s in %s", type(error).__name__, place)


def unwritable_error(error: Exception) -> GatewayError:
    """Log an unexpected exception, and return the error for the client."""
    log_unexpected(error)
    return GatewayError(UNWRITABLE, code=f"decode_{Failure.BAD_ANSWER}", status=502)


class TokenClock:
    """Times the first token of one unit, and one of eight gaps between tokens.

    TokenFormat does the work of `record_token` itself after the first token, to save a call for each token.
    """

    def __init__(self, record: RequestRecord, metrics: Metrics) -> None:
        self.gap_index = -1
        """The number of the last part of the answer sent to the client, or -1 if none was sent."""
        self.gap_started_at = 0.0
        """Start of the last gap that is timed, in seconds of the record's clock."""
        self.timed_gaps = 0
        """Number of gaps that were timed."""
        self.now = record.clock
        self._has_begun = False
        self._request_record = record
        self._metrics = metrics

    def record_token(self) -> None:
        """Record that a part of the answer is sent to the client."""
        self.gap_index = index = self.gap_index + 1
        if index & 6:
            return
        if index & 1:
            self.record_gap()
            return
        if not self._has_begun:
            self._has_begun = True
            self._request_record.record_first_token()
        self.gap_started_at = self.now()

    def record_gap(self) -> None:
        """Record the end of a timed gap between tokens."""
        self.timed_gaps += 1
        self._metrics.inter_token_seconds.observe(self.now() - self.gap_started_at)


class AnswerOwner(Protocol):
    """Receives the events of an answer that is being read."""

    def on_first_output(self) -> None:
        """Record that the decoder has begun to answer."""

    def on_end(self) -> None:
        """Call `UnitAnswer.check_complete`. May be called while `UnitAnswer.begin_reading` runs."""

    def on_progress(self) -> None:
        """Look at the answer soon: it has ended, or the client reads too slowly.

        If `UnitAnswer.is_ended`, call `UnitAnswer.check_complete`. Otherwise call `UnitAnswer.continue_reading` after
        the client has read enough. Do neither before this method has returned, because the caller still reads data of
        the engine.
        """


class Relay:
    """Passes the stream of one attempt on to the client. It is the Sink of the engine's answer."""

    def __init__(
        self,
        attempt: Attempt,
        delivery: Delivery,
        owner: AnswerOwner,
        writer: ClientWriter | None = None,
        clock: TokenClock | None = None,
        idle_seconds: float = 0.0,
    ) -> None:
        """Prepare to read. `Response.attach_sink` begins it.

        Args:
            attempt: The attempt whose answer is read.
            delivery: Decides what the client gets.
            owner: Receives the events of the answer.
            writer: The client's stream. None: the answer is collected.
            clock: Times each write of a part of the answer. None: nothing is timed.
            idle_seconds: Longest time between two tokens.
        """
        self.segment = delivery.begin_stream()
        self.malformed_events = 0
        """The number of unreadable events. They are passed on if the client gets the bytes of the engine."""
        self.stream_error: UpstreamError | None = None
        """Why the stream failed. None: it has not ended, or it is complete."""
        self._attempt = attempt
        self._delivery = delivery
        self._answer_owner: AnswerOwner | None = owner
        self._client_writer = writer
        self._token_clock = clock
        self._event_splitter = EventSplitter()
        self._has_decoder_begun = False
        self._is_over = False
        """Whether the answer has ended, so that further bytes are not part of it."""
        self.is_ended = False
        """Whether nothing more is read of this stream."""
        self._idle_seconds = idle_seconds
        self._token_format: TokenFormat | None = None
        """The tokens that may bypass this reader. None: there were none yet."""
        self._token_shape: TokenShape | None = None
        """The shape of these tokens."""
        self._is_bypassed = False
        """Whether tokens bypass this reader now."""
        self._bypassed_from = -1
        """The value of `TokenFormat.index` when the bypass began."""

    def continue_reading(self) -> None:
        """Continue to read, after the client has read enough."""
        if not self.is_ended:
            self._forward_tokens()
            self._attempt.response.resume_reading()

    def stop_reading(self) -> None:
        """Drop back-references, so that the relay is freed without the garbage collector."""
        self._answer_owner = None
        if self._token_format is not None and self._client_writer is not None:
            self._client_writer.connection.on_write_buffer_full = None
        self._token_format = self._token_shape = None
        self._is_bypassed = False

    # Sink

    def on_body_data(self, data: bytes) -> bool:
        if self._is_bypassed:
            self._end_bypass()
        if self._is_over:
            self._end_stream(None)  # bytes after `[DONE]` are ignored
            return False
        try:
            events = self._event_splitter.split_chunk(data)
        except EventTooLong:
            self._end_stream(
                self._attempt.response.make_failure(Failure.BAD_ANSWER, "an event of the stream is too long")
            )
            return False
        output: list[bytes] = []
        has_content = is_progress = False
        segment, delivery = self.segment, self._delivery
        for event in events:
            meaning = segment.read_event(event)
            try:
                if meaning is CONTENT:
                    # Without token ids, an empty chunk may be a token that shows nothing.
                    is_progress |= not (segment.is_empty_event and delivery.reports_token_ids)
                    if not self._has_decoder_begun:
                        self._record_decoder_begin()
                    if part := delivery.take_content(segment, event):
                        output.append(part)
                        has_content = True
                    if delivery.is_stopped:
                        self._end_stream(None)
                else:
                    self._handle_other_event(meaning, event, output)
            except AnswerMismatch:
                fail = self._attempt.response.make_failure
                self._end_stream(fail(Failure.NOT_RESUMED, "did not continue the answer it was given"))
            except UnreadableMember as odd:
                self._end_unreadable_stream(f"sent an event that cannot be read: {odd}")
            except Exception as error:
                log_unexpected(error)
                self._end_unreadable_stream(UNWRITABLE)
            if self.is_ended or segment.has_done_event:
                break
        if has_content and self._token_clock is not None:
            self._token_clock.record_token()
        if output:
            self._write_part(output[0] if len(output) == 1 else b"".join(output))
        if not self._is_over:
            self._forward_tokens()
        return is_progress

    def can_move_to_other_backend(self) -> bool:
        return self._delivery.can_continue_elsewhere()

    def on_body_end(self, error: UpstreamError | None) -> None:
        if self._is_bypassed:
            self._end_bypass()
        if self.is_ended:
            return
        if self.segment.is_complete:  # after `[DONE]` a broken connection does not matter
            error = None
        elif error is None:
            error = self._attempt.response.make_failure(
                Failure.BROKEN, "the stream ended before the answer was complete"
            )
        self.is_ended, self._is_over, self.stream_error = True, True, error
        owner = self._answer_owner
        self.stop_reading()
        if owner is None:
            return
        if error is None:
            owner.on_end()
        else:
            owner.on_progress()  # the connection may still be closing

    # Tokens that bypass this reader

    def _forward_tokens(self) -> None:
        """Let the next events bypass this reader as long as they are tokens of a known shape."""
        delivery, writer = self._delivery, self._client_writer
        shape = delivery.token_shape
        if shape is None or self._is_bypassed or self._is_over or not self._event_splitter.is_empty:
            return
        clock, tokens = self._token_clock, self._token_format
        if tokens is None or shape is not self._token_shape:
            line = None
            if writer is not None and (line := writer.chunk_output) is None:
                return
            notes, settle, skips, hides_ids = None, _ignore_tokens, _NO_IDS, False
            if delivery.is_observed:
                transcript = delivery.transcript
                notes, settle = transcript.token_lists(is_reasoning=shape.is_reasoning), transcript.settle_noted_tokens
                if shape.is_reasoning:
                    skips = frozenset(transcript.grammar.reasoning_end_ids)
                hides_ids = not delivery.writer.wants_token_ids
            may_wait = writer is None or writer.gathers_tokens
            tokens = self._token_format = TokenFormat(
                shape,
                notes,
                settle,
                line,
                clock,
                skips=skips,
                hides_ids=hides_ids,
                may_wait=may_wait,
            )
            self._token_shape = shape
        if clock is not None:
            tokens.index = clock.gap_index
        self._bypassed_from = tokens.index
        self._is_bypassed = True
        self._attempt.response.pass_tokens_on(tokens)
        if writer is not None:
            writer.connection.on_write_buffer_full = self._pause_engine
        self.segment.forget_event()  # the next one may arrive much later

    def _end_bypass(self) -> None:
        """End the bypass before an event of another shape, and take over the number of tokens."""
        self._is_bypassed = False
        tokens, clock = self._token_format, self._token_clock
        assert tokens is not None
        if clock is not None:
            clock.gap_index = tokens.index
        if tokens.index > self._bypassed_from:
            # The shape was right, so another one is worth learning. SGLang's chunks change each second.
            self._delivery.shape_attempts_left = MAX_ATTEMPTS

    # Events

    def _write_part(self, output: bytes) -> None:
        """Write a part of the answer. The last part is kept if the end of the client's stream follows immediately."""
        writer = self._client_writer
        if writer is None:
            return
        if self._is_over and not self.is_ended and self._attempt.response.is_body_complete:
            writer.write_with_next(output)
        elif writer.write(output):
            self._pause_engine()

    def _pause_engine(self) -> None:
        """Stop reading from the engine until the client has read enough."""
        # Without delay, because libuv reads up to 32 times before it runs other callbacks: 8 MiB from a fast engine.
        self._attempt.response.pause_reading()
        if self._answer_owner is not None:
            self._answer_owner.on_progress()

    def _handle_other_event(self, meaning: Meaning, event: Event, output: list[bytes]) -> None:
        """Handle an event of a decoder's stream that is not content."""
        segment, delivery, attempt = self.segment, self._delivery, self._attempt
        part = b""
        if meaning is OPENING:  # vLLM up to 0.30 sends it even if the KV cache has not arrived
            delivery.take_role_chunk(segment, event)
        elif meaning is USAGE:
            details = attempt.timeline.usage.prompt_details
            part = delivery.take_usage_chunk(segment, event, details, is_handed_over=attempt.has_kv_from_prefiller)
        elif meaning is DONE:
            if not segment.is_complete:
                self._end_stream(self._make_unfinished_error())
            # The answer is complete. Only the end mark of the body is missing, so that the connection can be reused.
            self._is_over = True
            attempt.response.limit_silence(END_MARK_SECONDS)
        elif meaning is ERROR:
            error = _make_engine_error(attempt, segment.payload, segment.event_data)
            error.quotable = delivery.quotable_texts
            self._end_stream(error)
        elif meaning is RECOMPUTED:
            part = self._read_last_chunk()
            given_up = attempt.response.make_failure(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
            self._end_stream(None if delivery.is_stopped else given_up)
        elif meaning is ABORTED:
            if self._has_decoder_begun or not segment.is_empty_event:
                part = self._read_last_chunk()
            aborted = attempt.response.make_failure(Failure.ABORTED, "aborted the answer")
            self._end_stream(None if delivery.is_stopped else aborted)
        else:
            if meaning is MALFORMED:
                self.malformed_events += 1
                passes_bytes = delivery.seam is None and delivery.writer.keeps_engine_bytes
                if not passes_bytes or names_engine_members(event.raw):
                    # It may contain a part of the answer, which the client would miss without an error.
                    self._end_unreadable_stream("sent an event that cannot be read")
                    return
                delivery.mark_transcript_incomplete()
            part = delivery.pass_other_event(segment, event)
        if part:
            output.append(part)

    def _read_last_chunk(self) -> bytes:
        """Return the bytes for the client of the last chunk of a decoder that gives up."""
        if not self._has_decoder_begun:
            self._record_decoder_begin()
        return self._delivery.take_recompute_chunk(self.segment)

    def _make_unfinished_error(self) -> UpstreamError:
        """Return the error for a stream with `[DONE]` but without a finish reason."""
        fail = self._attempt.response.make_failure
        if self._delivery.is_answer_changed:
            return fail(Failure.BROKEN, "the stream ended without a finish reason")
        if not self._has_decoder_begun:
            self._has_decoder_begun = True
            self._attempt.record_kv_loss()
        # vLLM 0.18 to 0.30 end a request so if it was preempted before its first token or could not load its KV cache.
        return fail(Failure.RECOMPUTED, "the stream ended before its first token")

    def _record_decoder_begin(self) -> None:
        """Record that the decoder has begun to answer."""
        self._has_decoder_begun = True
        self._attempt.record_kv_arrival(self._token_clock)
        self._attempt.response.limit_silence(self._idle_seconds, True)
        if self._answer_owner is not None:
            self._answer_owner.on_first_output()

    def _end_stream(self, error: UpstreamError | None) -> None:
        """End the stream at an event, while data of the engine is being read."""
        if not self.is_ended:
            self.is_ended, self._is_over, self.stream_error = True, True, error
            owner = self._answer_owner
            self.stop_reading()
            if owner is not None:
                owner.on_progress()

    def _end_unreadable_stream(self, message: str) -> None:
        """End the stream at an event after which it is unknown what the client has."""
        self._delivery.mark_transcript_incomplete()
        self._end_stream(self._attempt.response.make_unreadable_error(message))


def _ignore_tokens() -> None:
    """Do nothing, because the tokens of the stream are not recorded."""


def _make_engine_error(attempt: Attempt, payload: dict[str, Any], data: bytes | None) -> UpstreamError:
    """Return the error that an engine reports in its stream. vLLM sends the status 200 before it begins to work."""
    error = payload["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    json_type = {"content-type": "application/json"}
    return attempt.response.make_refusal("reported an error in its stream", status, data, json_type)
