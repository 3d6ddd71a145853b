"""Pages of other origins in browsers: which origins may use the clients' routes."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDictProxy

from proxy.wire.openai import Api
from tests.asking import read, request
from tests.conftest import Deploy
from tests.deployment import Deployment

PAGE = "https://chat.example.com"
LISTED = {"cors_origins": [PAGE, "http://localhost:3000"]}
ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}
CHAT = Api.CHAT.path


async def headers(gateway: Deployment, method: str, path: str, **given: str) -> tuple[int, CIMultiDictProxy[str]]:
    async with gateway.session.request(method, gateway.url + path, headers=given) as response:
        await response.read()
        return response.status, response.headers


def allowed(told: CIMultiDictProxy[str]) -> list[str]:
    return [name for name in told if name.lower().startswith("access-control-")]


@pytest.mark.parametrize("origin", LISTED["cors_origins"])
async def test_page_of_a_configured_origin_may_send_and_read(deploy: Deploy, origin: str) -> None:
    gateway = await deploy(listen=LISTED)
    status, told = await headers(gateway, "OPTIONS", CHAT, Origin=origin, **ASKING)
    assert (status, told["Access-Control-Allow-Origin"], told["Vary"]) == (204, origin, "Origin")
    assert told["Access-Control-Allow-Headers"] == ASKING["Access-Control-Request-Headers"]
    assert "POST" in told["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in told
    for stream in (True, False):
        body: dict[str, Any] = request(Api.CHAT, stream=stream)
        async with gateway.session.post(gateway.url + CHAT, json=body, headers={"Origin": origin}) as response:
            assert (await read(response)).is_done
            assert response.headers["Access-Control-Allow-Origin"] == origin
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/sim", "/v1/models/none", "/", "/v1/embeddings", "/readyz"])
async def test_configured_origin_may_use_all_client_routes_and_read_errors(deploy: Deploy, path: str) -> None:
    gateway = await deploy(listen=LISTED)
    _, told = await headers(gateway, "GET", path, Origin=PAGE)
    assert told["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("origin", ["https://evil.example.com", "https://chat.example.com.evil", "null", PAGE + ":1"])
async def test_page_of_another_origin_may_not_read(deploy: Deploy, origin: str) -> None:
    gateway = await deploy(listen=LISTED)
    status, told = await headers(gateway, "OPTIONS", CHAT, Origin=origin, **ASKING)
    assert (status, allowed(told)) == (405, [])
    status, told = await headers(gateway, "GET", "/v1/models", Origin=origin)
    assert (status, allowed(told), told["Vary"]) == (200, [], "Origin")


async def test_no_origin_is_allowed_by_default(deploy: Deploy) -> None:
    gateway = await deploy()
    for method, status in (("OPTIONS", 405), ("GET", 200)):
        answered, told = await headers(gateway, method, "/v1/models", Origin=PAGE, **ASKING)
        assert (answered, allowed(told), "Vary" in told) == (status, [], False)


async def test_star_allows_all_origins(deploy: Deploy) -> None:
    gateway = await deploy(listen={"cors_origins": ["*"]})
    status, told = await headers(gateway, "OPTIONS", CHAT, Origin="null", **ASKING)
    assert (status, told["Access-Control-Allow-Origin"]) == (204, "*")
    _, told = await headers(gateway, "GET", "/v1/models")
    assert allowed(told) == []


@pytest.mark.parametrize("path", ["/admin/reload", "/instances/add", "/instances/remove", "/instances", "/metrics"])
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "POST"])
async def test_no_page_may_use_administration(deploy: Deploy, method: str, path: str) -> None:
    gateway = await deploy(listen={"cors_origins": ["*"]})
    status, told = await headers(gateway, method, path, Origin=PAGE, **ASKING)
    assert allowed(told) == []
    assert method != "OPTIONS" or status == 405


@pytest.mark.parametrize("names", ["a/b", "a" * 3000, "a;b", "<a>"])
async def test_invalid_header_names_are_not_allowed(deploy: Deploy, names: str) -> None:
    gateway = await deploy(listen=LISTED)
    asking = ASKING | {"Access-Control-Request-Headers": names}
    status, told = await headers(gateway, "OPTIONS", CHAT, Origin=PAGE, **asking)
    assert status >= 400
    assert "Access-Control-Allow-Headers" not in told
