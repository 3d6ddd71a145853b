"""Clients are served while a source changes its instances repeatedly and sometimes fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.fleet.discovery.keepers import keeper

CHANGES = 8
CLIENTS = 4


def serving(gateway: Deployment) -> set[int]:
    """Return the ports of instances that are enabled and up."""
    pools = gateway.worker.pools
    return {backend.port for pool in (pools.prefill, pools.decode) for backend in pool.eligible_backends()}


def ports(engines: Collection[SimulatedEngine]) -> set[int]:
    return {engine.port for engine in engines}


@pytest.mark.parametrize("kind", ["file", "dns", "kubernetes"])
async def test_clients_are_served_while_a_source_changes_and_fails(
    deploy: Deploy, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(7)
    async with AsyncExitStack() as stack:

        async def engines(count: int, role: str, step_ms: float = 0.0) -> list[SimulatedEngine]:
            new = (SimulatedEngine(role=role, decode_step_ms=step_ms) for _ in range(count))
            return [await stack.enter_async_context(engine) for engine in new]

        prefillers, decoders = await engines(3, "prefill"), await engines(4, "decode", step_ms=4.0)
        (unhealthy,) = await engines(1, "decode")
        unhealthy.faults.add("refuse_status", path="/health", status=503)
        source = await stack.enter_async_context(keeper(kind, tmp_path, monkeypatch))
        source.publish(*prefillers, *decoders, unhealthy)
        gateway = await deploy(
            0,
            0,
            **source.settings,
            health={"interval_seconds": 0.1, "changing_interval_seconds": 0.05, "slow_start_seconds": 0.0},
            leaving={"evacuate_after_seconds": 0.02},
            # On a busy machine the only remaining decoder may be slow, so requests queue.
            admission={"wait_seconds": 15.0},
            resume={"deadline_seconds": 15.0},
        )
        # Some requests are evacuated while a prefiller answers.
        gateway.expects_inexact_pins, gateway.may_stay_pinned = True, 1000
        gateway.prefillers.extend(prefillers)
        gateway.decoders.extend([*decoders, unhealthy])
        await until(lambda: serving(gateway) == ports([*prefillers, *decoders]), "the instances of the source")

        body = request(Api.CHAT, stream=True, max_tokens=20)
        expected = await answer_alone(body)
        answers: list[tuple[int, bool, str]] = []
        has_ended = asyncio.Event()

        async def client() -> None:
            while not has_ended.is_set():
                answer = await gateway.ask(body)
                answers.append((answer.status, answer.is_done, answer.text or str(answer.error)))

        async def wait_until_only(*chosen: SimulatedEngine) -> None:
            """Wait until only these instances serve, and a client has got an answer since the call."""
            served = len(answers)
            await until(lambda: serving(gateway) == ports(chosen) and len(answers) > served, "the change")

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        chosen = [*prefillers, *decoders]
        for turn in range(CHANGES):
            if turn % 4 == 1:
                source.fail(turn // 4)
                states = gateway.sources
                await until(
                    lambda states=states: all(one.problem for one in states.states_by_origin().values()),
                    "the failure to be noticed",
                )
                await wait_until_only(*chosen)
            chosen = [
                *chance.sample(prefillers, chance.randint(1, len(prefillers))),
                *chance.sample(decoders, chance.randint(1, len(decoders))),
            ]
            source.publish(*chosen, unhealthy)
            await wait_until_only(*chosen)
        has_ended.set()
        await asyncio.gather(*clients)
        assert set(answers) == {(200, True, expected)}
        assert len(answers) >= CHANGES
        assert not generations(unhealthy), "an instance that was never healthy gets no requests"
        await until(lambda: not gateway.leaks(), "the release of the last leases, before the engines stop")
