"""One subscription over real sockets: lost messages, restarts and unreadable messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest
import zmq

from proxy.balancer.policies.prefixes import CacheCount
from proxy.fleet.kv_events import subscriber as module
from proxy.fleet.kv_events.messages import EventSource
from proxy.fleet.kv_events.subscriber import Subscription
from proxy.sim.engine.kv_events import KvEventPublisher
from proxy.sim.options import Options
from tests.asking import until

SIZE = 128
CONFIG = {"endpoint": "tcp://127.0.0.1:0"}
REPLAYS = {**CONFIG, "replay_endpoint": "tcp://127.0.0.1:0"}


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@asynccontextmanager
async def publishing(
    config: dict[str, Any], profile: str = "v0.33", before: KvEventPublisher | None = None
) -> AsyncIterator[KvEventPublisher]:
    options = Options(profile_name=profile, kv_events_config=msgspec.json.encode(config).decode(), block_size=SIZE)
    publisher = KvEventPublisher(options, before)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()


def source_of(publisher: KvEventPublisher, topic: str = "") -> EventSource:
    return EventSource("prefill 127.0.0.1 1", publisher.endpoint, publisher.replay_endpoint, topic)


async def wait_for_subscription(subscription: Subscription, publisher: KvEventPublisher) -> None:
    """Publish empty messages until the subscriber receives one: earlier ones are lost."""
    before = subscription._next

    def has_subscribed() -> bool:
        publisher.publish(msgspec.msgpack.encode([0.0, [], 0]))
        subscription.receive_messages()
        return subscription._next != before

    await until(has_subscribed, "the subscription")


async def wait_for_tokens(subscription: Subscription, tokens: int) -> None:
    def has_tokens() -> bool:
        subscription.receive_messages()
        return subscription.cached_blocks.stored_tokens == tokens

    await until(has_tokens, f"{tokens} tokens")


@pytest.mark.parametrize("profile", ["v0.18", "v0.23", "v0.33", "sglang", "sglang-0.5.16"])
async def test_events_of_all_engines_are_received(context: zmq.Context[zmq.Socket[bytes]], profile: str) -> None:
    async with publishing(CONFIG, profile) as publisher:
        with closing(Subscription(context, source_of(publisher))) as subscription:
            await wait_for_subscription(subscription, publisher)
            publisher.expect(["a", "b"], range(2 * SIZE))
            publisher.stored(None, ["a", "b"])
            publisher.stored("b", ["c"])
            publisher.removed("c")
            publisher.cleared()
            await wait_for_tokens(subscription, 3 * SIZE)
            assert subscription.event_counts == {"stored": 2, "removed": 1, "cleared": 1}
            assert (subscription.cached_blocks.cleared_at_tokens, subscription.gap_counts) == (1, {})


@pytest.mark.parametrize("profile", ["v0.18", "v0.33"])
async def test_lost_messages_are_replayed(context: zmq.Context[zmq.Socket[bytes]], profile: str) -> None:
    async with publishing(REPLAYS, profile) as publisher:
        with closing(Subscription(context, source_of(publisher))) as subscription:
            await wait_for_subscription(subscription, publisher)
            for lost in (0, 2, 0, 3, 1):
                publisher.lost = lost
                for number in range(lost + 1):
                    publisher.publish(stored(number))
            await wait_for_tokens(subscription, 11 * SIZE)
            assert subscription.gap_counts["lost"] == 0
            assert subscription.gap_counts["replayed"]


async def test_blocks_are_dropped_when_messages_are_lost_for_good(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPLAY_SECONDS", 0.02)
    short: dict[str, Any] = {**REPLAYS, "buffer_steps": 1}
    for config, replay in ((CONFIG, None), (CONFIG, "tcp://127.0.0.1:1"), (short, None)):
        async with publishing(config) as publisher:
            publisher.replay_endpoint = publisher.replay_endpoint or replay
            with closing(Subscription(context, source_of(publisher))) as subscription:
                await wait_for_subscription(subscription, publisher)
                publisher.publish(stored(1))
                await wait_for_tokens(subscription, SIZE)
                publisher.lost = 5
                for number in range(6):
                    publisher.publish(stored(number))
                await wait_for_tokens(subscription, 2 * SIZE)
                assert subscription.gap_counts == {"lost": 1}
                assert subscription.cached_blocks.cache_count.reach_tokens == SIZE


def test_long_replay_is_processed_in_parts(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets are inside the process, so that each message has arrived when it is sent."""
    monkeypatch.setattr(module, "_MAX_MESSAGES_PER_READ", 3)
    with context.socket(zmq.XPUB) as pub, context.socket(zmq.ROUTER) as router:
        pub.bind("inproc://events")
        router.bind("inproc://replay")
        source = EventSource("prefill 127.0.0.1 1", "inproc://events", "inproc://replay")
        with closing(Subscription(context, source)) as subscription:
            pub.recv()
            for number in (0, 10):
                pub.send_multipart((b"", number.to_bytes(8, "big"), stored(number)))
            assert not subscription.receive_messages()
            client, _, first = router.recv_multipart()
            for number in range(int.from_bytes(first, "big"), 11):
                router.send_multipart((client, b"", number.to_bytes(8, "big"), stored(number)))
            router.send_multipart((client, b"", (-1).to_bytes(8, "big", signed=True), b""))
            assert [subscription.receive_messages() for _ in range(4)] == [True, True, True, False]
            assert (subscription.cached_blocks.stored_tokens, subscription.gap_counts) == (11 * SIZE, {"replayed": 1})


