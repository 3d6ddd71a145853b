"""The process that subscribes to KV events: `python -m proxy.fleet.kv_events.subscriber`.

It is a separate process, because engines send thousands of events a second, and because ZeroMQ aborts its process if
an internal check fails. A worker talks to it through pipes; see messages.py.

A message of a publisher has three frames: topic, sequence number (8 bytes, big-endian) and batch. Numbers begin at 0
when the publisher starts. Numbers are missing if this process or the network was too slow. A replay endpoint repeats
lost messages: the request is a number; the answer is all messages from there that the publisher still has, and a last
one with the number -1. ZeroMQ reconnects with growing pauses.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, deque
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from proxy.fleet.kv_events.blocks import MAX_BLOCKS, MAX_BLOCKS_OF_ALL, Blocks, sum_of_ranks
from proxy.fleet.kv_events.messages import EventSource, Gap, InstanceReport, SubscribeTo
from proxy.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, UnreadableEvent, decode_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT_SECONDS: Final = 0.1
_decode_command: Final = msgspec.json.Decoder(SubscribeTo).decode
_encode: Final = msgspec.json.Encoder().encode


_MAX_MESSAGES_PER_READ: Final = 200
_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
_MAX_QUEUED_MESSAGES: Final = 1000
"""Length of ZeroMQ's queue. Further messages are lost."""
_RECONNECT_MS: Final = (100, 10_000)
# Interval and timeout. Without heartbeats, a peer that vanished would never be noticed.
_HEARTBEAT_MS: Final = (5_000, 15_000)
_REPLAY_SECONDS: Final = 2.0
_KINDS: Final = {BlocksStored: "stored", BlocksRemoved: "removed", AllBlocksCleared: "cleared"}


class CannotOpen(Exception):
    """A socket could not be opened. The text names the endpoint and the reason."""


