"""The merged list of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, unused_port
from yarl import URL

from proxy.api import models
from proxy.api.models import ModelsApi
from proxy.common.backend import Role
from proxy.gateway.api_keys import ApiKeys
from proxy.settings import Settings
from tests.api.conftest import Gateway, never, team_key

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Client = TestClient[web.Request, web.Application]


def serving(*models: object) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps({"object": "list", "data": models}), content_type="application/json")

    return answer


def saying(status: int, body: bytes = b"") -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    return answer


async def client_of(gateway: Gateway, key: str | None = None, *ports: int, callers: ApiKeys | None = None) -> Client:
    keys = gateway.keys(key, [("127.0.0.1", port) for port in ports])
    pools = tuple(gateway.pools.values())
    api = ModelsApi(gateway.questions(keys, callers), pools, gateway.lanes().served_models, Settings)
    return await gateway.serve(api.routes())


async def test_models_of_all_engines_are_merged_by_id(gateway: Gateway) -> None:
    kimi = {"id": "kimi", "object": "model", "max_model_len": 262144, "root": "/models/kimi"}
    await gateway.engine(Role.PREFILL, serving(kimi, {"id": "adapter"}))
    await gateway.engine(Role.DECODE, serving({"id": "kimi", "max_model_len": 1}, {"id": "other"}))
    client = await client_of(gateway)
    async with client.get("/v1/models") as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        assert await answer.json() == {"object": "list", "data": [kimi, {"id": "adapter"}, {"id": "other"}]}
    assert 'pdproxy_requests_total{api="models",code="200"} 1.0' in gateway.metric_lines()


@pytest.mark.parametrize("name", ["kimi", "moonshotai/Kimi-K2", "a b", "lora@1:x"])
async def test_model_is_shown_by_its_name(gateway: Gateway, name: str) -> None:
    await gateway.engine(Role.PREFILL, serving({"id": "other"}))
    await gateway.engine(Role.DECODE, serving({"id": name, "root": "/models"}))
    client = await client_of(gateway)
    for path in (f"/v1/models/{name}", f"/v1/models/{name.replace('/', '%2F')}"):
        async with client.get(URL.build(path=path) if "%" not in path else URL(path, encoded=True)) as answer:
            assert (answer.status, await answer.json()) == (200, {"id": name, "root": "/models"})


@pytest.mark.parametrize("name", ["gpt-4o", "kim", "kimi/", "%00", "x" * 5000])
async def test_unknown_model_is_a_404_in_openais_form(gateway: Gateway, name: str) -> None:
    await gateway.engine(Role.PREFILL, serving({"id": "kimi"}))
    client = await client_of(gateway)
    async with client.get(URL(f"/v1/models/{name}", encoded=True)) as answer:
        text = await answer.text()
    error = orjson.loads(text)["error"]
    assert (answer.status, error["code"], error["type"], error["param"]) == (
        *(404, "model_not_found", "invalid_request_error", "model"),
    )
    assert len(text) < 300
    assert 'pdproxy_requests_total{api="models",code="404"} 1.0' in gateway.metric_lines()


@pytest.mark.parametrize(
    "broken",
    [
        *(saying(500), saying(200, b"<html>"), saying(200, b"[]"), saying(200, b'{"data": [1]}'), saying(302)),
        *(saying(302, b'{"data": [{"id": "other"}]}'), saying(200, b'{"data": {"id": "kimi"}}'), saying(204)),
        saying(200, b'{"data": [{"id": "' + b"x" * 5_000_000 + b'"}]}'),
    ],
)
async def test_one_broken_engine_does_not_matter(gateway: Gateway, broken: Answer) -> None:
    await gateway.engine(Role.PREFILL, broken)
    await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    gateway.add(Role.PREFILL, "127.0.0.1", unused_port())
    client = await client_of(gateway)
    async with client.get("/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "kimi"}]


async def test_unhealthy_engine_is_not_asked(gateway: Gateway) -> None:
    down = await gateway.engine(None, serving({"id": "old"}))
    gateway.add(Role.PREFILL, "127.0.0.1", down.port, healthy=False)
    await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    client = await client_of(gateway)
    async with client.get("/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "kimi"}]
    assert down.asked == []


async def test_no_engine_left_is_a_503(gateway: Gateway) -> None:
    client = await client_of(gateway)
    for _ in range(2):
        async with client.get("/v1/models") as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["code"] == "no_healthy_instance"
        await gateway.engine(Role.DECODE, saying(500))  # and one that fails is not better


async def test_error_for_a_wrong_credential_is_passed_on(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL, saying(401, b'{"error":"Unauthorized"}'))
    client = await client_of(gateway)
    async with client.get("/v1/models") as answer:
        assert (answer.status, await answer.read()) == (401, b'{"error":"Unauthorized"}')


async def test_list_is_cached_briefly_but_not_for_other_credentials(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    client = await client_of(gateway)
    for credential in ("Bearer a", "Bearer a", "Bearer b"):
        async with client.get("/v1/models", headers={"Authorization": credential}) as answer:
            assert answer.status == 200
    assert [asked.headers["authorization"] for asked in engine.asked] == ["Bearer a", "Bearer b"]


async def test_engine_key_replaces_the_clients_credential(gateway: Gateway) -> None:
    ours = await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    added = await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    client = await client_of(gateway, "s3cret", ours.port)
    async with client.get("/v1/models", headers={"Authorization": "Bearer client"}) as answer:
        assert answer.status == 200
    assert ours.asked[0].headers["authorization"] == "Bearer s3cret"
    assert "authorization" not in added.asked[0].headers


async def test_silent_engine_does_not_delay_the_others(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.api.models._TIMEOUT_SECONDS", 0.05)

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"data": [')
        return await never(request)

    await gateway.engine(Role.PREFILL, never)
    await gateway.engine(Role.PREFILL, drip)
    await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    client = await client_of(gateway)
    async with client.get("/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "kimi"}]


def test_wait_for_an_engine_is_limited() -> None:
    assert models._TIMEOUT_SECONDS < 5


async def test_client_key_is_required_and_not_passed_on(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.DECODE, serving({"id": "kimi"}))
    client = await client_of(gateway, callers=team_key())
    for credential, status in (("Bearer wrong", 401), ("Bearer client", 200)):
        async with client.get("/v1/models", headers={"Authorization": credential}) as answer:
            assert answer.status == status
    (asked,) = engine.asked
    assert "authorization" not in asked.headers
