"""`POST /instances/role`: moves, dry runs, refusals, and roles that the gateway may choose again."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.balancer.roster import RosterMember
from proxy.common.backend import Role
from proxy.settings import Settings
from tests.api.conftest import Gateway
from tests.api.operating import Client, change, client_of

FREE = {"role": "decode", "moves_to": None, "is_pinned": False}
ADDRESS = "127.0.0.1:7001"


def decoders(gateway: Gateway, count: int, *, elastic: int) -> None:
    """Add decoders at ports from 7001 on, of which the first ones are elastic."""
    for number in range(count):
        gateway.add(Role.DECODE, "127.0.0.1", 7001 + number, is_elastic=number < elastic)


def first(gateway: Gateway) -> RosterMember:
    return next(member for member in gateway.roster.elastic_members() if member.backend.name == ADDRESS)


async def shown(client: Client) -> dict[str, Any]:
    async with client.get("/instances") as answer:
        return {one["address"]: one for one in (await answer.json())["instances"]}


async def test_move_begins_and_is_pinned(gateway: Gateway) -> None:
    decoders(gateway, 2, elastic=1)
    client = await client_of(gateway)
    status, answer = await change(client, "role", role="prefill", instances=ADDRESS)
    becomes = {**FREE, "moves_to": "prefill", "is_pinned": True}
    assert (status, answer["changes"]) == (200, [{"instance": ADDRESS, "was": FREE, "becomes": becomes}])
    assert [backend.name for backend in gateway.pools[Role.DECODE].eligible_backends()] == ["127.0.0.1:7002"]
    elastic = (await shown(client))[ADDRESS]["elastic"]
    assert (elastic["moves_to"], elastic["is_pinned"], elastic["is_role_unknown"]) == ("prefill", True, False)
    assert elastic["move_reason"].startswith("requested by ")
    assert 290 < elastic["move_ends_in_seconds"] <= 300
    assert (await shown(client))["127.0.0.1:7002"]["elastic"] is None


async def test_dry_run_prints_the_steps_and_changes_nothing(gateway: Gateway) -> None:
    decoders(gateway, 2, elastic=1)
    client = await client_of(gateway, settings=Settings(connector="sglang_bootstrap"))
    before = gateway.roster.version_cells[0]
    _, would = await change(client, "role?dry_run=true", role="prefill", instances=ADDRESS, evacuate_after=7)
    assert would["message"].startswith("Dry run, nothing is changed: ")
    assert would["plan"] == [
        {
            "instance": ADDRESS,
            "steps": [
                "no new decode requests",
                "its 0 requests may end within 300 s, and after 7 s other instances continue them",
                "its engine exchanges its role (POST /pd_role_switch)",
                "it joins as a prefill instance, with its full share after 30 s",
            ],
        }
    ]
    assert gateway.roster.version_cells[0] == before
    _, answer = await change(client, "role", role="prefill", instances=ADDRESS, evacuate_after=7)
    assert (answer["changes"], answer["plan"]) == (would["changes"], would["plan"])


async def test_order_for_the_present_role_cancels_a_move(gateway: Gateway) -> None:
    decoders(gateway, 2, elastic=1)
    client = await client_of(gateway)
    await change(client, "role", role="prefill", instances=ADDRESS)
    _, answer = await change(client, "role", role="decode", instances=ADDRESS)
    assert answer["plan"] == []
    assert first(gateway).may_serve
    assert first(gateway).is_role_pinned


async def test_auto_lets_the_gateway_choose_again(gateway: Gateway) -> None:
    decoders(gateway, 2, elastic=1)
    client = await client_of(gateway)
    await change(client, "role", role="decode", instances=ADDRESS)
    assert first(gateway).is_role_pinned
    _, answer = await change(client, "role", role="auto", instances=ADDRESS)
    assert answer["changes"] == [{"instance": ADDRESS, "was": {**FREE, "is_pinned": True}, "becomes": FREE}]
    assert not first(gateway).is_role_pinned


async def test_missing_instances_are_reported(gateway: Gateway) -> None:
    decoders(gateway, 2, elastic=1)
    client = await client_of(gateway)
    status, answer = await change(client, "role", role="prefill", instances=[ADDRESS, "127.0.0.1:1"])
    assert (status, answer["not_found"]) == (200, ["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"role": "both", "instances": ADDRESS}, "role must be 'prefill', 'decode' or 'auto'"),
        ({"role": "prefill", "instances": "127.0.0.1:7003"}, "['127.0.0.1:7003'] are not elastic"),
        ({"role": "prefill", "instances": []}, "instances must be 'host:port' or a list of them"),
        ({"role": "prefill", "instances": ADDRESS, "evacuate_after": -1}, "evacuate_after must be a number"),
    ],
)
async def test_bad_orders_are_refused(gateway: Gateway, body: dict[str, Any], words: str) -> None:
    decoders(gateway, 3, elastic=2)
    client = await client_of(gateway)
    before = gateway.roster.version_cells[0]
    status, answer = await change(client, "role", **body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert gateway.roster.version_cells[0] == before


async def test_move_that_leaves_too_few_is_refused(gateway: Gateway) -> None:
    decoders(gateway, 3, elastic=3)
    client = await client_of(gateway, settings=Settings.model_validate({"elastic": {"min_decode": 2}}))
    both = [ADDRESS, "127.0.0.1:7002"]
    status, answer = await change(client, "role", role="prefill", instances=both)
    assert status == 400
    assert "1 available decode instances would be left, and elastic.min_decode is 2" in answer["error"]["message"]
    assert all(member.may_serve for member in gateway.roster.elastic_members())
    assert (await change(client, "role", role="prefill", instances=ADDRESS))[0] == 200


async def test_added_instance_may_be_elastic(gateway: Gateway) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway)
    status, _ = await change(client, "add", type="decode", instances=engine.name, elastic=True)
    assert status == 200
    assert [backend.is_elastic for backend in gateway.joiner.joining_instances(Role.DECODE)] == [True]
    plain = await client_of(gateway, settings=Settings(connector="ascend_layerwise"))
    status, answer = await change(plain, "add", type="decode", instances=engine.name, elastic=True)
    assert (status, answer["error"]["message"]) == (400, "connector ascend_layerwise cannot exchange roles")


async def test_configured_elastic_instance_that_is_added_again_is_elastic(gateway: Gateway) -> None:
    """An administrator removes an instance for maintenance, and adds it again without further members."""
    engine, other = await gateway.engine(None), await gateway.engine(None)
    client = await client_of(gateway, settings=Settings.model_validate({"elastic": {"instances": [engine.name]}}))
    status, _ = await change(client, "add", type="decode", instances=[engine.name, other.name])
    assert status == 200
    joining = {each.name: each.is_elastic for each in gateway.joiner.joining_instances(Role.DECODE)}
    assert joining == {engine.name: True, other.name: False}
