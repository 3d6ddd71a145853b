"""Decoders are restarted one after the other in front of clients, who do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.tools.roll import GatewayGroup, GatewayProblem, RestartWalk, RollLimits, RollProgress, RollStopped
from proxy.tools.roll.gateways import RollInstance, models_lost_without
from proxy.wire.openai import Api
from tests.asking import Answer, answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import Deployment

PROBED: dict[str, Any] = {
    "interval_seconds": 0.02,
    "changing_interval_seconds": 0.02,
    "fall": 3,
    "rise": 1,
    "slow_start_seconds": 0.0,
}
SOON: dict[str, Any] = {"evacuate_after_seconds": 0.0, "ready_seconds": 60.0, "settle_seconds": 0.0}
BODY = request(Api.CHAT, stream=True, max_tokens=60)


def slow() -> SimulatedEngine:
    return SimulatedEngine(role="decode", decode_step_ms=5.0)


def name_of(engine: SimulatedEngine) -> str:
    return f"127.0.0.1:{engine.port}"


class Roll:
    """A walk in a separate thread, in front of a deployment. `restarts` lists the restarted instances."""

    def __init__(self, gateway: Deployment, path: Path | None = None, **limits: Any) -> None:
        self.restarts: list[str] = []
        self.told: list[str] = []
        self.fails = False
        self.while_away: Callable[[], object] = lambda: None
        self._engines = {name_of(engine): engine for engine in gateway.decoders}
        self._loop = asyncio.get_running_loop()
        self._gateways = GatewayGroup([gateway.url], "decode", None)
        self.progress = RollProgress(path, "decode", "now")
        if path is not None:
            self.progress = RollProgress.resumed(path, "decode", "now")
        self.walk = RestartWalk(
            self._gateways, self.progress, RollLimits(**{**SOON, **limits}), self._restart, self.told.append, 0.01
        )

    def _restart(self, address: str) -> None:
        if self.fails:
            raise RollStopped("the hook failed")
        self.while_away()
        asyncio.run_coroutine_threadsafe(self._engines[address].restart(), self._loop).result(60)
        self.restarts.append(address)

    async def goes(self, only: tuple[str, ...] = ()) -> None:
        await asyncio.to_thread(lambda: self.walk.run(self.walk.plan(only)))


async def memberships(gateway: Deployment) -> list[str]:
    async with gateway.session.get(gateway.url + "/instances") as response:
        told = (await response.json())["instances"]
    return [one["membership"] for one in told if one["role"] == "decode"]


@asynccontextmanager
async def load(gateway: Deployment, streams: int, *, holds: bool = False) -> AsyncIterator[list[Answer]]:
    """Clients that ask again and again until the end of the block; the answers so far.

    `holds`: the first answers do not end within the block, unless their decoder is restarted.
    """
    answers: list[Answer] = []
    is_over = False

    async def client() -> None:
        while not is_over:
            answers.append(await gateway.ask(BODY))

    with ExitStack() as held:
        for engine in gateway.decoders:
            held.enter_context(engine.held())
        clients = [asyncio.create_task(client()) for _ in range(streams)]
        await until(lambda: sum(engine.state.live for engine in gateway.decoders) == streams, "all streams")
        if not holds:
            held.close()
        yield answers
        is_over = True
    await asyncio.gather(*clients)


async def test_clients_see_no_failures_during_a_roll(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(2, [slow(), slow(), slow()], health=PROBED)
    roll = Roll(gateway, tmp_path / "state")
    async with load(gateway, 9) as answers:
        await roll.goes()
    assert roll.restarts == [name_of(engine) for engine in gateway.decoders]
    text = await answer_alone(BODY)
    assert {(answer.is_done, answer.text) for answer in answers} == {(True, text)}
    moved = [*gateway.metrics("pdproxy_resumes_total"), *gateway.metrics("pdproxy_retries_total")]
    assert moved
    assert all("removed" in labels for labels in moved)  # and none was lost when an engine ended
    assert not gateway.metrics("pdproxy_instance_ejected_total")
    assert await memberships(gateway) == ["enabled"] * 3
    assert not (tmp_path / "state").exists()


async def test_roll_stops_when_requests_of_clients_fail(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED, resume={"mode": "off"})
    roll = Roll(gateway)
    async with load(gateway, 2, holds=True):
        with pytest.raises(RollStopped, match=r"clients saw (1 request|2 requests) fail"):
            await roll.goes()
    assert len(roll.restarts) <= 1
    assert await memberships(gateway) == ["enabled", "enabled"]


async def test_roll_stopped_during_a_drain_can_be_resumed(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    first, second = map(name_of, gateway.decoders)
    roll = Roll(gateway, tmp_path / "state", evacuate_after_seconds=None)
    async with load(gateway, 2, holds=True):
        going = asyncio.create_task(roll.goes((second,)))
        async with asyncio.timeout(60):
            while await memberships(gateway) != ["enabled", "disabled"]:
                pass
        roll.walk.stop()
        with pytest.raises(RollStopped, match="stopped by hand"):
            await going
    assert await memberships(gateway) == ["enabled", "enabled"]
    # Stopped while one was away, it comes to an end with that one.
    roll = Roll(gateway, tmp_path / "state")
    roll.while_away = roll.walk.stop
    with pytest.raises(RollStopped, match="stopped by hand"):
        await roll.goes()
    assert (roll.progress.done, roll.progress.current) == ([first], None)
    roll = Roll(gateway, tmp_path / "state")
    assert roll.progress.is_begun
    await roll.goes()
    assert roll.restarts == [second]
    assert roll.told[0] == f"{first} is left out: it was restarted before"


async def test_instance_whose_hook_fails_stays_away_until_it_is_taken_up(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    first, second = map(name_of, gateway.decoders)
    roll = Roll(gateway, tmp_path / "state")
    roll.fails = True
    with pytest.raises(RollStopped, match="the hook failed"):
        await roll.goes((second,))
    assert await memberships(gateway) == ["enabled", "disabled"]
    roll = Roll(gateway, tmp_path / "state")
    await roll.goes()
    assert roll.restarts == [second, first]
    assert await memberships(gateway) == ["enabled", "enabled"]


async def test_instance_disabled_before_is_left_out(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow(), slow()], health=PROBED)
    first, second, third = map(name_of, gateway.decoders)
    body = {"type": "decode", "instances": second}
    async with gateway.session.post(gateway.url + "/instances/disable", json=body) as response:
        assert response.status == 200
    roll = Roll(gateway)
    await roll.goes()
    assert roll.restarts == [first, third]
    assert roll.told[0] == f"{second} is left out: it was disabled before this roll"
    assert roll.walk.min_serving == 1
    assert await memberships(gateway) == ["enabled", "disabled", "enabled"]


async def test_enough_others_have_to_serve(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    roll = Roll(gateway, ready_seconds=0.1)
    planned = await asyncio.to_thread(roll.walk.plan)
    await gateway.decoders[1].kill()
    await until(lambda: len(gateway.worker.pools.decode.eligible_backends()) == 1, "the gateway to see it")
    with pytest.raises(RollStopped, match=r"timed out after 0.1 s, waiting until enough other instances serve"):
        await asyncio.to_thread(roll.walk.run, planned[:1])
    assert await memberships(gateway) == ["enabled", "enabled"]
    assert roll.restarts == []
    with pytest.raises(RollStopped, match="fewer than 2 other instances would serve"):
        await Roll(gateway, min_serving=2).goes()


def test_models_that_only_one_instance_serves() -> None:
    def serving(*models: str) -> RollInstance:
        return RollInstance("127.0.0.1:1", is_disabled=False, serves=True, inflight=0, models=frozenset(models))

    away = serving("kimi", "qwen")
    assert models_lost_without(away, [serving("kimi"), serving("kimi")]) == {"qwen"}
    assert models_lost_without(away, [serving("kimi"), serving("qwen", "glm")]) == set()
    assert models_lost_without(away, [serving("kimi"), serving()]) == set()  # which may serve any
    assert models_lost_without(serving(), [serving("kimi")]) == set()


async def test_only_instance_of_a_model_counts_as_the_only_one(deploy: Deploy) -> None:
    prefillers = [SimulatedEngine(role="prefill", model=model) for model in "ab"]
    decoders = [SimulatedEngine(role="decode", model=model) for model in "aba"]
    gateway = await deploy(prefillers, decoders, health=PROBED)
    first, second, third = map(name_of, gateway.decoders)
    with pytest.raises(RollStopped, match=f"{second} is the only instance that serves b: use --min-serving 0"):
        await Roll(gateway).goes()
    roll = Roll(gateway)
    await roll.goes((first, third))
    assert roll.restarts == [first, third]


async def test_only_instance_is_restarted_if_that_is_said(deploy: Deploy) -> None:
    gateway = await deploy(1, [slow()], health=PROBED)
    with pytest.raises(RollStopped, match="fewer than 1 other instances would serve"):
        await Roll(gateway).goes()
    roll = Roll(gateway, min_serving=0)
    await roll.goes()
    assert len(roll.restarts) == 1
    assert roll.told[1] == ("  No decode instance is left: requests that need one are rejected until one is enabled.")


async def test_instance_that_does_not_come_back_ends_it(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    roll = Roll(gateway, tmp_path / "state", ready_seconds=0.2)
    roll.while_away = lambda: gateway.decoders[0].faults.add("refuse_status", path="/health")
    with pytest.raises(RollStopped, match=r"timed out after 0.2 s, waiting until .* serves again"):
        await roll.goes()
    assert roll.progress.current == name_of(gateway.decoders[0])
    assert roll.restarts == [name_of(gateway.decoders[0])]


async def test_unknown_instances_are_reported(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    with pytest.raises(RollStopped, match=r"not all gateways have these instances: a:1, b:2"):
        await Roll(gateway).goes(("a:1", "b:2"))


async def test_gateway_that_is_away_for_good_is_one_sentence(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.tools.roll.gateways._PATIENCE_SECONDS", 0.0)
    gateway = await deploy(1, 2)
    roll = Roll(gateway)
    await gateway.end()
    with pytest.raises(GatewayProblem, match=f"{gateway.url} does not answer"):
        await roll.goes()


async def test_refusal_of_a_gateway_is_reported_with_its_text(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, auth={"admin_key": "canary"})
    with pytest.raises(GatewayProblem, match="answers 401: this route needs the admin key"):
        await Roll(gateway).goes()


async def test_port_of_clients_is_reported_when_administration_has_another(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, admin={"port": 0})
    with pytest.raises(
        GatewayProblem, match=r"answers 404: .*; if the gateway has an admin\.port, give that port in --url"
    ):
        await Roll(gateway).goes()
