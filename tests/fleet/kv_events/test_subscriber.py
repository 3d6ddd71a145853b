"""The subscriber process: its reports on all instances, and endpoints that cannot be opened."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread

import msgspec
import pytest
import zmq

from proxy.fleet.kv_events import subscriber as subscriber_module
from proxy.fleet.kv_events.messages import EventSource, InstanceReport, SubscribeTo
from proxy.fleet.kv_events.subscriber import Subscriber, Subscription, run_subscriber
from tests.asking import until
from tests.fleet.kv_events.test_subscription import (
    CONFIG,
    REPLAYS,
    SIZE,
    publishing,
    source_of,
    stored,
    wait_for_subscription,
    wait_for_tokens,
)


async def test_ranks_of_an_instance_are_reported_together_and_only_changes() -> None:
    async with publishing(CONFIG) as one, publishing(CONFIG) as other:
        with closing(Subscriber()) as subscriber:
            subscriber.subscribe_to([source_of(one), source_of(other)])
            ranks = list(subscriber._subscriptions.values())
            for subscription, publisher in zip(ranks, (one, other), strict=True):
                await wait_for_subscription(subscription, publisher)
                publisher.publish(stored(1))
                await wait_for_tokens(subscription, SIZE)
            (report,) = subscriber.take_reports()
            assert (report.count, report.events) == ((2 * SIZE, 2 * SIZE, False, 0), {"stored": 2})
            assert not list(subscriber.take_reports())
            subscriber.subscribe_to([source_of(one)])
            assert list(subscriber._subscriptions.values()) == ranks[:1]


def removed(*numbers: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [["BlockRemoved", [*numbers]]], 0])


def _received(subscription: Subscription) -> Subscription:
    """Return the subscription after it has taken all waiting messages."""
    subscription.receive_messages()
    return subscription


async def test_endpoint_that_cannot_be_opened_does_not_affect_others() -> None:
    """The reach of an instance is not known if one of its ranks cannot be subscribed to."""
    odd = EventSource("prefill 127.0.0.1 1", "tcp://no host:1")
    async with publishing(CONFIG) as publisher:
        with closing(Subscriber()) as subscriber:
            subscriber.subscribe_to([odd, source_of(publisher), EventSource("prefill other 1", "tcp://no host:2")])
            first, other = subscriber.take_reports()
            assert (first.unopened, other.unopened) == (
                "tcp://no host:1: Invalid argument",
                "tcp://no host:2: Invalid argument",
            )
            assert not list(subscriber.take_reports())
            (rank,) = subscriber._subscriptions.values()
            await wait_for_subscription(rank, publisher)
            for number in range(20):
                publisher.publish(stored(number))
            await wait_for_tokens(rank, 20 * SIZE)
            publisher.publish(removed(*range(10)))
            await until(lambda: _received(rank).cached_blocks.cache_count.has_evicted, "evictions")
            (report,) = subscriber.take_reports()
            assert report.count[:3] == (20 * SIZE, rank.cached_blocks.cache_count.reach_tokens, False)
            subscriber.subscribe_to([source_of(publisher)])
            publisher.publish(removed(10))
            await until(lambda: _received(rank).event_counts, "another event")
            (report,) = subscriber.take_reports()
            assert report.count[2]


def test_subscriber_raises_the_limit_of_sockets() -> None:
    with closing(Subscriber()) as subscriber:
        assert subscriber._context.get(zmq.MAX_SOCKETS) == subscriber._context.get(zmq.SOCKET_LIMIT)


@contextmanager
def running(sources: list[EventSource]) -> Iterator[Iterator[InstanceReport]]:
    """Run the program in a thread, and yield its reports."""
    (asked, ask), (answers, answer) = os.pipe(), os.pipe()
    thread = Thread(target=run_subscriber, args=(asked, answer))
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


async def test_long_replay_is_read_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has a time limit, so it must be read faster than one message for each report."""
    monkeypatch.setattr(subscriber_module, "_MAX_MESSAGES_PER_READ", 1)
    async with publishing(REPLAYS) as publisher:
        with running([source_of(publisher)]) as reports:
            first = asyncio.create_task(asyncio.to_thread(next, reports))
            while not first.done():
                publisher.publish(stored(1))
                await asyncio.sleep(0.001)
            publisher.lost = 100
            for _ in range(101):
                publisher.publish(stored(1))
            words: Counter[str] = Counter()
            while not words:
                words.update((await asyncio.to_thread(next, reports)).gaps)
            assert words == {"replayed": 1}
