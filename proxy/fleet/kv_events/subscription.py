"""The subscription to one rank's KV events: its sockets, and the sequence in which messages come.

A message has three frames: a topic, a sequence number (8 bytes, big-endian) and a batch. Numbers begin with 0 when the
publisher starts. Some are missing where this process or the network was too slow; who offers a replay endpoint is asked
for them: a request is a number, the answer all messages from there on that are still known, and then one numbered -1.
ZeroMQ connects again by itself, ever more seldom.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import zmq

from proxy.fleet.kv_events.blocks import Blocks
from proxy.wire.kv_events import AllCleared, BlocksRemoved, BlocksStored, Unreadable, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.fleet.kv_events.messages import EventSource, Word

_AT_ONCE: Final = 200
_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_WAITING: Final = 1000
"""Messages in ZeroMQ's queue. Further ones are lost."""
_RECONNECT_MS: Final = (100, 10_000)
# A peer that is gone without a word would otherwise be listened to for ever.
_HEARTBEAT_MS: Final = (5_000, 15_000)
_REPLAY_SECONDS: Final = 2.0
_KINDS: Final = {BlocksStored: "stored", BlocksRemoved: "removed", AllCleared: "cleared"}


class CannotOpen(Exception):
    """There are too many sockets, or there can be no such endpoint. The text says which, and why."""


class Subscription:
    """To one source. `close` it at the end. Raises CannotOpen."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> None:
        self.blocks = Blocks()
        self.events: Counter[str] = Counter()
        """How many have come, by kind."""
        self.words: Counter[Word] = Counter()
        """What has befallen, and how often."""
        self.why = ""
        """What was wrong with the last message or event that could not be read."""
        self.unopened = ""
        """Why lost messages cannot be asked for; empty: they can, or were not."""
        self.socket = _socket(context, zmq.SUB, source.endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self.replay: zmq.Socket[bytes] | None = None
        """Where missing messages come from, while they are waited for."""
        self._context = context
        self._replay_endpoint = source.replay_endpoint
        self._replay_until = 0.0
        self._held: deque[tuple[int, bytes]] = deque()  # what came while they are
        self._next: int | None = None

    def close(self) -> None:
        """Nothing comes any more."""
        for socket in (self.socket, self.replay):
            if socket is not None:
                socket.close(linger=0)

    @property
    def is_replaying(self) -> bool:
        """What was lost has been asked for."""
        return self.replay is not None

    def receive(self) -> bool:
        """Take what has come. Whether there may be more."""
        for frames in _frames(self.socket):
            if len(frames) != 3 or len(frames[1]) != 8:
                self._cannot_read(f"{len(frames)} frames are no message")
            elif self.replay is None:
                self._take(int.from_bytes(frames[1], "big"), frames[2])
            else:
                self._held.append((int.from_bytes(frames[1], "big"), frames[2]))
        if self.replay is not None:
            self._receive_replay(self.replay)
        return any(socket is not None and _has_more(socket) for socket in (self.socket, self.replay))

    def _take(self, number: int, batch: bytes) -> None:
        if self._next is not None and number != self._next:
            if number < self._next:
                self.words["started_anew"] += 1
                self.blocks.started_anew()
            elif self._asks_again():
                self._held.append((number, batch))
                return
            else:
                self._miss()
        self._read(number, batch)

    def _read(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events = decode(batch)
        except ValueError as error:
            self._cannot_read(str(error))
            return
        for event in events:
            if isinstance(event, Unreadable):
                self._cannot_read(event.why)
            else:
                self.events[_KINDS[type(event)]] += 1
        self.blocks.take(events)

    def _cannot_read(self, why: str) -> None:
        self.events["unreadable"] += 1
        self.why = why[:200]

    def _miss(self) -> None:
        self.words["lost"] += 1
        self.blocks.missed()

    # What was lost is asked for once more

    def _asks_again(self) -> bool:
        """False: nobody can be asked."""
        assert self._next is not None
        if self._replay_endpoint is None:
            return False
        try:
            self.replay = _socket(self._context, zmq.DEALER, self._replay_endpoint)
        except CannotOpen as error:
            self.unopened = str(error)
            return False
        self.replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        self._replay_until = time.monotonic() + _REPLAY_SECONDS
        return True

    def _receive_replay(self, replay: zmq.Socket[bytes]) -> None:
        is_over = time.monotonic() >= self._replay_until or len(self._held) >= _MOST_WAITING
        for frames in _frames(replay):
            if len(frames) < 2 or len(frames[-2]) != 8:
                continue
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number < 0:
                is_over = True
            elif number == self._next:
                self._read(number, frames[-1])
        if is_over:
            self._end_replay(replay)

    def _end_replay(self, replay: zmq.Socket[bytes]) -> None:
        """Go on with what has come meanwhile."""
        replay.close(linger=0)
        self.replay = None
        held, self._held = self._held, deque()
        first = held[0][0]
        if self._next is not None and first > self._next:
            self._miss()
            self._next = first
        else:
            self.words["replayed"] += 1
        for number, batch in held:
            if self.is_replaying:
                self._held.append((number, batch))
            elif self._next is None or number >= self._next:
                self._take(number, batch)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Raises CannotOpen."""
    least, most = _RECONNECT_MS
    every, within = _HEARTBEAT_MS
    socket = None
    try:
        socket = context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _MOST_WAITING),
            (zmq.MAXMSGSIZE, _MOST_BYTES),
            (zmq.RECONNECT_IVL, least),
            (zmq.RECONNECT_IVL_MAX, most),
            (zmq.HEARTBEAT_IVL, every),
            (zmq.HEARTBEAT_TIMEOUT, within),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        if socket is not None:
            socket.close()
        raise CannotOpen(f"{endpoint}: {zmq.strerror(error.errno or 0)}") from None
    return socket


def _has_more(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
