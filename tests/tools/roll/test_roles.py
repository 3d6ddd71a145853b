"""`pdproxy roll --to-role` moves elastic instances one after the other, and prints the plan in a dry run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import SettingsError
from proxy.sim.engine import SimulatedEngine
from proxy.tools.roll import GatewayGroup, RoleWalk, RollLimits, RollProgress, RollStopped
from proxy.tools.roll.command import read_flags
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.tools.roll.test_command import roll
from tests.tools.roll.test_walk import PROBED, SOON, load, name_of


async def elastic_fleet(deploy: Deploy, decoders: int, **sections: Any) -> Deployment:
    """Start a gateway with one prefiller, whose instances are all elastic."""
    engines = [SimulatedEngine(role="both", decode_step_ms=5.0) for _ in range(1 + decoders)]
    return await deploy(engines[:1], engines[1:], health=PROBED, elastic={}, **sections)


def role_walk(gateway: Deployment, path: Path | None = None, told: list[str] | None = None, **limits: Any) -> RoleWalk:
    progress = RollProgress(path, "decode-to-prefill", "now")
    if path is not None:
        progress = RollProgress.resumed(path, "decode-to-prefill", "now")
    now, then = (GatewayGroup([gateway.url], role, None) for role in ("decode", "prefill"))
    tell = (told if told is not None else []).append
    return RoleWalk(now, then, progress, RollLimits(**{**SOON, **limits}), tell, 0.01)


async def goes(walk: RoleWalk, *only: str) -> None:
    await asyncio.to_thread(lambda: walk.run(walk.plan(only)))


async def roles(gateway: Deployment) -> dict[str, str]:
    async with gateway.session.get(gateway.url + "/instances") as response:
        return {one["address"]: one["role"] for one in (await response.json())["instances"]}


async def test_instances_move_one_after_the_other(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await elastic_fleet(deploy, 3)
    first, second, third = map(name_of, gateway.decoders)
    told: list[str] = []
    async with load(gateway, 6) as answers:
        await goes(role_walk(gateway, tmp_path / "state", told), first, second)
    assert [answer.is_done for answer in answers] == [True] * len(answers)
    now = await roles(gateway)
    assert (now[first], now[second], now[third]) == ("prefill", "prefill", "decode")
    assert [line for line in told if "of 2" in line] == [f"{first} (1 of 2)", f"{second} (2 of 2)"]
    assert not (tmp_path / "state").exists()
    await goes(role_walk(gateway, None, told), first)
    assert told[-1] == f"{first} is left out: it is a prefill instance already"


async def test_role_is_not_left_empty(deploy: Deploy) -> None:
    gateway = await elastic_fleet(deploy, 2)
    with pytest.raises(RollStopped, match="0 decode instances would stay, and 1 must serve: name fewer"):
        await goes(role_walk(gateway))
    assert list((await roles(gateway)).values()).count("decode") == 2


async def test_fixed_instances_are_refused(deploy: Deploy) -> None:
    gateway = await deploy(1, [SimulatedEngine(role="decode") for _ in range(2)], health=PROBED)
    address = name_of(gateway.decoders[0])
    with pytest.raises(RollStopped, match=f"{address} is not elastic at all gateways"):
        await goes(role_walk(gateway), address)


async def test_failed_move_ends_the_roll_and_the_instance_keeps_its_role(deploy: Deploy, tmp_path: Path) -> None:
    engines = [SimulatedEngine(role=role, profile_name="sglang") for role in ("prefill", "decode", "decode")]
    gateway = await deploy(engines[:1], engines[1:], health=PROBED, elastic={}, connector="sglang_bootstrap")
    address = name_of(gateway.decoders[0])
    walk = role_walk(gateway, tmp_path / "state")
    with pytest.raises(RollStopped, match=f"the move of {address} failed: its engine refuses"):
        await goes(walk, address)
    assert (await roles(gateway))[address] == "decode"
    assert RollProgress.resumed(tmp_path / "state", "decode-to-prefill", "now").current is None


async def test_stopped_roll_cancels_the_move(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await elastic_fleet(deploy, 2)
    address = name_of(gateway.decoders[0])
    walk = role_walk(gateway, tmp_path / "state", evacuate_after_seconds=3600.0)
    async with load(gateway, 2, holds=True):
        going = asyncio.create_task(goes(walk, address))
        async with asyncio.timeout(60):
            while not any(member.pending_move for member in gateway.roster.elastic_members()):  # noqa: ASYNC110 no event
                await asyncio.sleep(0.01)
        walk.stop()
        with pytest.raises(RollStopped, match="stopped by hand"):
            await going
        assert all(member.may_serve for member in gateway.roster.elastic_members())
    assert (await roles(gateway))[address] == "decode"


async def test_dry_run_prints_the_steps(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await elastic_fleet(deploy, 2)
    address = name_of(gateway.decoders[0])
    rolling = await roll(gateway, tmp_path, "--to-role", "prefill", "--instance", address, "--dry-run")
    said, _ = await rolling.communicate()
    assert rolling.returncode == 0
    assert said.decode() == (
        "1 decode instance to prefill, one at a time:\n"
        f"  {address}\n"
        "    no new decode requests\n"
        "    its 0 requests may end within 300 s, and after 10 s other instances continue them\n"
        "    it joins as a prefill instance, with its full share after 0 s\n"
    )
    rolling = await roll(gateway, tmp_path, "--to-role", "prefill", "--instance", address, "--settle-seconds", "0")
    said, _ = await rolling.communicate()
    assert said.decode().endswith("all 1 serve as prefill; clients have seen 0 requests fail meanwhile\n")
    assert (await roles(gateway))[address] == "prefill"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--role", "encode", "--to-role", "prefill"], "--to-role prefill needs --role decode"),
        (["--role", "decode", "--to-role", "decode"], "--to-role decode needs --role prefill"),
        (["--role", "decode", "--to-role", "prefill", "--hook", "true"], "--hook restarts instances"),
    ],
)
def test_contradicting_flags_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        read_flags(words)
