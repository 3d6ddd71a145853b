"""The requests of Open WebUI, from its server or from its page in the browser ("direct connections").

They follow its `routers/openai.py` and `src/lib/apis/openai/index.ts`. It is too large to run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.wire.openai import Api
from tests.asking import read
from tests.conftest import Deploy

PAGE = "http://localhost:3000"
KEYED = {"Authorization": "Bearer any", "Content-Type": "application/json"}
OF_THE_SERVER = {
    **KEYED,
    "X-OpenWebUI-User-Name": "Andr%C3%A9",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Email": "a@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0c1f",
}
OF_THE_PAGE = {**KEYED, "Origin": PAGE, "Referer": f"{PAGE}/", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "cross-site"}
QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]
CHAT = {"stream": True, "model": "sim", "messages": QUESTION, "stream_options": {"include_usage": True}}
TITLE = {"model": "sim", "messages": [*QUESTION[:1], {"role": "user", "content": "A title?"}], "stream": False}


@pytest.mark.parametrize("headers", [OF_THE_SERVER, OF_THE_PAGE], ids=["server", "page"])
async def test_open_webui_lists_models_streams_a_chat_and_gets_a_title(
    deploy: Deploy, headers: Mapping[str, str]
) -> None:
    gateway = await deploy(listen={"cors_origins": [PAGE]})
    base = f"{gateway.url}/v1"
    async with gateway.session.get(f"{base}/models", headers=headers) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["sim"]
    async with gateway.session.post(f"{base}/chat/completions", json=CHAT, headers=headers) as response:
        answer = await read(response)
    assert (answer.status, answer.is_done, answer.usage["completion_tokens"] > 0) == (200, True, True)
    assert answer.text
    for limit in ("max_tokens", "max_completion_tokens"):
        async with gateway.session.post(
            gateway.url + Api.CHAT.path, json={**TITLE, limit: 50}, headers=headers
        ) as title:
            assert (await title.json())["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions")])
async def test_browser_allows_requests_of_the_open_webui_page(deploy: Deploy, method: str, path: str) -> None:
    gateway = await deploy(listen={"cors_origins": [PAGE]})
    asking = {
        "Origin": PAGE,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with gateway.session.options(gateway.url + path, headers=asking) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert method in response.headers["Access-Control-Allow-Methods"]
