"""A file that is rewritten again and again, and is broken or gone in between, while clients are served."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import yaml

from proxy.discovery import SOURCES
from proxy.discovery.files import WatchedFiles
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.deployment import generations
from tests.discovery.test_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest

    from tests.conftest import Deploy
    from tests.deployment import Deployment

CHANGES = 16
CLIENTS = 8


def groups(*engines: SimulatedEngine) -> str:
    listed = [
        {"targets": [f"{engine.host}:{engine.port}"], "labels": {"role": engine.options.role}} for engine in engines
    ]
    return yaml.safe_dump(listed)


def members(gateway: Deployment) -> set[tuple[str, int]]:
    """Those that are enabled and up."""
    pools = gateway.worker.pools
    return {(backend.host, backend.port) for pool in (pools.prefill, pools.decode) for backend in pool.eligible()}


def problem(gateway: Deployment) -> str | None:
    (state,) = gateway.sources.all().values()
    return state.problem


def places(engines: Collection[SimulatedEngine]) -> set[tuple[str, int]]:
    return {(engine.host, engine.port) for engine in engines}


async def test_clients_notice_nothing_of_instances_that_come_and_go(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "file", lambda settings: [WatchedFiles(p, 0.002) for p in settings.discovery.files])
    chance = random.Random(7)
    path = tmp_path / "engines.yaml"
    async with AsyncExitStack() as stack:
        prefillers = [await stack.enter_async_context(SimulatedEngine(role="prefill")) for _ in range(3)]
        decoders = [
            await stack.enter_async_context(SimulatedEngine(role="decode", decode_step_ms=4.0)) for _ in range(4)
        ]
        unhealthy = await stack.enter_async_context(SimulatedEngine(role="decode"))
        unhealthy.faults.add("refuse_status", path="/health", status=503)
        path.write_text(groups(*prefillers, *decoders, unhealthy), encoding="utf-8")
        gateway = await deploy(
            0,
            0,
            discovery={"files": [str(path)]},
            health={"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "slow_start_seconds": 0.0},
            leaving={"evacuate_after_seconds": 0.02},
        )
        gateway.prefillers.extend(prefillers)
        gateway.decoders.extend([*decoders, unhealthy])
        await until(lambda: members(gateway) == places([*prefillers, *decoders]), "the instances of the file")

        body = request(Api.CHAT, stream=True, max_tokens=20)
        expected = await answer_alone(body)
        answers: list[tuple[int, bool, str]] = []
        has_ended = asyncio.Event()

        async def client() -> None:
            while not has_ended.is_set():
                answer = await gateway.ask(body)
                answers.append((answer.status, answer.is_done, answer.text))

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        for number in range(CHANGES):
            if number % 4 == 1:
                before = members(gateway)
                if number % 8 == 1:
                    path.unlink()
                else:
                    path.write_text("- targets: [", encoding="utf-8")
                await until(lambda: problem(gateway), "the failure to be noticed")
                assert members(gateway) == before
            chosen = [
                *chance.sample(prefillers, chance.randint(1, len(prefillers))),
                *chance.sample(decoders, chance.randint(1, len(decoders))),
            ]
            replace_file(path, groups(*chosen, unhealthy))
            served = len(answers)
            await until(lambda: members(gateway) == places(chosen), f"change {number}", 10.0)  # noqa: B023
            await until(lambda: len(answers) > served, "somebody to be served meanwhile")  # noqa: B023
        has_ended.set()
        await asyncio.gather(*clients)
        assert set(answers) == {(200, True, expected)}
        assert len(answers) >= CHANGES
        assert not generations(unhealthy), "what has never been well gets no requests"