async def test_gap_without_a_replay_endpoint_counts_as_lost(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with publishing(CONFIG) as publisher:
        publisher.replay_endpoint = "tcp://no host:1"
        with closing(Subscription(context, source_of(publisher))) as subscription:
            await wait_for_subscription(subscription, publisher)
            publisher.lost = 1
            publisher.publish(stored(1))
            publisher.publish(stored(2))
            await wait_for_tokens(subscription, SIZE)
            assert (subscription.gap_counts, subscription.unopened_problem) == (
                {"lost": 1},
                "tcp://no host:1: Invalid argument",
            )


async def test_restarted_publisher_has_nothing_cached(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with publishing(CONFIG) as publisher:
        subscription = Subscription(context, source_of(publisher))
        publisher._next_sequence_number = 10_000  # the restarted publisher has a lower number when it is received
        await wait_for_subscription(subscription, publisher)
        publisher.publish(stored(1))
        await wait_for_tokens(subscription, SIZE)
    with closing(subscription):
        async with publishing(CONFIG, before=publisher) as restarted:
            await wait_for_subscription(subscription, restarted)
            restarted.publish(stored(1))
            await wait_for_tokens(subscription, 2 * SIZE)
            assert subscription.gap_counts == {"started_anew": 1}
            assert subscription.cached_blocks.cache_count == CacheCount(2 * SIZE, SIZE, False, 1)


@pytest.mark.parametrize("payload", [b"", b"GET / HTTP/1.1\r\n\r\n", msgspec.msgpack.encode([0.0, [["BlockStored"]]])])
async def test_unreadable_message_does_not_affect_others(
    context: zmq.Context[zmq.Socket[bytes]], payload: bytes
) -> None:
    async with publishing(CONFIG) as publisher:
        with closing(Subscription(context, source_of(publisher))) as subscription:
            await wait_for_subscription(subscription, publisher)
            publisher.publish(payload)
            publisher._pub.send_multipart((b"", b"1", b"2", b"3"))
            publisher.publish(stored(1))
            await wait_for_tokens(subscription, SIZE)
            assert subscription.event_counts == {"unreadable": 2, "stored": 1}
            assert subscription.unreadable_problem


async def test_messages_of_other_topics_are_ignored(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with publishing({**CONFIG, "topic": "kv@p1"}) as publisher:
        with (
            closing(Subscription(context, source_of(publisher, "kv"))) as right,
            closing(Subscription(context, source_of(publisher, "events"))) as wrong,
        ):
            await wait_for_subscription(right, publisher)
            publisher.publish(stored(1))
            await wait_for_tokens(right, SIZE)
            assert not wrong.receive_messages()
            assert wrong._next is None


def stored(number: int) -> bytes:
    event = ["BlockStored", [number], None, [], SIZE, None]
    return msgspec.msgpack.encode([0.0, [event], 0])
