"""The process that subscribes: what it tells of all instances, and that one that cannot be heard costs no other."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import closing, contextmanager
from threading import Thread
from typing import TYPE_CHECKING

import msgspec
import zmq

from proxy.fleet.kv_events import subscriber as subscriber_module
from proxy.fleet.kv_events.messages import EventSource, InstanceReport, SubscribeTo
from proxy.fleet.kv_events.subscriber import Subscriber, run
from tests.asking import until
from tests.fleet.kv_events.test_subscription import CONFIG, REPLAYS, SIZE, heard, joined, publishing, stored, to

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from proxy.fleet.kv_events.subscriber import Subscription


async def test_ranks_of_one_instance_are_told_together_and_only_what_is_new() -> None:
    async with publishing(CONFIG) as one, publishing(CONFIG) as other:
        with closing(Subscriber()) as subscriber:
            subscriber.subscribe_to([to(one), to(other)])
            ranks = list(subscriber._subscriptions.values())
            for subscription, publisher in zip(ranks, (one, other), strict=True):
                await joined(subscription, publisher)
                publisher.say(stored(1))
                await heard(subscription, SIZE)
            (told,) = subscriber.reports()
            assert (told.count, told.events) == ((2 * SIZE, 2 * SIZE, False, 0), {"stored": 2})
            assert not list(subscriber.reports())
            subscriber.subscribe_to([to(one)])
            assert list(subscriber._subscriptions.values()) == ranks[:1]


def removed(*numbers: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [["BlockRemoved", [*numbers]]], 0])


def _received(subscription: Subscription) -> Subscription:
    """It, when it has taken what has come."""
    subscription.receive()
    return subscription


async def test_one_that_cannot_be_opened_is_told_and_costs_no_other() -> None:
    """Of an instance with such a rank it is not known how far its cache reaches."""
    odd = EventSource("prefill 127.0.0.1 1", "tcp://no host:1")
    async with publishing(CONFIG) as publisher:
        with closing(Subscriber()) as subscriber:
            subscriber.subscribe_to([odd, to(publisher), EventSource("prefill other 1", "tcp://no host:2")])
            first, other = subscriber.reports()
            assert (first.unopened, other.unopened) == (
                "tcp://no host:1: Invalid argument",
                "tcp://no host:2: Invalid argument",
            )
            assert not list(subscriber.reports())
            (rank,) = subscriber._subscriptions.values()
            await joined(rank, publisher)
            for number in range(20):
                publisher.say(stored(number))
            await heard(rank, 20 * SIZE)
            publisher.say(removed(*range(10)))
            await until(lambda: _received(rank).blocks.count.evicts, "evictions")
            (told,) = subscriber.reports()
            assert told.count[:3] == (20 * SIZE, rank.blocks.count.reach, False)
            subscriber.subscribe_to([to(publisher)])
            publisher.say(removed(10))
            await until(lambda: _received(rank).events, "another one")
            (told,) = subscriber.reports()
            assert told.count[2]


def test_there_may_be_as_many_sockets_as_there_can_be() -> None:
    with closing(Subscriber()) as subscriber:
        assert subscriber._context.get(zmq.MAX_SOCKETS) == subscriber._context.get(zmq.SOCKET_LIMIT)


@contextmanager
def running(sources: list[EventSource]) -> Iterator[Iterator[InstanceReport]]:
    """The program in a thread, and what it tells."""
    (asked, ask), (answers, answer) = os.pipe(), os.pipe()
    thread = Thread(target=run, args=(asked, answer))
    thread.start()
    try:
        os.write(ask, msgspec.json.encode(SubscribeTo(sources)) + b"\n")
        with os.fdopen(answers, "rb", closefd=False) as lines:
            yield (msgspec.json.decode(line, type=InstanceReport) for line in lines)
    finally:
        os.close(ask)
        thread.join()
        for descriptor in (asked, answers, answer):
            os.close(descriptor)


async def test_a_long_replay_is_read_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At so many messages each time that something is told it would be given up before its end."""
    monkeypatch.setattr(subscriber_module, "_MAX_MESSAGES_PER_READ", 1)
    async with publishing(REPLAYS) as publisher:
        with running([to(publisher)]) as told:
            first = asyncio.create_task(asyncio.to_thread(next, told))
            while not first.done():
                publisher.say(stored(1))
                await asyncio.sleep(0.001)
            publisher.lost = 100
            for _ in range(101):
                publisher.say(stored(1))
            words: Counter[str] = Counter()
            while not words:
                words.update((await asyncio.to_thread(next, told)).gaps)
            assert words == {"replayed": 1}
