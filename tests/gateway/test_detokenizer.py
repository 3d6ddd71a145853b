"""Queries of engines for the text of token ids: the choice of engines, and failures without effect on them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

import orjson
import pytest
from aiohttp.test_utils import unused_port

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import EngineKeys
from proxy.balancer.health import Health
from proxy.balancer.pool import Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.gateway.detokenizer import Detokenizer
from proxy.settings import Timeouts
from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import MARKERS, THINK, THINK_END
from proxy.upstream import Upstream
from tests.asking import until
from tests.canned import CannedEngine, event_stream, http, json_answer
from tests.deployment import Engine
from tests.pools import make_pool

IDS = [*b"na", *"ï".encode(), *b"ve"]
PATH = "/detokenize"


@dataclass
class Deployment:
    """Engines, and what the gateway's other parts know of them. `ends` is how leases ended."""

    detokenizer: Detokenizer
    upstream: Upstream
    pools: Pools
    scoreboard: Scoreboard
    health: Health
    ends: list[str] = field(default_factory=list)

    async def text(self, ids: Sequence[int] | bytes = tuple(IDS), model: str | None = "sim") -> str | None:
        """Return the answer, and check that it has left no load and no change of health."""
        before = self.judgements()
        text = await self.detokenizer.text_of_ids(model, ids, {})
        assert self.judgements() == before
        assert self.ends == []
        assert self.upstream.busy_connections == 0
        slots = range(self.scoreboard.slot_count)
        assert {(self.scoreboard.open_leases(slot), self.scoreboard.load_of(slot)) for slot in slots} == {(0, Load())}
        return text

    def judgements(self) -> list[tuple[Backend, HealthState, bool, int]]:
        health = self.health
        backends = (*self.pools.prefill.all_backends(), *self.pools.decode.all_backends())
        return [
            (
                b,
                health.health_of(b).health_state,
                health.health_of(b).may_change_at_next_probe,
                health.health_of(b).consecutive_failures,
            )
            for b in backends
        ]


class Deploy(Protocol):
    """`prefill` and `decode` are engines, or ports where there is none."""

    async def __call__(
        self, prefill: Sequence[Engine | int], decode: Sequence[Engine | int] = (), timeout_seconds: float = 5.0
    ) -> Deployment: ...


@pytest.fixture
async def deploy() -> AsyncIterator[Deploy]:
    async with AsyncExitStack() as stack:

        async def start(
            prefill: Sequence[Engine | int], decode: Sequence[Engine | int] = (), timeout_seconds: float = 5.0
        ) -> Deployment:
            addresses: list[list[tuple[str, int]]] = []
            for engines in (prefill, decode):
                for engine in engines:
                    if not isinstance(engine, int):
                        await stack.enter_async_context(engine)
                ports = [engine if isinstance(engine, int) else engine.port for engine in engines]
                addresses.append([("127.0.0.1", port) for port in ports])
            scoreboard, health, ends = Scoreboard(slots=8), Health(), list[str]()
            roster = Roster(addresses[0], addresses[1], scoreboard)
            on_end = ends_of(ends)
            pools = Pools(
                make_pool(Role.PREFILL, roster, scoreboard, health=health, on_lease_end=on_end),
                make_pool(Role.DECODE, roster, scoreboard, health=health, on_lease_end=on_end),
            )
            upstream = await stack.enter_async_context(Upstream(Timeouts(), EngineKeys(None)))
            detokenizer = Detokenizer(pools, upstream, timeout_seconds)
            return Deployment(detokenizer, upstream, pools, scoreboard, health, ends)

        yield start


def ends_of(ends: list[str]) -> Callable[[Backend, str], None]:
    return lambda backend, result: ends.append(result)


def asked(*engines: SimulatedEngine) -> list[int]:
    """How often each engine was asked."""
    return [[seen.path for seen in engine.requests].count(PATH) for engine in engines]


async def test_text_of_ids_includes_special_tokens(deploy: Deploy) -> None:
    gateway = await deploy([SimulatedEngine()])
    ids = [THINK, *IDS, THINK_END]
    assert await gateway.text(ids) == f"{MARKERS[THINK]}naïve{MARKERS[THINK_END]}"


@pytest.mark.parametrize(
    "ids", [IDS, tuple(IDS), array("I", IDS), orjson.dumps(IDS)], ids=lambda ids: type(ids).__name__
)
async def test_ids_may_be_a_sequence_or_a_json_array(deploy: Deploy, ids: Sequence[int] | bytes) -> None:
    engine = SimulatedEngine()
    gateway = await deploy([engine])
    assert await gateway.text(ids) == "naïve"
    assert engine.requests[-1].body == {"skip_special_tokens": False, "model": "sim", "tokens": IDS}


async def test_json_array_of_ids_is_passed_on_unchanged(deploy: Deploy) -> None:
    engine = CannedEngine("prefill", [json_answer({"prompt": "x"})])
    gateway = await deploy([engine])
    assert await gateway.text(b"[ 1,2 ]") == "x"
    assert engine.received[0].body.endswith(b'"tokens":[ 1,2 ]}')


