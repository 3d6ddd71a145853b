"""Processes are killed in the middle of a move: afterwards an instance has one role or none, and that is reported."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.state import EngineState
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, request
from tests.fleet.replicas.conftest import serving
from tests.scenarios.program import Program, gateway

pytestmark = pytest.mark.fault(163)

_ENVIRONMENT = {
    "PROXY_HEALTH__INTERVAL_SECONDS": "0.2",
    "PROXY_HEALTH__CHANGING_INTERVAL_SECONDS": "0.1",
    "PROXY_HEALTH__SLOW_START_SECONDS": "0",
}
_POLL_SECONDS = 0.05
_BODY = request(Api.CHAT, stream=True, max_tokens=40)


class Fleet:
    """Two prefillers and two decoders, all elastic. The second decoder moves."""

    def __init__(self, stack: AsyncExitStack, connector: str) -> None:
        self._stack = stack
        self._connector = connector
        self.engines: list[SimulatedEngine] = []

    async def start(self) -> None:
        for role in ("prefill", "prefill", "decode", "decode"):
            if self._connector == "vllm_pull":
                engine = SimulatedEngine(role="both", decode_step_ms=5.0)
            else:
                engine = SimulatedEngine(role=role, profile_name="sglang", pd_role_switch=True, decode_step_ms=5.0)
            self.engines.append(await self._stack.enter_async_context(engine))

    @property
    def mover(self) -> SimulatedEngine:
        return self.engines[3]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.mover.port}"

    async def gateway(self, *words: str, **environment: str) -> Program:
        """Start a gateway in front of all engines."""
        roles = ("prefill", "prefill", "decode", "decode")
        instances: list[str] = []
        for role, engine in zip(roles, self.engines, strict=True):
            ports = [str(engine.bootstrap_port)] if engine.bootstrap_port else []
            instances += [f"--{role}", engine.url, *(ports if role == "prefill" else [])]
            instances += ["--elastic", engine.url, *ports]
        words = ("--connector", self._connector, *instances, *words)
        return await self._stack.enter_async_context(gateway(*words, **_ENVIRONMENT, **environment))

    async def order(self, program: Program, role: str, **fields: Any) -> None:
        """Order a role for the moving instance."""
        body = {"role": role, "instances": self.address, **fields}
        async with aiohttp.ClientSession() as session, session.post(f"{program.url}/instances/role", json=body) as told:
            assert told.status == 200, await told.text()

    async def has(self, program: Program, what: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until a gateway reports the moving instance so."""
        async with asyncio.timeout(60):
            while True:
                try:
                    async with aiohttp.ClientSession() as session, session.get(f"{program.url}/instances") as answer:
                        told = (await answer.json())["instances"]
                except aiohttp.ClientConnectionError:  # its worker was killed
                    told = []
                for mine in told:
                    if mine["address"] == self.address and what(mine):
                        return dict(mine)
                await asyncio.sleep(_POLL_SECONDS)

    async def serves(self, program: Program, role: str) -> dict[str, Any]:
        """Wait until a gateway reports that the moving instance serves in a role, and check answers."""
        told = await self.has(
            program, lambda one: one["role"] == role and one["state"] == "up" and one["elastic"]["moves_to"] is None
        )
        async with aiohttp.ClientSession() as session:
            answers = [await ask(session, program.url, _BODY) for _ in range(4)]
        assert [answer.text for answer in answers] == [await answer_alone(_BODY)] * 4
        return told


def is_asked(state: EngineState) -> bool:
    """Return whether an engine was asked to exchange its role."""
    return any(seen.path == "/pd_role_switch" for seen in state.requests)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.mark.parametrize("has_switched", [False, True])
async def test_killed_workers_leave_the_role_that_the_engine_reports(stack: AsyncExitStack, has_switched: bool) -> None:
    """All workers die while the engine exchanges its role, so none gets its answer."""
    fleet = Fleet(stack, "sglang_bootstrap")
    await fleet.start()
    program = await fleet.gateway("--workers", "2")
    await fleet.serves(program, "decode")
    fleet.mover.faults.add("hang_before_headers", path="/pd_role_switch", times=1)
    await fleet.order(program, "prefill", evacuate_after=0)
    await fleet.mover.wait_until(is_asked)
    told = await fleet.has(program, lambda one: one["elastic"]["is_role_unknown"])
    assert (told["role"], told["elastic"]["moves_to"]) == ("decode", "prefill")
    if has_switched:
        fleet.mover.options.switch_role("prefill")
    for pid in program.children():
        os.kill(pid, signal.SIGKILL)
    told = await fleet.serves(program, "prefill" if has_switched else "decode")
    assert told["elastic"]["last_problem"] == (None if has_switched else "its engine still has the role decode")
    assert not told["elastic"]["is_role_unknown"]


