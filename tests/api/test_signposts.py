"""Unknown paths: hints for mistyped ones, and the list of routes."""

from __future__ import annotations

import pytest
from yarl import URL

from proxy import __version__
from tests.asking import Answer, read
from tests.conftest import Deploy
from tests.deployment import Deployment

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def get(gateway: Deployment, path: str, method: str = "GET") -> Answer:
    url = URL(gateway.url + path, encoded=True)
    async with gateway.session.request(method, url, allow_redirects=False) as response:
        return await read(response)


async def test_root_lists_the_routes(deploy: Deploy) -> None:
    told = (await get(await deploy(), "/")).json
    assert (told["service"], told["version"]) == ("pdproxy", __version__)
    assert {"POST " + CHAT, "GET /v1/models/{model}", "POST /v1/rerank", "GET /readyz"} <= set(told["routes"])
    assert not [route for route in told["routes"] if "admin" in route or "instances" in route or "metrics" in route]


MEANT = [
    *("/chat/completions", CHAT),
    *("/completions", COMPLETIONS),
    *("/models", "/v1/models"),
    *("/embeddings", "/v1/embeddings"),
    *("/v1/v1/chat/completions", CHAT),
    *("/v1/chat/completion", CHAT),
    *("/V1/Chat/Completions", CHAT),
    *("/v1/chat", CHAT),
    *("/api/v1/chat/completions", CHAT),
    *("/openai/deployments/kimi/chat/completions", CHAT),
    *("/v1/engines/kimi/completions", COMPLETIONS),
    *("/v1/readyz", "/readyz"),
    *("/v1/tokenize", "/tokenize"),
    *("/v1/v1/messages", "/v1/messages"),
    *("/openai/v1/responses", "/v1/responses"),
    *("/anthropic/v1/messages", "/v1/messages"),
    *("/v1/mesages", "/v1/messages"),
    *("/v1/chat/completoins", CHAT),
    *("/v1/responces", "/v1/responses"),
    *("/v1/modles", "/v1/models"),
]


@pytest.mark.parametrize(("path", "meant"), list(zip(MEANT[::2], MEANT[1::2], strict=True)))
async def test_mistyped_path_gets_a_hint(deploy: Deploy, path: str, meant: str) -> None:
    answer = await get(await deploy(), path, "POST")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"there is no route {path} on this gateway; did you mean {meant}?"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/resp_1", "responses are not stored here"),
        ("/v1/responses/resp_1/cancel", "responses are not stored here"),
        ("/api/chat", "Ollama's API is not served here"),
        ("/generate", "sglang_bootstrap"),
        ("/docs", "this page does not exist here"),
        ("/redoc", "this page does not exist here; GET /openapi.json describes the routes"),
        ("/v1", "GET / lists"),
        ("/v1/audio/speech", "GET / lists"),
        ("/admin", "GET / lists"),
        ("/instance/add", "GET / lists"),
    ],
)
async def test_unsupported_path_gets_a_hint(deploy: Deploy, path: str, words: str) -> None:
    answer = await get(await deploy(), path, "POST")
    assert answer.status == 404
    assert words in answer.error["message"]
    assert "instances" not in answer.error["message"]


async def test_sglang_path_gets_no_hint_when_it_is_served(deploy: Deploy) -> None:
    gateway = await deploy(connector="sglang_bootstrap")
    assert (await get(gateway, "/v1/generate", "POST")).error["message"].endswith("did you mean /generate?")


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/v1/models/", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("/v1//chat/completions", CHAT),
        ("///v1/chat//completions//?a=b&c", CHAT + "?a=b&c"),
        ("/readyz/", "/readyz"),
    ],
)
async def test_path_with_too_many_slashes_is_redirected(deploy: Deploy, path: str, there: str) -> None:
    """The redirect keeps method and body, as that of engines does."""
    answer = await get(await deploy(), path, "POST")
    assert (answer.status, answer.headers["location"], answer.body) == (307, there, b"")


@pytest.mark.parametrize("path", ["/admin/reload/", "//instances/add", "/instances//remove", "//metrics"])
async def test_administrative_path_is_not_redirected(deploy: Deploy, path: str) -> None:
    """What stands in front may have rules for these paths."""
    answer = await get(await deploy(), path, "POST")
    assert answer.status == 404
    assert answer.error["message"].endswith("GET / lists the routes")


@pytest.mark.parametrize(
    "path", ["/%3Cscript%3E", "/%0d%0aX:%20y", "/%C3%A9vil", "/%00", "/\\evil.example.com", "/https://evil.example.com"]
)
async def test_path_with_special_characters_is_not_quoted(deploy: Deploy, path: str) -> None:
    answer = await get(await deploy(), path)
    assert answer.status == 404
    assert answer.error["message"] == "there is no such route on this gateway; GET / lists the routes"


@pytest.mark.parametrize("length", [200, 7000])
async def test_long_path_is_quoted_in_part(deploy: Deploy, length: int) -> None:
    answer = await get(await deploy(), "/" + "x" * length)
    assert answer.status == 404
    assert answer.error["message"].startswith(f"there is no route /{'x' * 99} on this gateway; ")


async def test_redirect_keeps_the_raw_query(deploy: Deploy) -> None:
    answer = await get(await deploy(), "/v1/models/?" + "a=%0d%0aX:%20y&" * 500)
    assert answer.status == 307
    assert len(answer.headers["location"]) < 1100
    assert "x" not in answer.headers


async def test_redirect_leads_to_the_route(deploy: Deploy) -> None:
    gateway = await deploy()
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    async with gateway.session.post(gateway.url + "//v1/chat/completions/", json=body) as response:
        assert response.status == 200
        assert (await response.json())["usage"]["completion_tokens"] == 3
