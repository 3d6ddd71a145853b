"""Gateways that share their loads through a store, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count

import pytest

from proxy.balancer.health import HealthBoard
from proxy.balancer.roster import Roster
from proxy.balancer.shared.journal import Journal
from proxy.balancer.shared.memory import QueueHeads
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Load, Role
from proxy.common.errors import LimitExceeded
from proxy.fleet.replicas import ExchangeParts, LocalState, PeerRows, SharedRows, StateExchange, Store
from proxy.fleet.replicas.state import GatewayState, decode_state, encode_state
from proxy.fleet.replicas.store import StoreCommandRefused
from proxy.gateway.api_keys import ApiKey, ApiKeys, KeyUsage, TokenLimit, minute_and_milliseconds
from proxy.observe.metrics import Metrics
from proxy.process.shared import ListeningSockets, create_shared_state
from proxy.settings import ClientKey, LoadedSettings
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import generations
from tests.fleet.replicas.conftest import serving, settings_with

_A, _B = ("10.0.0.1", 7200), ("10.0.0.2", 7200)


def _sections(port: int, ttl_seconds: float = 60.0, group: str = "g") -> dict[str, object]:
    url = f"redis://127.0.0.1:{port}/0"
    return {"url": url, "group": group, "interval_seconds": 0.01, "ttl_seconds": ttl_seconds}


@dataclass
class Gateway:
    """Parts of a gateway that an exchange uses."""

    scoreboard: Scoreboard
    roster: Roster
    metrics: Metrics
    usage: KeyUsage

    def slot(self, address: tuple[str, int]) -> int:
        members = self.roster.members_of_role(Role.DECODE)
        return next(m.backend.slot for m in members if (m.backend.host, m.backend.port) == address)

    def running(self, address: tuple[str, int]) -> int:
        """Return the requests on the instance, as policies of this gateway see them."""
        return self.scoreboard.running_requests(self.slot(address))

    @property
    def peers(self) -> float:
        return self.metrics.replicas_peers._value.get()


@asynccontextmanager
async def _gateway(
    name: str,
    replicas: dict[str, object],
    decode: list[tuple[str, int]],
    workers: int = 1,
    kind: type[Store] = Store,
    **keys: int,
) -> AsyncIterator[Gateway]:
    settings = settings_with(replicas)
    board = Scoreboard(workers=workers, slots=8, guests=1)
    gateway = Gateway(board, Roster([], decode, board), Metrics(), KeyUsage(workers, slots=8, guest_rows=1))
    journal = Journal(workers + 1).writer_for(workers)
    rows = SharedRows(
        scoreboard=board,
        key_usage=gateway.usage,
        health_board=HealthBoard(workers, slot_count=8),
        queue_heads=QueueHeads(workers, guests=1),
        journal_writer=journal,
    )
    async with (
        kind(settings, name) as store,
        StateExchange(
            ExchangeParts(
                store=store,
                own_name=name,
                local_state=LocalState(name, gateway.roster, lambda: keys, rows),
                peer_rows=PeerRows(rows),
                get_key_slots=lambda: keys,
                settings=settings,
                metrics=gateway.metrics,
            )
        ),
    ):
        yield gateway
    assert all(board.running_requests(slot) == board.own_load(slot)[0] for slot in range(8)), (
        "no load of other gateways is left"
    )


async def test_load_of_other_gateways_is_charged_by_instance(store_port: int) -> None:
    replicas = _sections(store_port)
    async with (
        _gateway("one", replicas, [_A, _B], workers=2) as one,
        _gateway("two", replicas, [_B, _A]) as two,
        _gateway("three", replicas, [_A]) as three,
    ):
        assert one.slot(_A) != two.slot(_A)
        one.scoreboard.load_row(0).add_load(one.slot(_A), requests=1, running=1, compute=5, kv=7)
        one.scoreboard.load_row(1).add_load(one.slot(_A), requests=2, running=1, compute=5, kv=7)
        one.scoreboard.load_row(1).add_load(one.slot(_B), kv=3)
        two.scoreboard.load_row(0).add_load(two.slot(_A), requests=1, running=1, compute=1, kv=1)
        await until(lambda: three.running(_A) == 3, "the third hears the other two")
        await until(lambda: two.scoreboard.load_of(two.slot(_B)) == Load(0, 3), "the second hears the first")
        assert two.running(_A) == 3
        assert two.scoreboard.load_of(two.slot(_A)) == Load(11, 15)
        assert two.scoreboard.open_leases(two.slot(_A)) == 1  # drains wait only for local requests
        assert two.scoreboard.own_load(two.slot(_A)) == (1, Load(1, 1))
        await until(lambda: one.running(_A) == 3, "nothing comes back as another's")
        await until(lambda: (one.peers, two.peers, three.peers) == (2, 2, 2), "all know each other")
        one.scoreboard.load_row(0).add_load(one.slot(_A), requests=-1, running=-1, compute=-5, kv=-7)
        await until(lambda: three.running(_A) == 2, "the ended request is subtracted")


async def test_changes_arrive_before_the_next_exchange(store_port: int) -> None:
    replicas = {**_sections(store_port), "interval_seconds": 20.0, "news_seconds": 0.001}
    settings = settings_with(replicas)
    async with Store(settings, "before") as before:
        await before.exchange_messages(
            encode_state(GatewayState(1))
        )  # a gateway that the first one announces changes to
        async with _gateway("one", replicas, [_A]) as one:
            await until(lambda: one.peers == 1, "its exchange")
            async with _gateway("two", replicas, [_A]) as two:
                await until(lambda: two.peers == 2, "its exchange")
                while not two.running(_A):  # earlier messages are lost
                    one.scoreboard.load_row(0).add_load(0, running=1)
                    await asyncio.sleep(0.01)
                running = one.running(_A)
                await until(lambda: two.running(_A) == running, "all of it")
                one.scoreboard.load_row(0).add_load(0, running=-running)
                await until(lambda: two.running(_A) == 0, "its end")
                sent, received = (
                    gateway.metrics.replicas_news_total.labels(direction)._value.get()
                    for gateway, direction in ((one, "told"), (two, "heard"))
                )
                assert sent >= received >= 2


async def test_exception_of_a_listener_is_no_failure_of_the_store(store_port: int) -> None:
    settings = settings_with(_sections(store_port))
    received: list[bytes] = []

    def on_news(news: bytes) -> None:
        received.append(news)
        raise ValueError("not a number")

    async with Store(settings, "one") as one, Store(settings, "two") as two:
        listening = asyncio.create_task(two.listen_for_news(on_news))
        while not listening.done():  # earlier messages are lost
            await one.publish_news(b"7")
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="not a number"):
            await listening
    assert received == [b"7"]


class WithoutChannel(Store):
    """A store that refuses the channel: its user may access only the hash."""

    async def publish_news(self, news: bytes) -> None:
        raise StoreCommandRefused("NOPERM")

    async def listen_for_news(self, on_news: Callable[[bytes], None]) -> None:
        raise StoreCommandRefused("NOPERM")


async def test_exchange_continues_with_one_warning_without_the_channel(
    store_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.replicas.exchange._RETRY_SECONDS", 0.001)
    replicas = _sections(store_port)
    async with (
        _gateway("one", replicas, [_A], kind=WithoutChannel) as one,
        _gateway("two", replicas, [_A], kind=WithoutChannel) as two,
    ):
        for running in range(1, 5):
            one.scoreboard.load_row(0).add_load(0, running=1)
            await until(lambda running=running: two.running(_A) == running, "the load of the other")
    lines = [record.message for record in caplog.records]
    assert lines == ["replicas: the store refuses subscriptions: changes arrive with the next exchange: NOPERM"] * 2


async def test_exchange_shares_loads_without_the_channel(store_port: int) -> None:
    replicas = {**_sections(store_port), "news_seconds": None}
    async with _gateway("one", replicas, [_A]) as one, _gateway("two", replicas, [_A]) as two:
        one.scoreboard.load_row(0).add_load(0, running=1)
        await until(lambda: two.running(_A) == 1, "the load of the other")
        assert two.metrics.replicas_news_total.labels("heard")._value.get() == 0


async def test_stopping_gateway_removes_its_load_at_once(store_port: int) -> None:
    replicas = _sections(store_port, ttl_seconds=3600.0)
    async with _gateway("one", replicas, [_A]) as one:
        async with _gateway("two", replicas, [_A]) as two:
            two.scoreboard.load_row(0).add_load(0, requests=1, running=1)
            await until(lambda: one.running(_A) == 1, "the load of the other")
        await until(lambda: one.running(_A) == 0, "its end")


async def test_gateways_of_another_group_are_ignored(store_port: int) -> None:
    async with (
        _gateway("one", _sections(store_port), [_A]) as one,
        _gateway("two", _sections(store_port), [_A]) as two,
        _gateway("else", _sections(store_port, group="h"), [_A]) as stranger,
    ):
        stranger.scoreboard.load_row(0).add_load(0, requests=1, running=1)
        two.scoreboard.load_row(0).add_load(0, requests=2, running=2)
        await until(lambda: one.running(_A) == 2, "the load of the same group")
        assert one.peers == 1


async def test_load_of_a_removed_instance_and_slot_is_dropped(store_port: int) -> None:
    replicas = _sections(store_port)
    async with _gateway("one", replicas, [_A, _B]) as one, _gateway("two", replicas, [_A, _B]) as two:
        two.scoreboard.load_row(0).add_load(two.slot(_B), running=1, compute=9, kv=9)
        await until(lambda: one.running(_B) == 1, "the load")
        slot = one.slot(_B)
        one.roster.remove_backend(Role.DECODE, *_B)
        one.roster.drop_drained_backends()
        await until(lambda: one.scoreboard.load_of(slot) == Load(), "the slot is free")


async def test_lost_store_drops_peer_loads_and_logs_each_change_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [record.message.split(": ")[1] for record in caplog.records if "replicas" in record.message]

    def exchanges(gateway: Gateway, result: str) -> float:
        return gateway.metrics.replicas_exchanges_total.labels(result)._value.get()

    with ExitStack() as first:
        port = first.enter_context(serving())
        replicas = _sections(port, ttl_seconds=1.0)
        async with _gateway("one", replicas, [_A]) as one, _gateway("two", replicas, [_A]) as two:
            two.scoreboard.load_row(0).add_load(0, requests=1, running=1)
            await until(lambda: one.running(_A) == 1, "the load of the other")
            caplog.clear()
            await asyncio.to_thread(first.close)
            await until(lambda: one.running(_A) == 0 and one.peers == 0, "its load is dropped")
            await until(lambda: len(lines()) == 2, "the lines of both")
            failed = exchanges(one, "failed")
            await until(lambda: exchanges(one, "failed") >= failed + 2, "some more attempts")
            assert lines() == ["the store does not answer"] * 2
            with serving(port):
                await until(lambda: one.running(_A) == 1 and two.peers == 1, "the load again")
                assert sorted(lines()[2:]) == ["the store answers again"] * 2


async def test_picks_avoid_instances_that_another_gateway_loads(store_port: int, deploy: Deploy) -> None:
    deployment = await deploy(decoders=2, replicas=_sections(store_port))
    busy, free = deployment.decoders
    settings = settings_with(_sections(store_port))
    backend = next(b for b in deployment.worker.pools.decode.all_backends() if b.port == busy.port)
    async with Store(settings, "another") as other:
        await other.exchange_messages(encode_state(GatewayState(1, {backend.key: (5, 500, 500)})))
        await until(lambda: deployment.scoreboard.running_requests(backend.slot) == 5, "the load of the other")
        for _ in range(4):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert [len(generations(engine)) for engine in (busy, free)] == [0, 4]
        await other.delete_own_message()
    await until(lambda: deployment.scoreboard.running_requests(backend.slot) == 0, "its end")


def test_no_load_stays_charged_when_the_exchanging_worker_dies() -> None:
    settings = settings_with({"url": "redis://nowhere"}, workers=2)
    loaded = LoadedSettings(settings, {})
    with ListeningSockets(socket.create_server(("127.0.0.1", 0))) as listeners:
        shared = create_shared_state(loaded, lambda: loaded, listeners)
        board = shared.scoreboard
        board.load_row(board.worker_count).replace_load(0, 1, 2, 3)
        shared.key_usage.usage_row(2).replace_counts(0, 4, minute_and_milliseconds(time.monotonic())[0], (0, 0))
        shared.erase_worker(1)
        assert (board.running_requests(0), shared.key_usage.count_in_flight(0)) == (1, 4)
        shared.erase_worker(0)
        assert (board.running_requests(0), board.load_of(0), shared.key_usage.count_in_flight(0)) == (0, Load(), 0)


def _refusal(usage: KeyUsage, key: ApiKey) -> str | None:
    try:
        with ApiKeys(usage).count_in_flight(key):
            return None
    except LimitExceeded as refused:
        return refused.code


async def test_client_key_limits_apply_across_all_gateways(store_port: int) -> None:
    replicas = _sections(store_port)
    async with (
        _gateway("one", replicas, [_A], workers=2, team=0, other=1) as one,
        _gateway("two", replicas, [_A], other=0, team=3) as two,
    ):
        held = ApiKey("team", 3, max_concurrent=3)
        for worker in range(2):
            one.usage.usage_row(worker).add_in_flight(0, 1)
        assert _refusal(two.usage, held) is None
        await until(lambda: two.usage.count_in_flight(3) == 2, "requests in flight at the other gateway")
        with ApiKeys(two.usage).count_in_flight(held):
            assert _refusal(two.usage, held) == "key_concurrency"
            await until(lambda: one.usage.count_in_flight(0) == 3, "the request at this gateway")
        one.usage.usage_row(0).add_in_flight(0, -1)
        await until(lambda: _refusal(two.usage, held) is None, "the end of a request")
        one.usage.usage_row(1).add_in_flight(0, -1)

        a_few = ApiKey("other", 0, requests_per_minute=5)
        for _ in range(4):
            with ApiKeys(one.usage, 1).count_in_flight(ApiKey("other", 1)):
                pass
        await until(
            lambda: two.usage.own_usage(0, time.monotonic())[1] == 0 and _used(two.usage, 0) >= 4, "the requests"
        )
        assert _refusal(two.usage, a_few) is None
        assert _refusal(two.usage, a_few) == "key_rate"
        assert two.usage.own_usage(0, time.monotonic())[1] == 1  # requests of others are not counted as local

        one.usage.usage_row(1).count_tokens(1, minute_and_milliseconds(time.monotonic())[0], 1000)
        few_tokens = ApiKey("other", 0, token_limit=TokenLimit(500, 0, ApiKeys(two.usage)))
        await until(lambda: _refusal(two.usage, few_tokens) == "key_tokens", "the tokens of the other gateway")


def _used(usage: KeyUsage, slot: int) -> int:
    minute = minute_and_milliseconds(time.monotonic())[0]
    return usage.recent_requests(slot, minute) + usage.recent_requests(slot, minute - 1)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_client_key_limits_are_shared_only_if_enabled(is_shared: bool, deploy: Deploy, store_port: int) -> None:
    replicas = {**_sections(store_port), "key_limits": is_shared}
    deployment = await deploy(replicas=replicas)
    live, count_peers = deployment.worker.live_configuration, deployment.worker.metrics.replicas_peers._value.get
    names = {"limited": {"max_concurrent": 5}, "rated": {"requests_per_minute": 5}, "free": {}}
    keys = tuple(
        ClientKey.model_validate({"name": name, "key_sha256": sha256(name.encode()).hexdigest(), **limits})
        for name, limits in names.items()
    )
    live.apply_snapshot(
        replace(live.current_snapshot, client_keys=keys, slots_by_key={"limited": 0, "rated": 1, "free": 2})
    )
    async with Store(live.settings, "another") as other:
        for name in names:
            assert (await deployment.ask(request(Api.CHAT), Authorization=f"Bearer {name}")).status == 200
        shared_keys: list[dict[str, tuple[int, int]]] = []
        for turn in count():
            messages = await other.exchange_messages(
                encode_state(GatewayState(turn, keys={"limited": (5, 0), "rated": (0, 4), "free": (9, 9)}))
            )
            states = [decode_state(message) for name, message in messages.items() if name != "another"]
            shared_keys += [each.keys for each in states if each is not None]
            # The store may still have the message of a time before the requests ended.
            if (not is_shared and len(shared_keys) == 3) or {"limited": (0, 1), "rated": (0, 1)} in shared_keys:
                break
        assert is_shared or shared_keys == [{}] * 3
        await until(lambda: count_peers() == 1, "the other gateway")
        statuses = [(await deployment.ask(request(Api.CHAT), Authorization=f"Bearer {name}")).status for name in names]
        assert statuses == ([429, 429, 200] if is_shared else [200, 200, 200])
        await other.delete_own_message()


async def test_undecodable_field_does_not_affect_other_fields(store_port: int) -> None:
    replicas = _sections(store_port)
    settings = settings_with(replicas)
    async with _gateway("one", replicas, [_A]) as one, Store(settings, "poisoned") as poisoned:
        await poisoned.exchange_messages(b'{"turn": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
        async with _gateway("two", replicas, [_A]) as two:
            two.scoreboard.load_row(0).add_load(0, running=1)
            await until(lambda: one.running(_A) == 1, "the load of the gateway whose field can be decoded")
    assert one.metrics.background_restarts_total.labels("replica_exchange")._value.get() == 0


async def test_exchange_restarts_after_an_unexpected_exception(store_port: int) -> None:
    class Poisoned(Store):
        exchanges = 0

        async def exchange_messages(self, message: bytes, lost: Collection[str] = ()) -> dict[str, bytes]:
            Poisoned.exchanges += 1
            if Poisoned.exchanges == 2:
                raise ZeroDivisionError
            return await super().exchange_messages(message, lost)

    async with _gateway("one", _sections(store_port), [_A], kind=Poisoned) as one:
        await until(lambda: Poisoned.exchanges > 3, "an exchange after the failure")
        assert one.metrics.background_restarts_total.labels("replica_exchange")._value.get() == 1


async def test_exchange_works_with_a_store_without_hello() -> None:
    """Redis before 6 answers HELLO, the first command of RESP3, with an error."""
    commands: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            while head := await reader.readline():
                words = [
                    (await reader.readexactly(int((await reader.readline())[1:]) + 2))[:-2]
                    for _ in range(int(head[1:]))
                ]
                commands.append(words[0].upper())
                answers = {b"HELLO": b"-ERR unknown command `HELLO`\r\n", b"HGETALL": b"*0\r\n", b"SELECT": b"+OK\r\n"}
                writer.write(answers.get(words[0].upper(), b":1\r\n"))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = settings_with(_sections(port))
        async with Store(settings, "one") as store:
            assert await store.exchange_messages(b"{}") == {}
    assert b"HELLO" not in commands
