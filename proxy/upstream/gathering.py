"""Reads several tokens of a stream together while the event loop has much to do.

A read and a write take most of a token's time, whatever their size. So under load the sockets of streams are read once
in a few tens of milliseconds. One timer serves all streams, because a timer for each would cost what it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

    from proxy.settings import Streaming

FIRST_TOKENS: Final = 8
"""The number of tokens at the beginning of an answer that never wait."""
NEVER: Final = 1 << 62
"""The value of `TokenFormat.first_waiting_index` if no token of the stream waits."""
_MAX_SECONDS: Final = 0.05
_FIRST_SECONDS: Final = 0.0125
"""The shortest time between two reads. A shorter one would rarely find two tokens."""
_SLACK_SHARE: Final = 0.2
"""The time is halved if the load is lower than its limit by this share of a core. So it does not change back and forth
because of the CPU time that it saves."""
_STREAMS_AT_ONCE: Final = 64
"""The number of streams that are read before other callbacks of the event loop run. It is the pump's MAX_EVENTS."""


def next_round_seconds(seconds: float, busy_share: float, streaming: Streaming) -> float:
    """Return the time between two reads of a stream in seconds; 0: each token is read at once.

    Args:
        seconds: The time until now.
        busy_share: The CPU time of the event loop in the last interval, as a share of a core.
        streaming: The settings.
    """
    wanted = streaming.gather_seconds
    if isinstance(wanted, float):
        return wanted
    if busy_share > streaming.gather_above_cpu_share:
        return min(max(2 * seconds, _FIRST_SECONDS), _MAX_SECONDS)
    if busy_share < streaming.gather_above_cpu_share - _SLACK_SHARE:
        return seconds / 2 if seconds > _FIRST_SECONDS else 0.0
    return seconds


class TokenPump(Protocol):
    """The Pump of the worker."""

    def watch_sockets(self) -> None:
        """Forward tokens whenever they arrive."""

    def stop_watching(self) -> None:
        """Forward tokens only when `forward_arrived_tokens` is called."""

    def forward_arrived_tokens(self) -> int:
        """Forward the tokens that have arrived on some streams. Return the number of these streams."""


class WaitingStream(Protocol):
    """A connection that has stopped reading until the next round."""

    def stop_waiting(self) -> None:
        """Read the socket again."""


class TokenGathering:
    """The timer that reads the streams of one worker in rounds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pump: TokenPump | None) -> None:
        """`pump`: forwards tokens in C; None if the module is not built."""
        self.round_seconds = 0.0
        """Time between two rounds; 0: tokens do not wait."""
        self._loop = loop
        self._token_pump = pump
        self._round_timer: asyncio.TimerHandle | None = None
        self._waiting_streams: list[WaitingStream] = []

    def add_stream(self, stream: WaitingStream) -> None:
        """Call `stop_waiting` of a stream in the next round."""
        self._waiting_streams.append(stream)

    def set_round_seconds(self, seconds: float) -> None:
        """Set the time between two rounds; 0: tokens do not wait."""
        before, self.round_seconds = self.round_seconds, seconds
        if seconds and not before:
            if self._token_pump is not None:
                self._token_pump.stop_watching()
            self._begin_round()
        elif before and not seconds:
            assert self._round_timer is not None
            self._round_timer.cancel()
            if self._token_pump is not None:
                self._token_pump.watch_sockets()
            self._take_waiting()

    def _begin_round(self) -> None:
        self._round_timer = self._loop.call_later(self.round_seconds, self._begin_round)
        if self._token_pump is not None:
            self._read_pumped()
        self._take_waiting()

    def _read_pumped(self) -> None:
        assert self._token_pump is not None
        if self._token_pump.forward_arrived_tokens() == _STREAMS_AT_ONCE and self.round_seconds:
            self._loop.call_soon(self._read_pumped)

    def _take_waiting(self) -> None:
        waiting, self._waiting_streams = self._waiting_streams, []
        if waiting:
            self._resume_streams(waiting)

    def _resume_streams(self, waiting: list[WaitingStream]) -> None:
        """Let streams read, and remove them from the list."""
        for stream in waiting[-_STREAMS_AT_ONCE:]:
            stream.stop_waiting()
        del waiting[-_STREAMS_AT_ONCE:]
        if waiting:
            self._loop.call_soon(self._resume_streams, waiting)