async def test_query_without_a_model_uses_the_engines_default(deploy: Deploy) -> None:
    engine = SimulatedEngine()
    gateway = await deploy([engine])
    assert await gateway.text(IDS, model=None) == "naïve"
    assert engine.requests[-1].body == {"skip_special_tokens": False, "tokens": IDS}


async def test_clients_headers_are_passed_on(deploy: Deploy) -> None:
    engine = SimulatedEngine()
    gateway = await deploy([engine])
    await gateway.detokenizer.text_of_ids("sim", IDS, {"authorization": "Bearer client", "traceparent": "00-1-2-01"})
    headers = engine.requests[-1].headers
    assert (headers["authorization"], headers["traceparent"]) == ("Bearer client", "00-1-2-01")


async def test_prefiller_is_queried_and_not_the_decoder(deploy: Deploy) -> None:
    prefiller, decoder = SimulatedEngine(role="prefill"), SimulatedEngine(role="decode")
    gateway = await deploy([prefiller], [decoder])
    for _ in range(3):
        assert await gateway.text() == "naïve"
    assert asked(prefiller, decoder) == [3, 0]


async def test_decoder_is_queried_when_there_is_no_prefiller(deploy: Deploy) -> None:
    """The connector `plain` has no prefillers."""
    gateway = await deploy([], [SimulatedEngine()])
    assert await gateway.text() == "naïve"


async def test_decoder_is_queried_when_no_prefiller_is_healthy(deploy: Deploy) -> None:
    prefiller, decoder = SimulatedEngine(role="prefill"), SimulatedEngine(role="decode")
    gateway = await deploy([prefiller], [decoder])
    gateway.health.on_probe(gateway.pools.prefill.all_backends()[0], False, "down")
    assert await gateway.text() == "naïve"
    assert asked(prefiller, decoder) == [0, 1]


async def test_text_is_unknown_without_engines(deploy: Deploy) -> None:
    gateway = await deploy([])
    assert await gateway.text() is None


async def test_another_engine_is_queried_after_a_refused_connection(deploy: Deploy) -> None:
    decoder = SimulatedEngine(role="decode")
    gateway = await deploy([unused_port()], [decoder])
    for _ in range(3):
        assert await gateway.text() == "naïve"
    assert asked(decoder) == [3]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_another_engine_is_queried_after_an_error_status(deploy: Deploy, status: int) -> None:
    engines = [SimulatedEngine(), SimulatedEngine()]
    gateway = await deploy(engines)
    engines[0].faults.add("refuse_status", path=PATH, status=status)
    assert await gateway.text() == await gateway.text() == "naïve"
    assert asked(engines[1]) == [2]


async def test_at_most_two_engines_are_queried(deploy: Deploy) -> None:
    engines = [SimulatedEngine() for _ in range(4)]
    gateway = await deploy(engines[:3], engines[3:])
    for engine in engines:
        engine.faults.add("refuse_status", path=PATH, status=404)
    assert await gateway.text() is None
    assert sum(asked(*engines)) == 2


NONSENSE = {
    "no JSON": http(b"naive"),
    "no UTF-8": http(b'{"prompt":"\xff"}'),
    "nothing": http(b""),
    "no object": json_answer(["naive"]),
    "no prompt": json_answer({"words": "naive"}),
    "no text": json_answer({"prompt": [1]}),
    "null": json_answer({"prompt": None}),
    "other status": http(b'{"prompt":"naive"}', status="202 Accepted"),
    "no HTTP": b"naive\r\n\r\n",
    "half": http(b'{"prompt":"naive"}')[:-1],
    "half a stream": b"".join(event_stream([b'{"prompt":'], is_whole=False)),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
async def test_text_is_unknown_after_an_invalid_answer(deploy: Deploy, nonsense: bytes) -> None:
    engine = CannedEngine("prefill", [nonsense], closes=True)
    gateway = await deploy([engine])
    assert await gateway.text() is None
    assert len(engine.received) == 1


async def test_engine_that_does_not_answer_is_given_up(deploy: Deploy) -> None:
    silent, decoder = SimulatedEngine(), SimulatedEngine()
    gateway = await deploy([silent], [decoder], timeout_seconds=0.05)
    silent.faults.add("hang_before_headers", path=PATH)
    assert await gateway.text() == "naïve"
    assert asked(silent, decoder) == [1, 1]


def dribble() -> Iterator[bytes]:
    """Write an answer without an end."""
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n"
    while True:
        yield b" "


async def test_slow_answer_is_given_up(deploy: Deploy) -> None:
    """Though the engine is never silent."""
    gateway = await deploy([CannedEngine("prefill", dribble(), closes=True)], timeout_seconds=0.05)
    assert await gateway.text() is None


async def test_query_ends_when_the_client_disconnects(deploy: Deploy) -> None:
    engine = SimulatedEngine()
    gateway = await deploy([engine])
    engine.faults.add("hang_before_headers", path=PATH)
    task = asyncio.create_task(gateway.text())
    await until(lambda: asked(engine) == [1], "the question")
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert gateway.upstream.busy_connections == 0
