"""Enabling, disabling and weighing instances, and dry runs of all changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load, Role
from proxy.settings import Settings
from tests.api.conftest import Gateway
from tests.api.operating import Client, change, client_of

ENABLED = {"membership": "enabled", "weight": 100}


async def memberships(client: Client) -> list[tuple[str, int, float | None]]:
    async with client.get("/instances") as answer:
        instances = (await answer.json())["instances"]
    return [(one["membership"], one["weight"], one["evacuated_in_seconds"]) for one in instances]


async def test_instance_is_disabled_and_enabled(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one, two = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    with gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load())):
        status, told = await change(client, "disable", type="decode", instances=one.name)
        assert (status, told["message"]) == (200, f"Instances ['{one.name}'] are disabled.")
        disabled = {"membership": "disabled", "weight": 100}
        assert told["changes"] == [{"instance": one.name, "was": ENABLED, "becomes": disabled}]
        assert (told["warnings"], told["not_found"], told["dry_run"]) == ([], [], False)
        assert [backend.name for backend in gateway.pools[Role.DECODE].eligible_backends()] == [two.name]
    assert await memberships(client) == [("disabled", 100, None), ("enabled", 100, None)]
    _, told = await change(client, "disable", type="decode", instances=one.name)
    assert told["changes"] == []
    _, told = await change(client, "enable", type="decode", instances=one.name)
    assert told["changes"] == [{"instance": one.name, "was": disabled, "becomes": ENABLED}]
    assert await memberships(client) == [("enabled", 100, None)] * 2
    lines = [record.getMessage() for record in caplog.records if record.name == "proxy.api.instances"]
    assert lines == [f"Instances ['{one.name}'] are {what}." for what in ("disabled", "disabled", "enabled")]


async def test_disabled_instance_may_have_a_time_to_be_evacuated(gateway: Gateway) -> None:
    one, _ = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    client = await client_of(gateway, settings=Settings.model_validate({"leaving": {"evacuate_after_seconds": 500}}))
    await change(client, "disable", type="decode", instances=one.name)
    ((_, _, seconds), _) = await memberships(client)
    assert seconds is not None
    assert 400 < seconds <= 500
    await change(client, "disable", type="decode", instances=one.name, evacuate_after=None)
    assert await memberships(client) == [("disabled", 100, None), ("enabled", 100, None)]


async def test_instance_has_a_weight(gateway: Gateway) -> None:
    one = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "weight", type="prefill", instances=one.name, weight=30)
    assert (status, told["message"]) == (200, f"Instances ['{one.name}'] are given weight 30.")
    assert await memberships(client) == [("enabled", 30, None)]


async def test_disabling_the_last_instance_warns(gateway: Gateway) -> None:
    one, two = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    _, told = await change(client, "disable", type="decode", instances=one.name)
    assert told["warnings"] == []
    for dry_run in ("true", "false"):
        _, told = await change(client, f"disable?dry_run={dry_run}", type="decode", instances=two.name)
        assert told["warnings"] == [
            "No decode instance is left: requests that need one are rejected until one is enabled."
        ]


@pytest.mark.parametrize("what", ["enable", "disable", "weight"])
async def test_missing_and_draining_instances_are_reported(gateway: Gateway, what: str) -> None:
    here, drains = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    with gateway.pools[Role.DECODE].make_lease(
        PickRequest.make_for_load(Load(), avoided_backends=gateway.pools[Role.DECODE].all_backends()[:1])
    ):
        await change(client, "remove", type="decode", instances=drains.name)
        names = [here.name, drains.name, "127.0.0.1:1"]
        status, told = await change(client, what, type="decode", instances=names, weight=50)
        assert (status, told["not_found"]) == (200, names[1:])
        assert told["message"].endswith(f" There are no decode instances {names[1:]}.")
        assert [membership for membership, _, _ in await memberships(client)][1] == "draining"


@pytest.mark.parametrize(
    ("what", "fields", "becomes"),
    [
        ("add", {"type": "decode", "instances": "127.0.0.1:1"}, {"membership": "joining", "weight": None}),
        ("remove", {"type": "decode", "evacuate_after": 0}, {"membership": "draining", "weight": 100}),
        ("disable", {"type": "decode", "evacuate_after": 0}, {"membership": "disabled", "weight": 100}),
        ("weight", {"type": "decode", "weight": 1}, {"membership": "enabled", "weight": 1}),
    ],
)
async def test_dry_run_reports_the_effect_and_changes_nothing(
    gateway: Gateway, what: str, fields: dict[str, Any], becomes: dict[str, object]
) -> None:
    engine = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    before = gateway.roster.version_cells[0]
    status, would = await change(client, f"{what}?dry_run=true", **{"instances": engine.name, **fields})
    assert status == 200
    assert would["dry_run"] is True
    assert would["message"].startswith("Dry run, nothing is changed: ")
    assert [one["becomes"] for one in would["changes"]] == [becomes]
    assert gateway.roster.version_cells[0] == before
    assert (would["current_decode_instances"], would["joining_decode_instances"]) == ([engine.name], [])
    _, told = await change(client, what, **{"instances": engine.name, **fields})
    assert (told["changes"], told["warnings"]) == (would["changes"], would["warnings"])


async def test_dry_run_of_an_invalid_change_is_rejected(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    refused = [
        await change(client, f"add?dry_run={dry_run}", type="prefill", instances=engine.name) for dry_run in (0, 1)
    ]
    assert refused[0] == refused[1]
    assert refused[0][0] == 400


@pytest.mark.parametrize("weight", [None, 0, 101, 1.5, "50", True])
async def test_invalid_weight_is_rejected(gateway: Gateway, weight: object) -> None:
    engine = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    status, told = await change(client, "weight", type="decode", instances=engine.name, weight=weight)
    assert (status, told["error"]["param"]) == (400, "weight")
    assert await memberships(client) == [("enabled", 100, None)]


async def test_invalid_dry_run_is_rejected(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    status, told = await change(client, "disable?dry_run=maybe", type="decode", instances=engine.name)
    assert (status, told["error"]["param"]) == (400, "dry_run")
    assert await memberships(client) == [("enabled", 100, None)]
