"""Verdicts of one gateway on instances, and their effect on other gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self

import pytest

from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import HealthBoard
from proxy.common.backend import Backend, Role
from proxy.fleet.replicas import Store
from proxy.fleet.replicas.peers import Peers
from proxy.fleet.replicas.state import GatewayState, News, decode_news, decode_state, encode_news, encode_state
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.fleet.replicas.conftest import settings_with

UP, EJECTED, PROBATION = HealthState.UP, HealthState.EJECTED, HealthState.PROBATION
_TURNS = count(1)


class Another:
    """Another gateway of the group, which only writes and reads the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._verdicts: dict[str, int] = {}

    async def report_unhealthy(self, *backends: Backend) -> None:
        """Report these instances as unhealthy, and no others."""
        self._verdicts = {backend.key: next(_TURNS) for backend in backends}
        await self._store.exchange_messages(encode_state(GatewayState(next(_TURNS), verdicts=self._verdicts)))

    async def next_state(self) -> GatewayState:
        """Return the next state that the tested gateway publishes."""
        states: dict[int, GatewayState] = {}
        while len(states) < 3:  # the second one may have been written before the call
            messages = await self._store.exchange_messages(
                encode_state(GatewayState(next(_TURNS), verdicts=self._verdicts))
            )
            states |= {
                each.turn: each for name, text in messages.items() if name != "another" and (each := decode_state(text))
            }
        return states[max(states)]


@asynccontextmanager
async def _another(replicas: dict[str, object]) -> AsyncIterator[Another]:
    settings = settings_with(replicas)
    async with Store(settings, "another") as store:
        yield Another(store)
        await store.delete_own_message()


def _replicas(port: int) -> dict[str, object]:
    return {"url": f"redis://127.0.0.1:{port}/0", "interval_seconds": 0.01, "ttl_seconds": 60.0}


def _backends(deployment: Deployment) -> list[Backend]:
    """Return the backends in the order of the engines."""
    known = {backend.port: backend for backend in deployment.worker.pools.decode.all_backends()}
    return [known[engine.port] for engine in deployment.decoders]


def _state(deployment: Deployment, backend: Backend) -> HealthState:
    deployment.worker.pools.pool_of(backend.role).eligible_backends()  # updates the states that are due
    return deployment.worker.health.health_of(backend).health_state


async def test_instance_found_wedged_by_a_peer_is_tried_once(store_port: int, deploy: Deploy) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    wedged, well = deployment.decoders
    backend = _backends(deployment)[0]
    wedged.faults.add("refuse_status", status=500, times=None)  # its health checks pass
    async with _another(_replicas(store_port)) as other:
        await other.report_unhealthy(backend)
        await until(lambda: _state(deployment, backend) is PROBATION, "a trial")
        for _ in range(8):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert len(generations(wedged)) == 1
        assert len(generations(well)) == 8
        assert _state(deployment, backend) is EJECTED
        assert backend.key in (await other.next_state()).verdicts  # it is now a local verdict


async def test_peer_verdict_on_a_healthy_instance_costs_one_probe(store_port: int, deploy: Deploy) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    backend = _backends(deployment)[0]
    async with _another(_replicas(store_port)) as other:
        await other.report_unhealthy(backend)
        await until(lambda: _state(deployment, backend) is PROBATION, "a trial")
        for _ in range(4):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert _state(deployment, backend) is UP
        assert sum(1 for engine in deployment.decoders if generations(engine)) == 2
        await other.report_unhealthy(backend)  # a new verdict has another number
        await until(lambda: _state(deployment, backend) is PROBATION, "another trial")


class Lent:
    """An engine of another deployment, which this one neither starts nor stops."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Keep the engine running."""


@pytest.mark.fault(104)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_instance_that_refuses_a_peer_is_put_on_trial(store_port: int, deploy: Deploy, role: Role) -> None:
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
    (backend,) = [each for each in there.worker.pools.pool_of(role).all_backends() if each.name == name]
    await until(lambda: _state(there, backend) is PROBATION, "a trial")  # its health check has passed
    before = len(generations(bad))
    for _ in range(8):
        assert (await there.ask(request(Api.CHAT))).status == 200
    # The first one is its trial. Others come when its back-off ends, and after the third refusal none.
    assert 1 <= len(generations(bad)) - before <= 3


async def test_peer_verdicts_on_all_instances_leave_the_needed_ones(store_port: int, deploy: Deploy) -> None:
    deployment = await deploy(decoders=2, replicas=_replicas(store_port))
    backends = _backends(deployment)
    for engine in deployment.decoders:
        engine.faults.add("refuse_status", status=500, path="/health", times=None)
    async with _another(_replicas(store_port)) as other:
        await other.report_unhealthy(*backends)
        await until(lambda: EJECTED in [_state(deployment, backend) for backend in backends], "an ejection")
        for _ in range(4):
            assert (await deployment.ask(request(Api.CHAT))).status == 200
        assert [_state(deployment, backend) for backend in backends].count(EJECTED) == 1
        assert not (await other.next_state()).verdicts  # peer verdicts are not published


def test_peer_verdicts_expire_with_the_messages_of_their_gateway() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    peers.apply_messages(
        {
            "one": encode_state(GatewayState(1, verdicts={"a": 7})),
            "two": encode_state(GatewayState(1, verdicts={"a": 3, "b": 4})),
        },
        100.0,
    )
    assert peers.current_verdicts(100.9) == {("a", "one", 7), ("a", "two", 3), ("b", "two", 4)}
    assert peers.apply_news(News("two", 2, verdicts={"a": 0, "c": 5}), 100.9)
    assert peers.current_verdicts(101.5) == {("b", "two", 4), ("c", "two", 5)}
    assert peers.current_verdicts(102.0) == set()


def test_peer_verdict_is_read_with_any_host_uptime() -> None:
    number = round(10_000_000 * 1e9)  # nanoseconds of 115 days
    state = decode_state(encode_state(GatewayState(number, {}, verdicts={"a": number})))
    assert state is not None
    assert state.verdicts == {"a": number}
    news = decode_news(encode_news(News("one", number, verdicts={"a": number})))
    assert news is not None
    assert news.verdicts == {"a": number}


@pytest.mark.parametrize("state", [HealthState.DOWN, HealthState.EJECTED])
def test_peer_verdict_is_not_published_as_a_local_one(state: HealthState) -> None:
    board, backend = HealthBoard(worker_count=2, slot_count=4), Backend(Role.DECODE, "d", 1, slot=2)
    board.set_state(0, backend, state, is_from_peer=True)
    assert (board.is_found_unhealthy(backend), board.states_by_worker(backend)) == (False, [state, HealthState.UNKNOWN])
    board.set_state(1, backend, state)
    assert board.is_found_unhealthy(backend)