async def test_killed_workers_do_not_end_a_move_of_running_answers(stack: AsyncExitStack) -> None:
    fleet = Fleet(stack, "vllm_pull")
    await fleet.start()
    program = await fleet.gateway("--workers", "2")
    await fleet.serves(program, "decode")
    async with AsyncExitStack() as clients:
        fleet.mover.faults.add("stall_after_tokens", tokens=3)
        for _ in range(8):
            client = await clients.enter_async_context(aiohttp.ClientSession())
            await clients.enter_async_context(client.post(program.url + Api.CHAT.path, json=_BODY))
        await fleet.mover.wait_until(lambda state: state.live > 0)
        await fleet.order(program, "prefill", evacuate_after=None)
        await fleet.has(program, lambda one: one["elastic"]["moves_to"] == "prefill")
        for pid in program.children():
            os.kill(pid, signal.SIGKILL)
        fleet.mover.faults.clear()
    told = await fleet.serves(program, "prefill")
    assert told["elastic"]["last_problem"] is None


@pytest.mark.parametrize(
    ("connector", "has_switched", "role"),
    [("vllm_pull", False, "decode"), ("sglang_bootstrap", False, "decode"), ("sglang_bootstrap", True, "prefill")],
)
async def test_gateway_after_a_kill_begins_with_the_role_of_the_engine(
    stack: AsyncExitStack, connector: str, has_switched: bool, role: str
) -> None:
    """Engines that serve both roles begin with that of the configuration."""
    fleet = Fleet(stack, connector)
    await fleet.start()
    program = await fleet.gateway()
    await fleet.serves(program, "decode")
    fleet.mover.faults.add("hang_before_headers", path="/pd_role_switch", times=1)
    fleet.mover.faults.add("stall_after_tokens", tokens=3, times=1)
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(ask(client, program.url, _BODY))
        await fleet.order(program, "prefill", evacuate_after=0)
        if connector == "sglang_bootstrap":
            await fleet.mover.wait_until(is_asked)
        if has_switched:
            fleet.mover.options.switch_role("prefill")
        program.signal(signal.SIGKILL)
        await program.ended()
        await asyncio.gather(asking, return_exceptions=True)
    fleet.mover.faults.clear()
    await fleet.mover.wait_until(lambda state: not state.live)
    told = await fleet.serves(await fleet.gateway(), role)
    assert not told["elastic"]["is_role_unknown"]


@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap"])
async def test_gateways_agree_on_a_role_after_the_loss_of_their_store(stack: AsyncExitStack, connector: str) -> None:
    """The store ends in the middle of a move. The older gateway leads, and the younger one follows it."""
    fleet = Fleet(stack, connector)
    await fleet.start()
    elastic = {
        "PROXY_ELASTIC__MODE": "auto",
        "PROXY_ELASTIC__WINDOW_SECONDS": "3600",
        "PROXY_REPLICAS__INTERVAL_SECONDS": "0.1",
    }
    with serving() as port:
        elastic["PROXY_REPLICAS__URL"] = f"redis://127.0.0.1:{port}/0"
        leader = await fleet.gateway(**elastic)
        follower = await fleet.gateway(**elastic)
        for program in (leader, follower):
            await program.counts("pdproxy_replicas_peers 1.0")
            await fleet.serves(program, "decode")
        fleet.mover.faults.add("stall_after_tokens", tokens=3)
        clients = await stack.enter_async_context(aiohttp.ClientSession())
        asking = [asyncio.create_task(ask(clients, leader.url, _BODY)) for _ in range(4)]
        await fleet.mover.wait_until(lambda state: state.live > 0)
        await fleet.order(leader, "prefill", evacuate_after=None)
        await fleet.has(follower, lambda one: one["elastic"]["moves_to"] == "prefill")
    for program in (leader, follower):
        await program.counts("pdproxy_replicas_peers 0.0")
    told = await fleet.has(leader, lambda one: one)
    assert (told["role"], told["elastic"]["moves_to"]) == ("decode", "prefill")
    fleet.mover.faults.clear()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    for program in (leader, follower):
        await fleet.serves(program, "prefill")


async def test_restarted_gateway_follows_the_older_one(stack: AsyncExitStack) -> None:
    fleet = Fleet(stack, "vllm_pull")
    await fleet.start()
    with serving() as port:
        elastic = {
            "PROXY_ELASTIC__MODE": "auto",
            "PROXY_ELASTIC__WINDOW_SECONDS": "3600",
            "PROXY_REPLICAS__INTERVAL_SECONDS": "0.1",
            "PROXY_REPLICAS__URL": f"redis://127.0.0.1:{port}/0",
        }
        older = await fleet.gateway(**elastic)
        await fleet.order(older, "prefill", evacuate_after=0)
        await fleet.serves(older, "prefill")
        younger = await fleet.gateway(**elastic)
        await fleet.serves(younger, "prefill")
        await fleet.serves(older, "prefill")
