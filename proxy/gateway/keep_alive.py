"""Bytes for a client whose streamed answer is silent, so that no proxy in front takes the connection for dead. No IO.

They are a comment, or an event that the client's API has for this, and no part of the answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Streaming


class KeptStream(Protocol):
    """The stream of an answer."""

    def is_begun(self) -> bool:
        """Return whether status and headers have gone out."""

    def keep_alive(self) -> None:
        """Send the bytes between two events, with status and headers if they have not gone out."""


class KeepAlive:
    """Times the silence of one stream. Tokens that bypass their reader are written to it, as an Output."""

    __slots__ = (
        *("_after_seconds", "_interval_seconds", "_loop", "_now", "_stream", "_timer", "has_answer", "transport"),
        "written_at",
    )

    def __init__(self, times: Streaming, stream: KeptStream) -> None:
        """Begin at once, and go on until `stop`."""
        self._after_seconds = times.keep_alive_after_seconds
        self._interval_seconds = times.keep_alive_seconds
        self._stream: KeptStream | None = stream
        self._loop = asyncio.get_running_loop()
        self._now: Callable[[], float] = self._loop.time
        self.written_at = self._now()
        self.has_answer = False
        """Some of the answer was written."""
        self.transport: asyncio.Transport | None = None
        """The client's connection, once status and headers have gone out."""
        self._timer: asyncio.TimerHandle | None = None
        self._wait(is_begun=False)

    def answered(self) -> None:
        """Note that some of the answer is being written."""
        self.has_answer = True
        self.written_at = self._now()

    def stop(self) -> None:
        """Send nothing more."""
        self._stream = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Output

    def write(self, data: bytes) -> None:
        """Write a chunk as it is."""
        self.written_at = self._now()
        assert self.transport is not None
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether nothing can be written any more."""
        return self.transport is None or self.transport.is_closing()

    # How

    def _look(self) -> None:
        stream = self._stream
        if stream is None:
            return
        is_begun, now = stream.is_begun(), self._now()
        limit = self._interval_seconds if is_begun else self._after_seconds
        if limit is not None and now - self.written_at >= limit:
            stream.keep_alive()
            self.written_at, is_begun = now, True
        self._wait(is_begun=is_begun)

    def _wait(self, *, is_begun: bool) -> None:
        """Look again when it may be due. As long as the stream has not begun, it may begin in any moment."""
        interval, after = self._interval_seconds, self._after_seconds
        due = []
        if interval is not None:
            due.append((self.written_at if is_begun else self._now()) + interval)
        if after is not None and not is_begun:
            due.append(self.written_at + after)
        self._timer = self._loop.call_at(min(due), self._look) if due else None
