"""What one gateway has found of an instance, and what the others make of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import HealthBoard
from proxy.common.backend import Backend, Role
from proxy.fleet.replicas import Store
from proxy.fleet.replicas.peers import Peers
from proxy.fleet.replicas.state import GatewayState, News, decode, decode_news, encode, encode_news
from proxy.settings import Settings
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import generations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.sim.engine import SimulatedEngine
    from tests.conftest import Deploy
    from tests.deployment import Deployment

UP, EJECTED, PROBATION = HealthState.UP, HealthState.EJECTED, HealthState.PROBATION
_TURNS = count(1)


class Another:
    """A gateway of the group."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._verdicts: dict[str, int] = {}

    async def finds(self, *backends: Backend) -> None:
        """These are of no use."""
        self._verdicts = {backend.key: next(_TURNS) for backend in backends}
        await self._store.exchange(encode(GatewayState(next(_TURNS), verdicts=self._verdicts)))

    async def hears(self) -> GatewayState:
        """What the gateway under test tells next."""
        told: dict[int, GatewayState] = {}
        while len(told) < 3:  # the second may be under way already
            messages = await self._store.exchange(encode(GatewayState(next(_TURNS), verdicts=self._verdicts)))
            told |= {each.turn: each for name, text in messages.items() if name != "another" and (each := decode(text))}
        return told[max(told)]


@asynccontextmanager
async def _another(replicas: dict[str, object]) -> AsyncIterator[Another]:
    settings = Settings.model_validate({"decode": ["10.0.0.1:1"], "connector": "plain", "replicas": replicas})
    async with Store(settings, "another") as store:
        yield Another(store)
        await store.leave()


def _replicas(port: int) -> dict[str, object]:
    return {"url": f"redis://127.0.0.1:{port}/0", "interval_seconds": 0.01, "ttl_seconds": 60.0}


def _backends(deployment: Deployment) -> list[Backend]:
    """In the order of the engines."""
    known = {backend.port: backend for backend in deployment.worker.pools.decode.backends()}
    return [known[engine.port] for engine in deployment.decoders]


def _state(deployment: Deployment, backend: Backend) -> HealthState:
    deployment.worker.pools.of(backend.role).eligible()  # a look at what is due
    return deployment.worker.health.of(backend).state


async def test_an_instance_that_another_gateway_has_found_wedged_is_tried_once(store_port: int, deploy: Deploy) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    wedged, well = deployment.decoders
    backend = _backends(deployment)[0]
    wedged.faults.add("refuse_status", status=500, times=None)  # its health checks pass
    async with _another(_replicas(store_port)) as another:
        await another.finds(backend)
        await until(lambda: _state(deployment, backend) is PROBATION, "a trial")
        for _ in range(8):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert len(generations(wedged)) == 1
        assert len(generations(well)) == 8
        assert _state(deployment, backend) is EJECTED
        assert backend.key in (await another.hears()).verdicts  # by itself, now


async def test_what_another_gateway_says_of_an_instance_that_is_well_costs_a_probe(
    store_port: int, deploy: Deploy
) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    backend = _backends(deployment)[0]
    async with _another(_replicas(store_port)) as another:
        await another.finds(backend)
        await until(lambda: _state(deployment, backend) is PROBATION, "a trial")
        for _ in range(4):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert _state(deployment, backend) is UP
        assert sum(1 for engine in deployment.decoders if generations(engine)) == 2
        await another.finds(backend)  # with another number: it has found so once more
        await until(lambda: _state(deployment, backend) is PROBATION, "another trial")


class Lent:
    """An engine that runs for another deployment."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """It goes on."""


@pytest.mark.fault(104)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_instance_that_refuses_one_gateway_is_tried_with_care_by_another(
    store_port: int, deploy: Deploy, role: Role
) -> None:
    here = await deploy(3, 3, replicas=_replicas(store_port))
    lent: list[Any] = [[Lent(engine) for engine in engines] for engines in (here.prefillers, here.decoders)]
    there = await deploy(*lent, replicas=_replicas(store_port))
    for gateway in (here, there):
        gateway.may_stay_pinned, gateway.expects_inexact_pins = 100, True
    bad = (here.prefillers if role is Role.PREFILL else here.decoders)[0]
    bad.faults.add("refuse_status", status=503)
    while not (ejected := here.metrics("pdproxy_instance_ejected_total")):
        assert (await here.ask(request(Api.CHAT))).status == 200
    name = f"127.0.0.1:{bad.port}"
    assert ejected == {(name, "refuses", role.value): 1.0}
    await until(lambda: there.metrics("pdproxy_instance_ejected_total"), "the finding of the other gateway")
    assert there.metrics("pdproxy_instance_ejected_total") == {(name, "other_gateway", role.value): 1.0}
    (backend,) = [each for each in there.worker.pools.of(role).backends() if each.name == name]
    await until(lambda: _state(there, backend) is PROBATION, "a trial")  # its health check has passed
    before = len(generations(bad))
    for _ in range(8):
        assert (await there.ask(request(Api.CHAT))).status == 200
    # The first one is its trial. Others come when its back-off ends, and after the third refusal none.
    assert 1 <= len(generations(bad)) - before <= 3


async def test_a_verdict_of_others_on_all_instances_leaves_those_that_are_needed(
    store_port: int, deploy: Deploy
) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    backends = _backends(deployment)
    for engine in deployment.decoders:
        engine.faults.add("refuse_status", status=500, path="/health", times=None)
    async with _another(_replicas(store_port)) as another:
        await another.finds(*backends)
        await until(lambda: EJECTED in [_state(deployment, backend) for backend in backends], "one is held out")
        for _ in range(4):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert [_state(deployment, backend) for backend in backends].count(EJECTED) == 1
        assert not (await another.hears()).verdicts  # what was only heard is not passed on


def test_verdicts_of_gateways_count_as_long_as_what_they_tell() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    peers.take_messages(
        {"one": encode(GatewayState(1, verdicts={"a": 7})), "two": encode(GatewayState(1, verdicts={"a": 3, "b": 4}))},
        100.0,
    )
    assert peers.verdicts(100.9) == {("a", "one", 7), ("a", "two", 3), ("b", "two", 4)}
    assert peers.take_news(News("two", 2, verdicts={"a": 0, "c": 5}), 100.9)
    assert peers.verdicts(101.5) == {("b", "two", 4), ("c", "two", 5)}
    assert peers.verdicts(102.0) == set()


def test_a_verdict_is_understood_however_long_a_host_is_up() -> None:
    number = round(10_000_000 * 1e9)  # of the seconds of 115 days
    told = decode(encode(GatewayState(number, {}, verdicts={"a": number})))
    assert told is not None
    assert told.verdicts == {"a": number}
    news = decode_news(encode_news(News("one", number, verdicts={"a": number})))
    assert news is not None
    assert news.verdicts == {"a": number}


@pytest.mark.parametrize("state", [HealthState.DOWN, HealthState.EJECTED])
def test_what_was_only_heard_is_no_finding_of_a_workers_own(state: HealthState) -> None:
    board, backend = HealthBoard(workers=2, slots=4), Backend(Role.DECODE, "d", 1, slot=2)
    board.set_state(0, backend, state, is_from_peer=True)
    assert (board.is_found_unhealthy(backend), board.states(backend)) == (False, [state, HealthState.UNKNOWN])
    board.set_state(1, backend, state)
    assert board.is_found_unhealthy(backend)
