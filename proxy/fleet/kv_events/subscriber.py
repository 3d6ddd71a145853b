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

from proxy.fleet.kv_events.blocks import MAX_BLOCKS, MAX_BLOCKS_OF_ALL, RankBlocks, sum_of_ranks
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


class SocketOpenError(Exception):
    """A socket could not be opened. The text names the endpoint and the reason."""


class Subscription:
    """The subscription to one rank. Raises SocketOpenError. Must be closed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> None:
        self.cached_blocks = RankBlocks()
        self.event_counts: Counter[str] = Counter()
        """Number of events by kind, since the last report."""
        self.gap_counts: Counter[Gap] = Counter()
        """Number of gaps by kind, since the last report."""
        self.unreadable_problem = ""
        """Problem of the last message or event that could not be read; empty if there was none."""
        self.unopened_problem = ""
        """Reason why the replay endpoint cannot be opened; empty if it can, or was not needed."""
        self.event_socket = _open_socket(context, zmq.SUB, source.endpoint)
        self.event_socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self.replay_socket: zmq.Socket[bytes] | None = None
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
        for socket in (self.event_socket, self.replay_socket):
            if socket is not None:
                socket.close(linger=0)

    @property
    def is_replaying(self) -> bool:
        """Whether a replay of lost messages runs."""
        return self.replay_socket is not None

    def receive_messages(self) -> bool:
        """Take the messages that have arrived, and return whether there may be more."""
        for frames in _message_frames(self.event_socket):
            if len(frames) != 3 or len(frames[1]) != 8:
                self._record_unreadable(f"a message has {len(frames)} frames")
            elif self.replay_socket is None:
                self._handle_message(int.from_bytes(frames[1], "big"), frames[2])
            else:
                self._held.append((int.from_bytes(frames[1], "big"), frames[2]))
        if self.replay_socket is not None:
            self._receive_replay(self.replay_socket)
        return any(socket is not None and _has_more(socket) for socket in (self.event_socket, self.replay_socket))

    def _handle_message(self, number: int, batch: bytes) -> None:
        if self._next is not None and number != self._next:
            if number < self._next:
                self.gap_counts["started_anew"] += 1
                self.cached_blocks.forget_after_restart()
            elif self._start_replay():
                self._held.append((number, batch))
                return
            else:
                self._record_gap()
        self._parse_batch(number, batch)

    def _parse_batch(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events = decode_batch(batch)
        except ValueError as error:
            self._record_unreadable(str(error))
            return
        for event in events:
            if isinstance(event, UnreadableEvent):
                self._record_unreadable(event.reason)
            else:
                self.event_counts[_KINDS[type(event)]] += 1
        self.cached_blocks.apply_events(events)

    def _record_unreadable(self, problem: str) -> None:
        self.event_counts["unreadable"] += 1
        self.unreadable_problem = problem[:200]

    def _record_gap(self) -> None:
        self.gap_counts["lost"] += 1
        self.cached_blocks.forget_after_lost_events()

    # Replay of lost messages

    def _start_replay(self) -> bool:
        """Request the lost messages, and return whether that is possible."""
        assert self._next is not None
        if self._replay_endpoint is None:
            return False
        try:
            self.replay_socket = _open_socket(self._context, zmq.DEALER, self._replay_endpoint)
        except SocketOpenError as error:
            self.unopened_problem = str(error)
            return False
        self.replay_socket.send_multipart((b"", self._next.to_bytes(8, "big")))
        self._replay_until = time.monotonic() + _REPLAY_SECONDS
        return True

    def _receive_replay(self, replay: zmq.Socket[bytes]) -> None:
        is_over = time.monotonic() >= self._replay_until or len(self._held) >= _MAX_QUEUED_MESSAGES
        for frames in _message_frames(replay):
            if len(frames) < 2 or len(frames[-2]) != 8:
                continue
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number < 0:
                is_over = True
            elif number == self._next:
                self._parse_batch(number, frames[-1])
        if is_over:
            self._end_replay(replay)

    def _end_replay(self, replay: zmq.Socket[bytes]) -> None:
        """Continue with the messages that arrived during the replay."""
        replay.close(linger=0)
        self.replay_socket = None
        held, self._held = self._held, deque()
        first = held[0][0]
        if self._next is not None and first > self._next:
            self._record_gap()
            self._next = first
        else:
            self.gap_counts["replayed"] += 1
        for number, batch in held:
            if self.is_replaying:
                self._held.append((number, batch))
            elif self._next is None or number >= self._next:
                self._handle_message(number, batch)


def _open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Return a connected socket. Raises SocketOpenError."""
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
        raise SocketOpenError(f"{endpoint}: {zmq.strerror(error.errno or 0)}") from None
    return socket


