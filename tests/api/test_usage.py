"""`GET /admin/usage`: the usage of client keys equals what clients have received."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import Deployment
from tests.gateway.test_key_tokens import give_keys

Deploy = Callable[..., Awaitable[Deployment]]


async def usage(gateway: Deployment, **query: str) -> list[dict[str, Any]]:
    async with gateway.session.get(f"{gateway.url}/admin/usage", params=query) as answer:
        assert answer.status == 200
        return (await answer.json())["usage"]


def tokens(row: dict[str, Any]) -> tuple[int, int]:
    return row["prompt_tokens"], row["completion_tokens"]


@pytest.mark.parametrize("has_file", [True, False])
async def test_usage_equals_what_clients_have_received(deploy: Deploy, tmp_path: Path, has_file: bool) -> None:
    gateway = await deploy(decoders=2, admin={"usage_file": str(tmp_path / "usage.db")} if has_file else {})
    give_keys(gateway, a={}, b={"requests_per_minute": 2})
    received = [0, 0]
    bodies = [
        request(Api.CHAT),
        request(Api.CHAT, "word " * 50, n=3),
        request(Api.COMPLETIONS, stream=True, stream_options={"include_usage": True}),
    ]
    for body in bodies:
        answer = await gateway.ask(body, Authorization="Bearer sk-a")
        received = [received[0] + answer.usage["prompt_tokens"], received[1] + answer.usage["completion_tokens"]]
    statuses = [(await gateway.ask(bodies[0], Authorization="Bearer sk-b")).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    assert (await gateway.ask(bodies[0], Authorization="Bearer wrong")).status == 401
    await until(lambda: gateway.worker.drain_manager.in_flight_count == 0, "the end of all requests")
    nobody, a, b = sorted(await usage(gateway), key=lambda row: row["key"])
    assert (a["key"], a["requests"], a["ok"], list(tokens(a))) == ("a", 3, 3, received)
    assert (b["key"], b["requests"], b["ok"], b["limited"]) == ("b", 4, 2, 2)
    assert (nobody["key"], nobody["requests"], nobody["rejected"]) == ("-", 1, 1)
    assert a["decode_seconds"] > 0
    assert await usage(gateway, key="b", since="2026-01-01") == [b]
    assert await usage(gateway, since="2100-01-01T00:00:00Z") == []


async def test_tokens_of_a_client_that_left_are_counted(deploy: Deploy) -> None:
    gateway = await deploy(decoder={"decode_step_ms": 10})
    give_keys(gateway, a={})
    body = request(Api.COMPLETIONS, max_tokens=5000, stream=True)
    url, headers = gateway.url + Api.COMPLETIONS.path, {"Authorization": "Bearer sk-a"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        for _ in range(5):
            await response.content.readuntil(b"\n\n")
    await until(lambda: gateway.worker.drain_manager.in_flight_count == 0, "the end of the request")
    (row,) = await usage(gateway)
    assert (row["left"], row["ok"]) == (1, 0)
    assert 5 <= row["completion_tokens"] < 5000
    assert row["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("query", "param"),
    [("since=yesterday", "since"), ("since=", "since"), ("until=1", "until"), ("key=a&key=b", "key")],
)
async def test_unknown_query_is_rejected(deploy: Deploy, query: str, param: str) -> None:
    gateway = await deploy()
    async with gateway.session.get(f"{gateway.url}/admin/usage?{query}") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
