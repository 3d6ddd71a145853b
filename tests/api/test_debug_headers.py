"""Administrators can request headers that describe how a request was served."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy

KEY = {"admin_key": "an-admin-key"}
STAGES = {False: ["prefill", "stream", "total"], True: ["prefill", "handoff", "first_token", "total"]}


def timing(headers: Mapping[str, str]) -> dict[str, float]:
    return {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"])}


@pytest.mark.parametrize("stream", [False, True])
async def test_administrator_gets_debug_headers(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, auth=KEY)
    asked = {"X_PDProxy_Debug": "1", "X_Admin_Key": "an-admin-key", "X_Request_Id": "mine"}
    answer = await gateway.ask(request(Api.CHAT, stream=stream), **asked)
    assert answer.is_done
    headers = answer.headers
    prefiller, decoder = (f"127.0.0.1:{engine.port}" for engine in gateway.engines)
    leg = gateway.prefillers[0].requests[-1].headers["x-request-id"]
    assert headers["x-pdproxy-prefill"] == f"{prefiller}; id={leg}; reason=only_candidate"
    assert headers["x-pdproxy-decode"] == f"{decoder}; id={leg}; reason=only_candidate"
    assert headers["x-pdproxy-attempts"] == "1"
    told = timing(headers)
    assert list(told) == STAGES[stream]
    assert told["total"] >= sum(ms for name, ms in told.items() if name != "total") - 1
    assert not any("admin" in str(seen.headers).lower() for engine in gateway.engines for seen in engine.requests)


async def test_error_has_debug_headers(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    gateway.prefillers[0].faults.add("refuse_status", status=400)
    answer = await gateway.ask(request(Api.CHAT), X_PDProxy_Debug="1")
    assert answer.status == 400
    assert "x-pdproxy-prefill" in answer.headers
    assert "x-pdproxy-decode" not in answer.headers


@pytest.mark.parametrize(
    ("auth", "headers"),
    [
        (KEY, {"X_PDProxy_Debug": "1"}),
        (KEY, {"X_PDProxy_Debug": "1", "X_Admin_Key": "another-key"}),
        (KEY, {"X_Admin_Key": "an-admin-key"}),
        ({}, {"X_PDProxy_Debug": "1", "X_Forwarded_For": "203.0.113.1"}),
        ({}, {}),
    ],
)
async def test_other_clients_get_no_debug_headers(
    deploy: Deploy, auth: dict[str, str], headers: dict[str, str]
) -> None:
    gateway = await deploy(1, 1, auth=auth)
    answer = await gateway.ask(request(Api.CHAT), **headers)
    assert answer.is_done
    assert not [name for name in answer.headers if name == "server-timing" or name.startswith("x-pdproxy")]
