"""A custom source of discovery in a running gateway: `listed.py` and an entry in SOURCES."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.sources import SOURCES
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.fleet.discovery.listed import Listed

HEALTH = {"interval_seconds": 0.05, "changing_interval_seconds": 0.05}


def backend(engine: SimulatedEngine) -> Backend:
    return Backend(Role.DECODE, engine.host, engine.port)


async def shown_state(gateway: Deployment, engine: SimulatedEngine) -> list[Any]:
    """Return the origins, membership and state of an instance as GET /instances shows them."""
    async with gateway.session.get(gateway.url + "/instances") as response:
        instances: list[dict[str, Any]] = (await response.json())["instances"]
    (one,) = (one for one in instances if one["address"] == backend(engine).name)
    return [one["origins"], one["membership"], one["state"]]


async def test_instances_of_a_custom_source_serve_drain_and_leave(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Listed()
    monkeypatch.setitem(SOURCES, "listed", lambda _: [listed])
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(SimulatedEngine(role="decode", decode_step_ms=10.0)) for _ in range(2)]
        gateway = await deploy(1, 1, health=HEALTH)
        (configured,) = gateway.decoders
        pool = gateway.worker.pools.decode
        listed.publish(*map(backend, found))
        await until(lambda: len(pool.eligible_backends()) == 3, "both to be there")
        async with asyncio.timeout(60):
            for engine in found:
                while await shown_state(gateway, engine) != [["listed:test"], "enabled", "up"]:
                    pass

        gateway.worker.joiner.remove_instance(Role.DECODE, configured.host, configured.port)
        body = request(Api.CHAT, stream=True, max_tokens=60)
        asked = [asyncio.create_task(gateway.ask(body)) for _ in range(4)]
        leaving, stays = found
        await leaving.wait_until(lambda state: state.live == 2)
        listed.publish(backend(stays))
        await until(lambda: list(pool.eligible_backends()) == [backend(stays)], "only one to be left")
        assert (await shown_state(gateway, leaving))[:2] == [[], "draining"]
        for task in asked:
            answer = await task
            assert (answer.is_done, answer.text) == (True, await answer_alone(body))
        await until(lambda: backend(leaving) not in pool.all_backends(), "it to be dropped")
        assert not gateway.metrics("pdproxy_resumes_total")

        seen = len(leaving.requests)
        assert (await gateway.ask(body)).is_done
        assert not any(each.path == Api.CHAT.path for each in leaving.requests[seen:])
