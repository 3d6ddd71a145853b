"""The decoder's stream to the client: event by event, in the call stack of the socket's read.

The relay's task sleeps while tokens flow; it wakes once to commit the headers, whenever the client falls behind, and
at the end. What is passed on is passed on with its exact bytes. The role chunk is held back until the first token: as
long as the client has nothing, a failed attempt can be repeated without a seam.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from proxy.errors import Failure
from proxy.flow.transcript import Meaning, Transcript
from proxy.wire.openai import data_event, with_prompt_details
from proxy.wire.sse import EventSplitter, EventTooLong

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from proxy.connectors.base import Attempt
    from proxy.errors import UpstreamError
    from proxy.flow.client import ClientStream
    from proxy.wire.sse import Event


_END_MARK_SECONDS: Final = 1.0


class Relay:
    """Copies one attempt's stream. Owns its transcript. A Sink for the engine's answer."""

    def __init__(
        self,
        attempt: Attempt,
        client: ClientStream,
        on_content: Callable[[], None],
        *,
        include_usage: bool,
        rewrite: Callable[[dict[str, Any]], bytes] | None = None,
    ) -> None:
        """`on_content` is called with each write that holds part of the answer. `include_usage`: the client asked for
        the usage chunk. `rewrite` turns each payload into the bytes to send when the stream is merged with others; such
        a stream's usage chunk is left to the merger.
        """
        self.transcript = Transcript()
        self.has_sent = False
        """Part of the answer was given to the client: from now on the attempt cannot be repeated."""
        self.last_payload: dict[str, Any] = {}
        """The last payload with content; the pattern for a merged usage chunk."""
        self._attempt = attempt
        self._client = client
        self._on_content = on_content
        self._include_usage = include_usage
        self._rewrite = rewrite
        self._splitter = EventSplitter()
        self._held: list[bytes] = []
        self._opened = False
        self._ended = False
        self._error: UpstreamError | None = None
        self._wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, idle_seconds: float) -> None:
        """Copy until the answer is complete, up to `[DONE]`, which whoever finishes the client's stream adds.

        Raises UpstreamError when it ends before that, ClientStalled.
        """
        response = self._attempt.response
        response.limit_silence(idle_seconds)
        response.attach(self)
        while True:
            await self._wakeup
            self._wakeup = asyncio.get_running_loop().create_future()
            if self._ended:
                break
            response.pause()
            await self._client.attend()
            response.resume()
        if self._error is not None:
            raise self._error

    # Sink

    def received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            events = self._splitter.feed(data)
        except EventTooLong:
            self._end(self._attempt.response.fail(Failure.BAD_ANSWER, "an event of the stream is too long"))
            return
        output: list[bytes] = []
        has_content = False
        for event in events:
            meaning = self.transcript.read(event)
            if meaning is Meaning.CONTENT:
                has_content = True
                if not self._opened:
                    self._open()
                if self._held:
                    output += self._held
                    self._held.clear()
                if self._rewrite:
                    self.last_payload = self.transcript.payload
                    output.append(self._rewrite(self.last_payload))
                else:
                    output.append(event.raw)
            elif not self._pass_on(meaning, event, output):
                break
        if output and self._client.write(b"".join(output)):
            self._wake()
        if has_content:
            self.has_sent = True
            self._on_content()

    def ended(self, error: UpstreamError | None) -> None:
        if error is None and not self.transcript.is_complete:
            error = self._attempt.response.fail(Failure.BROKEN, "the stream ended before the answer was complete")
        # After `[DONE]` the answer is whole, whatever becomes of the connection.
        self._end(None if self.transcript.is_complete else error)

    def _pass_on(self, meaning: Meaning, event: Event, output: list[bytes]) -> bool:
        """Treat an event that is not content; False when it ends the answer."""
        payload = self.transcript.payload
        if meaning is Meaning.OPENING:
            if not self._opened:
                self._open()
            self._held.append(self._rewrite(payload) if self._rewrite else event.raw)
        elif meaning is Meaning.USAGE:
            if self._include_usage and self._rewrite is None:
                output.append(self._usage_event(event))
        elif meaning is Meaning.DONE:
            if not self.transcript.is_complete:
                self._end(self._unfinished())
                return False
            # The answer is whole. What is left is the end mark of the body, for the connection's sake.
            self._attempt.response.limit_silence(_END_MARK_SECONDS)
        elif meaning is Meaning.ERROR:
            self._end(_engine_error(self._attempt, payload, event.data))
            return False
        elif meaning is Meaning.RECOMPUTED:
            self._end(self._attempt.response.fail(Failure.RECOMPUTED, "gave the request up for lack of KV memory"))
            return False
        elif self._rewrite is None:
            # A comment, or data this gateway does not know: the client judges. Before the first token it is held, too.
            (output if self._client.has_output else self._held).append(event.raw)
        return True

    def _usage_event(self, event: Event) -> bytes:
        if not self._attempt.kv_handed_over:
            return event.raw
        usage = self.transcript.payload["usage"]
        corrected = with_prompt_details(usage, self._attempt.journey.prompt_details)
        return event.raw if corrected is usage else data_event({**self.transcript.payload, "usage": corrected})

    def _unfinished(self) -> UpstreamError:
        """The error for a stream that said `[DONE]` but never finished its answer."""
        fail = self._attempt.response.fail
        if self.has_sent:
            return fail(Failure.BROKEN, "the stream ended without a finish reason")
        # So ends in vLLM 0.18 to 0.30 what was preempted before its first token, and what could not load its KV cache.
        return fail(Failure.RECOMPUTED, "the stream ended before its first token")

    def _open(self) -> None:
        self._opened = True
        self._attempt.kv_arrived()

    def _end(self, error: UpstreamError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if not self._wakeup.done():
            self._wakeup.set_result(None)


def _engine_error(attempt: Attempt, payload: dict[str, Any], data: bytes | None) -> UpstreamError:
    """The error an engine reported inside its stream, which vLLM commits to 200 before it begins the work."""
    told = payload["error"]
    code = told.get("code") if isinstance(told, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    json_type = {"content-type": "application/json"}
    return attempt.response.refuse("reported an error in its stream", status, data, json_type)