class Subscription:
    """The subscription to one rank. Raises CannotOpen. Must be closed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> None:
        self.blocks = Blocks()
        self.events: Counter[str] = Counter()
        """Number of events by kind, since the last report."""
        self.gaps: Counter[Gap] = Counter()
        """Number of gaps by kind, since the last report."""
        self.unreadable = ""
        """Problem of the last message or event that could not be read; empty if there was none."""
        self.unopened = ""
        """Reason why the replay endpoint cannot be opened; empty if it can, or was not needed."""
        self.socket = _socket(context, zmq.SUB, source.endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self.replay: zmq.Socket[bytes] | None = None
        """Socket for lost messages, while a replay runs; None otherwise."""
        self._context = context
        self._replay_endpoint = source.replay_endpoint
        self._replay_until = 0.0
        self._held: deque[tuple[int, bytes]] = deque()
        """Numbers and batches that arrived during the replay."""
        self._next: int | None = None
        """Number of the next message; None before the first."""

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self.socket, self.replay):
            if socket is not None:
                socket.close(linger=0)

    @property
    def is_replaying(self) -> bool:
        """Whether a replay of lost messages runs."""
        return self.replay is not None

    def receive(self) -> bool:
        """Take the messages that have arrived, and return whether there may be more."""
        for frames in _frames(self.socket):
            if len(frames) != 3 or len(frames[1]) != 8:
                self._cannot_read(f"a message has {len(frames)} frames")
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
                self.gaps["started_anew"] += 1
                self.blocks.restarted()
            elif self._starts_replay():
                self._held.append((number, batch))
                return
            else:
                self._miss()
        self._read(number, batch)

    def _read(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events = decode_batch(batch)
        except ValueError as error:
            self._cannot_read(str(error))
            return
        for event in events:
            if isinstance(event, UnreadableEvent):
                self._cannot_read(event.reason)
            else:
                self.events[_KINDS[type(event)]] += 1
        self.blocks.take(events)

    def _cannot_read(self, problem: str) -> None:
        self.events["unreadable"] += 1
        self.unreadable = problem[:200]

    def _miss(self) -> None:
        self.gaps["lost"] += 1
        self.blocks.note_lost_events()

    # Replay of lost messages

    def _starts_replay(self) -> bool:
        """Request the lost messages, and return whether that is possible."""
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
        is_over = time.monotonic() >= self._replay_until or len(self._held) >= _MAX_QUEUED_MESSAGES
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
        """Continue with the messages that arrived during the replay."""
        replay.close(linger=0)
        self.replay = None
        held, self._held = self._held, deque()
        first = held[0][0]
        if self._next is not None and first > self._next:
            self._miss()
            self._next = first
        else:
            self.gaps["replayed"] += 1
        for number, batch in held:
            if self.is_replaying:
                self._held.append((number, batch))
            elif self._next is None or number >= self._next:
                self._take(number, batch)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Return a connected socket. Raises CannotOpen."""
    min_reconnect_ms, max_reconnect_ms = _RECONNECT_MS
    heartbeat_ms, heartbeat_timeout_ms = _HEARTBEAT_MS
    socket = None
    try:
        socket = context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _MAX_QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, min_reconnect_ms),
            (zmq.RECONNECT_IVL_MAX, max_reconnect_ms),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms),
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
    for _ in range(_MAX_MESSAGES_PER_READ):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class Subscriber:
    """All subscriptions of the process. Must be closed."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The default is 1,023 sockets, and each rank needs one or two.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._wanted: list[EventSource] = []
        self._subscriptions: dict[EventSource, Subscription] = {}
        self._unopened: dict[str, str] = {}
        """An endpoint of each instance that cannot be opened, and the reason, until it is reported."""
        self.poller = zmq.Poller()

    def close(self) -> None:
        """Close all subscriptions."""
        self.subscribe_to([])
        self._context.term()

    def subscribe_to(self, sources: list[EventSource]) -> None:
        """Subscribe to these sources and to no others. Each call retries sources that could not be opened."""
        self._wanted = sources
        self._unopened = {}
        for removed in self._subscriptions.keys() - set(sources):
            subscription = self._subscriptions.pop(removed)
            self.poller.unregister(subscription.socket)
            subscription.close()
        for source in sources:
            if source not in self._subscriptions:
                try:
                    subscription = Subscription(self._context, source)
                except CannotOpen as error:
                    self._unopened[source.instance] = str(error)
                    continue
                self._subscriptions[source] = subscription
                self.poller.register(subscription.socket, zmq.POLLIN)
        for subscription in self._subscriptions.values():
            subscription.blocks.max_blocks = min(MAX_BLOCKS, MAX_BLOCKS_OF_ALL // len(sources))

    def receive(self) -> bool:
        """Take the messages that have arrived, and return whether there may be more."""
        return True in [subscription.receive() for subscription in self._subscriptions.values()]

    def reports(self) -> Iterator[InstanceReport]:
        """Return a report on each instance with changes since the last call."""
        ranks: dict[str, list[Subscription | None]] = {}
        for source in self._wanted:
            ranks.setdefault(source.instance, []).append(self._subscriptions.get(source))
        for instance, subscriptions in ranks.items():
            events, gaps = Counter[str](), Counter[Gap]()
            unreadable, unopened = "", self._unopened.pop(instance, "")
            for subscription in filter(None, subscriptions):
                events.update(subscription.events)
                gaps.update(subscription.gaps)
                unreadable = subscription.unreadable or unreadable
                unopened = subscription.unopened or unopened
                subscription.events.clear()
                subscription.gaps.clear()
                subscription.unopened = ""
            if events or gaps or unopened:
                # The blocks of a rank that cannot be opened are not known.
                count = sum_of_ranks(Blocks() if each is None else each.blocks for each in subscriptions)
                numbers = int(count.stored), int(count.reach), bool(count.evicts), int(count.cleared)
                yield InstanceReport(instance, numbers, events, gaps, unreadable, unopened)


def run(commands: int, reports: int) -> None:
    """Subscribe and report until the end of the commands, which the worker closes, also by dying.

    Args:
        commands: File descriptor with lines of SubscribeTo.
        reports: File descriptor for lines of InstanceReport.
    """
    rest = b""
    with closing(Subscriber()) as subscriber:
        subscriber.poller.register(commands, zmq.POLLIN)
        report_at = 0.0
        has_more = False
        while True:
            ready = dict(subscriber.poller.poll(0 if has_more else round(1000 * REPORT_SECONDS)))
            if commands in ready:
                data = os.read(commands, 65536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    subscriber.subscribe_to(_decode_command(lines[-1]).sources)
            has_more = subscriber.receive()
            now = time.monotonic()
            if now < report_at:
                if not has_more:  # further messages go into one report
                    time.sleep(report_at - now)
                continue
            report_at = now + REPORT_SECONDS
            for report in subscriber.reports():
                _write(reports, _encode(report) + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    try:
        run(sys.stdin.fileno(), sys.stdout.fileno())
    except BrokenPipeError:
        sys.exit(1)
