"""Joining against small real servers."""

from __future__ import annotations

import logging

import pytest
from aiohttp.test_utils import unused_port

from proxy.balancer.backend_health import HealthState
from proxy.balancer.pick import PickRequest
from proxy.balancer.roster import ADMIN, CONFIG
from proxy.common.backend import Backend, Load, Role
from proxy.settings import Joining
from proxy.upstream import EngineClient
from tests.fleet.discovery.engines import HOST, Engine, Gateway, until


async def test_instance_joins_once_it_answers(
    client: EngineClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine.status = 503
    gateway = Gateway([], joining_attempts=1_000_000)
    async with gateway.joining(client) as joiner:
        assert joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        assert not joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        await until(lambda: len(engine.seen) > 2)
        assert [backend.port for backend in joiner.joining_instances(Role.PREFILL)] == [engine.port]
        assert (joiner.joining_instances(Role.DECODE), gateway.names(Role.PREFILL)) == ([], [])
        engine.status = 200
        transition = await gateway.transitions.get()
        assert transition.new_state is HealthState.UP
        assert joiner.joining_instances(Role.PREFILL) == []
        assert not joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
    assert f"joining: prefill instance {HOST}:{engine.port} is added" in caplog.messages


async def test_joined_instance_has_facts_and_serves_at_once(client: EngineClient, engine: Engine) -> None:
    gateway, other = Gateway([], interval_seconds=3600), Engine()
    pool = gateway.pools[Role.PREFILL]
    assert pool.all_backends() == ()
    async with other.server, gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        transition = await gateway.transitions.get()
        assert (transition.new_state, transition.reason) == (HealthState.UP, "answered /v1/models")
        assert pool.eligible_backends() == (transition.backend,)
        assert gateway.health.request_share_percent(transition.backend) < 100
        await until(lambda: gateway.health.health_of(transition.backend).engine_facts is not None)
        gateway.roster.add_for_administrator(
            Backend(Role.DECODE, HOST, other.port)
        )  # when this is probed, so would be the first
        await gateway.transitions.get()
    assert sorted(path for path, _ in engine.seen) == ["/v1/models", "/v1/models", "/version"]


async def test_engine_key_is_not_for_instances_added_later(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([])
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.DECODE, HOST, engine.port))
        await until(lambda: ("/health", None) in engine.seen)
    assert ("/v1/models", None) in engine.seen
    assert not any(authorization for _, authorization in engine.seen)


async def test_added_instance_gets_the_engine_key_when_send_key_is_set(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([])
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.DECODE, HOST, engine.port, is_trusted=True))
        await gateway.transitions.get()
    assert {authorization for _, authorization in engine.seen} == {"Bearer s3cret"}


async def test_silent_instance_is_abandoned_with_one_warning(
    client: EngineClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.status = 503
    gateway = Gateway([], joining_attempts=3)
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        await until(lambda: not joiner.joining_instances(Role.PREFILL))
    assert [path for path, _ in engine.seen] == ["/v1/models"] * 3
    assert caplog.messages == [
        f"joining: prefill instance {HOST}:{engine.port} is not added: /v1/models answered with status 503"
    ]


async def test_removing_a_joining_instance_stops_the_waiting(client: EngineClient, engine: Engine) -> None:
    engine.status = 503
    gateway = Gateway([], joining_interval_seconds=3600)
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        await engine.asked.wait()
        assert joiner.remove_instance(Role.PREFILL, HOST, engine.port)
        assert not joiner.remove_instance(Role.PREFILL, HOST, engine.port)
        assert joiner.joining_instances(Role.PREFILL) == []
        engine.status = 200
        assert joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        await until(lambda: gateway.names(Role.PREFILL) == [f"{HOST}:{engine.port}"])
        assert joiner.joining_instances(Role.PREFILL) == []


async def test_draining_instance_may_come_back(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    pool = gateway.pools[Role.PREFILL]
    async with gateway.joining(client) as joiner:
        with pool.make_lease(PickRequest.make_for_load(Load())) as lease:
            joiner.remove_instance(Role.PREFILL, HOST, engine.port)
            assert pool.eligible_backends() == ()
            assert joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
            await until(lambda: pool.eligible_backends() == (lease.backend,))
            assert pool.scoreboard.open_leases(lease.backend.slot) == 1


async def test_endpoint_has_one_role(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port], joining_interval_seconds=3600)
    async with gateway.joining(client) as joiner:
        with pytest.raises(ValueError, match="already a prefill instance"):
            joiner.join_when_ready(Backend(Role.DECODE, HOST, engine.port))
        port = unused_port()
        joiner.join_when_ready(Backend(Role.DECODE, HOST, port))
        with pytest.raises(ValueError, match="already a decode instance"):
            joiner.join_when_ready(Backend(Role.PREFILL, HOST, port))


async def test_instance_is_abandoned_when_the_roster_is_full(
    client: EngineClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway([])
    for port in range(1, 9):
        gateway.roster.add_for_administrator(Backend(Role.DECODE, "10.0.0.1", port))
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.PREFILL, HOST, engine.port))
        await until(lambda: not joiner.joining_instances(Role.PREFILL))
    assert "there is no room for another instance" in caplog.text


async def test_changed_settings_hold_for_the_next_instance(client: EngineClient) -> None:
    gateway = Gateway([], joining_interval_seconds=3600)
    async with gateway.joining(client) as joiner:
        gateway.settings = Joining(max_attempts=1)
        joiner.join_when_ready(Backend(Role.DECODE, HOST, unused_port()))
        await until(lambda: not joiner.joining_instances(Role.DECODE))


async def test_existing_instance_belongs_to_the_administrator_once_added(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([], [engine.port])
    async with gateway.joining(client) as joiner:
        assert not joiner.join_when_ready(Backend(Role.DECODE, HOST, engine.port))
    gateway.roster.sync_origin(CONFIG, [])
    assert [member.origins for member in gateway.roster.members_of_role(Role.DECODE)] == [(ADMIN,)]
