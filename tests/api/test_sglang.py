"""Queries of SGLang's clients, answered for all engines together."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, unused_port

from proxy.api.probes import ProbeApi
from proxy.api.sglang import SglangApi
from proxy.common.backend import Role
from proxy.gateway.api_keys import ApiKeys
from proxy.listener.drain import DrainManager
from tests.api.conftest import Engine, Gateway, team_key

Client = TestClient[web.Request, web.Application]

PATHS = ["/server_info", "/get_server_info", "/v1/loads"]
STATE = {
    "effective_max_running_requests_per_dp": 32,
    "memory_usage": {"token_capacity": 1000},
    "last_gen_throughput": 12.5,
    "avg_spec_accept_length": 2.5,
}
SECRETS = {
    "api_key": "sk-secret",
    "admin_api_key": "sk-secret",
    "launch_command": "--api-key sk-secret",
    "env": {"K": "sk-secret"},
}


async def client_of(gateway: Gateway, callers: ApiKeys | None = None) -> Client:
    probes = ProbeApi(gateway.lanes(), DrainManager())
    api = SglangApi(gateway.questions(callers=callers), gateway.pools, probes)
    return await gateway.serve(api.routes())


async def engine(gateway: Gateway, role: Role, **answers: Any) -> Engine:
    """Return an engine that answers these paths (without slashes) with JSON or a status."""

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(request.path.strip("/").replace("/", "_"))
        if found is None or isinstance(found, int):
            return web.Response(status=found or 404)
        return web.Response(body=orjson.dumps(found), content_type="application/json")

    return await gateway.engine(role, answer)


def info(role: Role, ranks: int = 1) -> dict[str, Any]:
    states = [{**STATE, **SECRETS} for _ in range(ranks)]
    return {"tokenizer_path": "/k", "disaggregation_mode": role.value, "internal_states": states, **SECRETS}


def shown(role: Role, ranks: int = 1) -> dict[str, Any]:
    return {"tokenizer_path": "/k", "disaggregation_mode": role.value, "internal_states": [STATE] * ranks}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_clients_see_every_engine_and_none_of_its_secrets(gateway: Gateway, path: str) -> None:
    await engine(gateway, Role.PREFILL, server_info=info(Role.PREFILL))
    await engine(gateway, Role.DECODE, server_info=info(Role.DECODE, ranks=2))
    older = await engine(gateway, Role.DECODE, get_server_info=info(Role.DECODE))
    client = await client_of(gateway)
    async with client.get(path) as answer:
        body = await answer.read()
    assert orjson.loads(body) == {
        "internal_states": [STATE, STATE, STATE],
        "prefill": [shown(Role.PREFILL)],
        "decode": [shown(Role.DECODE, 2), shown(Role.DECODE)],
    }
    assert b"sk-secret" not in body
    assert [asked.path for asked in older.asked] == ["/server_info", "/get_server_info"]
    assert 'pdproxy_requests_total{api="sglang",code="200"} 1.0' in gateway.metric_lines()


async def test_loads_of_all_ranks_are_numbered_consecutively(gateway: Gateway) -> None:
    def loads(timestamp: str, *tokens: int) -> dict[str, Any]:
        ranks = [{"dp_rank": rank, "num_total_tokens": held} for rank, held in enumerate(tokens)]
        return {"timestamp": timestamp, "version": "0.5.23", "loads": ranks}

    prefiller = await engine(gateway, Role.PREFILL, v1_loads=loads("2026-11-21T10:00:00", 5))
    await engine(gateway, Role.DECODE, v1_loads=loads("2026-11-21T10:00:01", 7, 8))
    client = await client_of(gateway)
    async with client.get("/v1/loads?include=core,queues&format=json") as answer:
        assert await answer.json() == {
            "timestamp": "2026-11-21T10:00:01",
            "version": "0.5.23",
            "loads": [
                {"dp_rank": 0, "num_total_tokens": 5, "role": "prefill"},
                {"dp_rank": 1, "num_total_tokens": 7, "role": "decode"},
                {"dp_rank": 2, "num_total_tokens": 8, "role": "decode"},
            ],
        }
    (asked,) = prefiller.asked
    assert (asked.path, asked.query) == ("/v1/loads", "include=core,queues")


@pytest.mark.parametrize("query", ["format=prometheus", "dp_rank=1", "x=1"])
async def test_query_for_a_single_engine_is_rejected(gateway: Gateway, query: str) -> None:
    client = await client_of(gateway)
    async with client.get(f"/v1/loads?{query}") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", [500, None, [], "text", {"internal_states": [1], "loads": 1}, {"loads": [1]}])
async def test_one_broken_engine_does_not_matter(gateway: Gateway, path: str, broken: Any) -> None:
    for role in gateway.pools:
        await engine(gateway, role, server_info=info(role), v1_loads={"loads": [{"dp_rank": 0}]})
    await engine(gateway, Role.DECODE, server_info=broken, v1_loads=broken)
    gateway.add(Role.PREFILL, "127.0.0.1", unused_port())
    client = await client_of(gateway)
    async with client.get(path) as answer:
        assert answer.status == 200
        found = await answer.json()
    assert len(found.get("loads", found.get("internal_states"))) in (1, 2)


@pytest.mark.parametrize("path", PATHS)
async def test_no_answer_of_a_role_is_a_503(gateway: Gateway, path: str) -> None:
    await engine(gateway, Role.PREFILL, server_info=info(Role.PREFILL), v1_loads={"loads": []})
    client = await client_of(gateway)
    for _ in range(2):
        async with client.get(path) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["code"] == "no_healthy_instance"
        await engine(gateway, Role.DECODE, server_info=500, v1_loads=500)


async def test_error_of_engines_is_passed_on_with_its_status(gateway: Gateway) -> None:
    await engine(gateway, Role.PREFILL, server_info=401)
    client = await client_of(gateway)
    async with client.get("/server_info") as answer:
        assert answer.status == 401


@pytest.mark.parametrize("path", PATHS)
async def test_client_key_is_required_and_not_passed_on(gateway: Gateway, path: str) -> None:
    engines = [await engine(gateway, role, server_info=info(role), v1_loads={"loads": []}) for role in gateway.pools]
    client = await client_of(gateway, team_key())
    for credential, status in (("Bearer wrong", 401), ("Bearer client", 200)):
        async with client.get(path, headers={"Authorization": credential}) as answer:
            assert answer.status == status
    assert all("authorization" not in one.asked[0].headers for one in engines)


async def test_health_generate_is_ok_when_every_role_is_ready(gateway: Gateway) -> None:
    client = await client_of(gateway)
    prefiller = await gateway.engine(Role.PREFILL)
    async with client.get("/health_generate") as answer:
        assert answer.status == 503
    await gateway.engine(Role.DECODE)
    async with client.get("/health_generate") as answer:
        assert answer.status == 200
    assert prefiller.asked == []


@pytest.mark.parametrize(
    "path", ["/abort_request", "/update_weights_from_disk", "/set_internal_state", "/pause_generation"]
)
async def test_administrative_routes_of_engines_are_not_served(gateway: Gateway, path: str) -> None:
    client = await client_of(gateway)
    for method in ("GET", "POST"):
        async with client.request(method, path) as answer:
            assert answer.status == 404
