"""A canary's answer, read from the decoder's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.common.errors import Failure
from proxy.dialects.segment import Meaning, Segment
from proxy.wire.sse import EventSplitter, EventTooLong

if TYPE_CHECKING:
    import asyncio

    from proxy.common.errors import UpstreamError
    from proxy.connectors.legs import Attempt
    from proxy.settings import Timeouts


class CanaryReader:
    """Reads one attempt's stream. A Sink for the engine's answer."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._segment = Segment()
        self._splitter = EventSplitter()
        self._over: asyncio.Future[None] = attempt.response.loop.create_future()
        self._has_begun = False
        self.is_preempted = False
        """The decoder gave it up for lack of KV memory."""
        self.token_ids: list[int] = []
        self.text = ""

    @property
    def usage(self) -> dict[str, Any] | None:
        """What the decoder tells of the tokens; None: nothing."""
        return self._segment.usage

    async def read(self, timeouts: Timeouts) -> None:
        """Read it to its end. Raises UpstreamError when it is not complete."""
        response = self._attempt.response
        response.limit_silence(self._attempt.first_token_seconds or timeouts.first_token_seconds)
        response.attach(self)
        await self._over

    # Sink

    def received(self, data: bytes) -> bool:
        """See Sink."""
        try:
            events = self._splitter.feed(data)
        except EventTooLong:
            self._fail(Failure.BAD_ANSWER, "sent an event that is too long")
            return False
        for event in events:
            match self._segment.read(event):
                case Meaning.CONTENT:
                    self._begin()
                    self._take(self._segment.payload)
                case Meaning.RECOMPUTED:
                    self._begin()
                    self.is_preempted = True
                    self._fail(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
                case Meaning.ABORTED:
                    self._fail(Failure.ABORTED, "stopped working on the answer")
                case Meaning.ERROR:
                    self._fail(Failure.BROKEN, "reported an error in its stream")
                case Meaning.DONE:
                    self._done()
        return True

    def ended(self, error: UpstreamError | None) -> None:
        """See Sink."""
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        else:
            self._fail(Failure.BROKEN, "ended the stream before the answer was complete")

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._attempt.kv_arrived()

    def _take(self, payload: dict[str, Any]) -> None:
        for choice in payload["choices"]:
            ids, text = choice.get("token_ids"), choice.get("text")
            if isinstance(ids, list):
                self.token_ids += ids
            if isinstance(text, str):
                self.text += text

    def _done(self) -> None:
        if self._segment.is_complete:
            if not self._over.done():
                self._over.set_result(None)
            return
        if not self._has_begun:
            self._attempt.kv_lost()
        # So ends in vLLM 0.18 to 0.30 what was preempted before its first token, and what could not load its KV cache.
        self._fail(
            Failure.RECOMPUTED,
            "ended the stream without an answer: the KV cache did not come, or there was no memory for it",
        )

    def _fail(self, failure: Failure, message: str) -> None:
        if not self._over.done():
            self._over.set_exception(self._attempt.response.fail(failure, message))
