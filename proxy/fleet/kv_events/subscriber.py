"""`python -m proxy.fleet.kv_events.subscriber`: the process that subscribes. A worker talks to it by pipes.

Events are thousands a second, and the library that receives them aborts its process when it finds itself in a state
that cannot be. Both are nothing for a process that serves requests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from proxy.fleet.kv_events.blocks import MAX_BLOCKS, MAX_BLOCKS_OF_ALL, Blocks, together
from proxy.fleet.kv_events.messages import EventSource, InstanceReport, SubscribeTo, Word
from proxy.fleet.kv_events.subscription import CannotOpen, Subscription

if TYPE_CHECKING:
    from collections.abc import Iterator

TELL_SECONDS: Final = 0.1
_read_wanted: Final = msgspec.json.Decoder(SubscribeTo).decode
_encode: Final = msgspec.json.Encoder().encode


class Subscriber:
    """All subscriptions, by what they are to. `close` it at the end."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # By default there are 1,023 in a context, and each rank has one or two.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._wanted: list[EventSource] = []
        self._subscriptions: dict[EventSource, Subscription] = {}
        self._unopened: dict[str, str] = {}  # by instance, what is to be told: an endpoint, and why
        self.poller = zmq.Poller()

    def close(self) -> None:
        """Nothing is left open."""
        self.want([])
        self._context.term()

    def want(self, sources: list[EventSource]) -> None:
        """Subscribe to these, and to no others any more. What cannot be opened is tried again the next time."""
        self._wanted = sources
        self._unopened = {}
        for gone in self._subscriptions.keys() - set(sources):
            subscription = self._subscriptions.pop(gone)
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
        """Take what has come. Whether there may be more."""
        return True in [subscription.receive() for subscription in self._subscriptions.values()]

    def told(self) -> Iterator[InstanceReport]:
        """What is new of each instance."""
        ranks: dict[str, list[Subscription | None]] = {}
        for source in self._wanted:
            ranks.setdefault(source.instance, []).append(self._subscriptions.get(source))
        for instance, subscriptions in ranks.items():
            events, words = Counter[str](), Counter[Word]()
            why, unopened = "", self._unopened.pop(instance, "")
            for subscription in filter(None, subscriptions):
                events.update(subscription.events)
                words.update(subscription.words)
                why, unopened = subscription.why or why, subscription.unopened or unopened
                subscription.events.clear()
                subscription.words.clear()
                subscription.unopened = ""
            if events or words or unopened:
                # Of a rank that cannot be heard nothing is known.
                count = together(Blocks() if each is None else each.blocks for each in subscriptions)
                numbers = int(count.stored), int(count.reach), bool(count.evicts), int(count.cleared)
                yield InstanceReport(instance, numbers, events, words, why, unopened)


def run(asked: int, answers: int) -> None:
    """Do what comes from one file descriptor, and tell the other, until the first one ends: then whoever has started
    this process is gone, or wants no more.
    """
    rest = b""
    with closing(Subscriber()) as subscriber:
        subscriber.poller.register(asked, zmq.POLLIN)
        tell_at = 0.0
        has_more = False
        while True:
            ready = dict(subscriber.poller.poll(0 if has_more else round(1000 * TELL_SECONDS)))
            if asked in ready:
                data = os.read(asked, 65536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    subscriber.want(_read_wanted(lines[-1]).sources)
            has_more = subscriber.receive()
            now = time.monotonic()
            if now < tell_at:
                if not has_more:  # the others are told of together
                    time.sleep(tell_at - now)
                continue
            tell_at = now + TELL_SECONDS
            for told in subscriber.told():
                _write(answers, _encode(told) + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the whole group
    try:
        run(sys.stdin.fileno(), sys.stdout.fileno())
    except BrokenPipeError:
        sys.exit(1)