def _has_more(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _message_frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
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
        self._wanted_sources: list[EventSource] = []
        self._subscriptions: dict[EventSource, Subscription] = {}
        self._unopened_problems: dict[str, str] = {}
        """An endpoint of each instance that cannot be opened, and the reason, until it is reported."""
        self.poller = zmq.Poller()

    def close(self) -> None:
        """Close all subscriptions."""
        self.subscribe_to([])
        self._context.term()

    def subscribe_to(self, sources: list[EventSource]) -> None:
        """Subscribe to these sources and to no others. Each call retries sources that could not be opened."""
        self._wanted_sources = sources
        self._unopened_problems = {}
        for removed in self._subscriptions.keys() - set(sources):
            subscription = self._subscriptions.pop(removed)
            self.poller.unregister(subscription.event_socket)
            subscription.close()
        for source in sources:
            if source not in self._subscriptions:
                try:
                    subscription = Subscription(self._context, source)
                except SocketOpenError as error:
                    self._unopened_problems[source.instance] = str(error)
                    continue
                self._subscriptions[source] = subscription
                self.poller.register(subscription.event_socket, zmq.POLLIN)
        for subscription in self._subscriptions.values():
            subscription.cached_blocks.max_blocks = min(MAX_BLOCKS, MAX_BLOCKS_OF_ALL // len(sources))

    def receive_messages(self) -> bool:
        """Take the messages that have arrived, and return whether there may be more."""
        return True in [subscription.receive_messages() for subscription in self._subscriptions.values()]

    def take_reports(self) -> Iterator[InstanceReport]:
        """Return a report on each instance with changes since the last call."""
        ranks: dict[str, list[Subscription | None]] = {}
        for source in self._wanted_sources:
            ranks.setdefault(source.instance, []).append(self._subscriptions.get(source))
        for instance, subscriptions in ranks.items():
            events, gaps = Counter[str](), Counter[Gap]()
            unreadable, unopened = "", self._unopened_problems.pop(instance, "")
            for subscription in filter(None, subscriptions):
                events.update(subscription.event_counts)
                gaps.update(subscription.gap_counts)
                unreadable = subscription.unreadable_problem or unreadable
                unopened = subscription.unopened_problem or unopened
                subscription.event_counts.clear()
                subscription.gap_counts.clear()
                subscription.unopened_problem = ""
            if events or gaps or unopened:
                # The blocks of a rank that cannot be opened are not known.
                count = sum_of_ranks(RankBlocks() if each is None else each.cached_blocks for each in subscriptions)
                numbers = (
                    int(count.stored_tokens),
                    int(count.reach_tokens),
                    bool(count.has_evicted),
                    int(count.cleared_at_tokens),
                )
                yield InstanceReport(instance, numbers, events, gaps, unreadable, unopened)


def run_subscriber(commands: int, reports: int) -> None:
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
            has_more = subscriber.receive_messages()
            now = time.monotonic()
            if now < report_at:
                if not has_more:  # further messages go into one report
                    time.sleep(report_at - now)
                continue
            report_at = now + REPORT_SECONDS
            for report in subscriber.take_reports():
                _write_all(reports, _encode(report) + b"\n")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    try:
        run_subscriber(sys.stdin.fileno(), sys.stdout.fileno())
    except BrokenPipeError:
        sys.exit(1)
