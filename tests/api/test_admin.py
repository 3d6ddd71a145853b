"""The operators' routes of the gateway itself, and the probes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from proxy import __version__
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.settings import SettingsError
from proxy.settings.load import ConfigChange
from tests.api.conftest import Gateway
from tests.api.operating import client_of

READY_ROUTES = ["/readyz", "/health", "/healthz", "/ping"]


async def test_livez_does_not_depend_on_engines(gateway: Gateway) -> None:
    client = await client_of(gateway, is_draining=True)
    async with client.get("/livez") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", READY_ROUTES)
async def test_gateway_is_ready_when_each_role_has_a_confirmed_instance(gateway: Gateway, path: str) -> None:
    client = await client_of(gateway)
    await gateway.engine(Role.DECODE)
    gateway.roster.add_for_administrator(Backend(Role.PREFILL, "10.0.0.1", 1))  # it has not been probed yet
    async with client.get(path) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_healthy_prefill"
    await gateway.engine(Role.PREFILL)
    async with client.get(path) as answer:
        assert answer.status == 200


async def test_only_roles_of_the_connector_count_for_readiness(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    await gateway.engine(Role.DECODE)
    async with client.get("/readyz") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path", READY_ROUTES)
async def test_draining_gateway_is_not_ready(gateway: Gateway, path: str) -> None:
    await gateway.engine(Role.DECODE)
    client = await client_of(gateway, roles=[Role.DECODE], is_draining=True)
    async with client.get(path) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "draining"


async def test_healthcheck_equals_that_of_the_reference_proxy(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL)
    await gateway.engine(Role.DECODE)
    await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    with (
        gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load())),
        gateway.pools[Role.PREFILL].make_lease(PickRequest.make_for_load(Load())),
    ):
        async with client.get("/healthcheck") as answer:
            assert await answer.json() == {
                "status": "ok",
                "prefill_instances": 1,
                "decode_instances": 2,
                "request_num": 1,
            }


async def test_healthcheck_reports_no_prefillers_with_connector_plain(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    async with client.get("/healthcheck") as answer:
        assert (await answer.json())["prefill_instances"] == 0


async def test_version_is_that_of_the_package(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.get("/version") as answer:
        assert await answer.json() == {"version": __version__}


async def test_metrics_have_the_requested_format(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "pdproxy_build_info{" in await answer.text()
    async with client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await answer.text()).endswith("# EOF\n")


class Patient:
    """Takes long to be collected: until it may end. Notes how many collect it at the same time."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.at_once: list[int] = []
        self._now = 0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._now += 1
        self.at_once.append(self._now)
        self.begun.set()
        assert self.may_end.wait(10), "the event loop stood still meanwhile"
        self._now -= 1
        yield GaugeMetricFamily("patient", "Came in time.", value=1)


async def test_scrape_delays_only_the_next_scrape(gateway: Gateway) -> None:
    client, patient = await client_of(gateway), Patient()
    gateway.metrics._registry.register(patient)

    async def scrape() -> str:
        async with client.get("/metrics") as answer:
            return await answer.text()

    async with asyncio.TaskGroup() as group:
        scrapes = [group.create_task(scrape()) for _ in range(3)]
        assert await asyncio.to_thread(patient.begun.wait, 10)
        async with client.get("/livez") as answer:
            assert answer.status == 200
        patient.may_end.set()
    assert ["patient 1.0" in scrape.result() for scrape in scrapes] == [True] * 3
    assert patient.at_once == [1, 1, 1]


# Where instances may be


# Limits


# Reloading


@pytest.mark.parametrize("is_dry_run", [False, True])
async def test_reload_reports_its_changes(gateway: Gateway, is_dry_run: bool) -> None:
    async def reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
        asked.append(is_dry_run)
        return ConfigChange(("decode", "timeouts.idle_seconds"), ("10.0.0.2:1",), ("10.0.0.1:1",))

    asked: list[bool] = []
    client = await client_of(gateway, reload=reload)
    async with client.post(f"/admin/reload?dry_run={str(is_dry_run).lower()}") as answer:
        assert answer.status == 200
        assert await answer.json() == {
            "dry_run": is_dry_run,
            "changed": ["decode", "timeouts.idle_seconds"],
            "instances": {"added": ["10.0.0.2:1"], "removed": ["10.0.0.1:1"]},
        }
    assert asked == [is_dry_run]


async def test_rejected_reload_reports_the_reason(gateway: Gateway) -> None:
    async def reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
        raise SettingsError("my.yaml: workers must be a number, not 'many'")

    client = await client_of(gateway, reload=reload)
    async with client.post("/admin/reload") as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == (
        "invalid_configuration",
        "my.yaml: workers must be a number, not 'many'",
    )


# The log
