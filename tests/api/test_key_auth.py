"""Client keys at the routes: rejected before the body is read, in the clients' form, and never passed on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from proxy.api.credentials import API_KEY, KeyAuth
from proxy.gateway.api_keys import ApiKeys, KeyUsage, assign_slots
from proxy.listener import replies
from proxy.observe.metrics import Metrics
from proxy.settings import ClientKey
from tests.clock import Clock

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
}


class Gateway:
    """One client route in a small application, put together as the generation routes are."""

    def __init__(self, clock: Clock) -> None:
        self.usage = KeyUsage()
        self.callers = ApiKeys(self.usage, clock=clock)
        self.keys = KeyAuth(self.callers)
        self.served: list[str] = []
        self.ended: list[str | None] = []
        self.credentials: list[str | None] = []
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.port = 0

    def configure(self, **limits: dict[str, Any]) -> None:
        """Keys of these names, each with the key `sk-NAME`."""
        keys = [
            ClientKey(name=name, key_sha256=hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **numbers)
            for name, numbers in limits.items()
        ]
        self.callers.replace_keys(keys, assign_slots(limits, {}))

    async def serve(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self.keys.find_client_key(request)
            with self.keys.count_in_flight(caller):
                await request.read()
                self.served.append(request[API_KEY])
                self.arrived.set()
                await self.go_on.wait()
                self.credentials.append(self.keys.credential_for_engines(request))
                return web.json_response(ANSWER)
        finally:
            self.ended.append(request.get(API_KEY))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        app = web.Application()
        replies.install_replies(app, Metrics())
        app.router.add_post(PATH, self.serve)
        async with TestServer(app, host=HOST) as server:
            assert server.port is not None
            self.port = server.port
            yield

    def client(self, api_key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://{HOST}:{self.port}/v1", api_key=api_key, max_retries=0)

    async def ask(self, api_key: str) -> str | None:
        async with self.client(api_key) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
            return answer.choices[0].message.content


@pytest.fixture
async def gateway(clock: Clock) -> AsyncIterator[Gateway]:
    clock.now = 6000.0
    gateway = Gateway(clock)
    async with gateway.listening():
        yield gateway
    assert gateway.usage.count_in_flight(0) == 0


async def test_engines_get_the_clients_credential_when_there_are_no_keys(gateway: Gateway) -> None:
    assert await gateway.ask("anything") == "hi"
    assert (gateway.served, gateway.credentials) == (["-"], ["Bearer anything"])


async def test_engines_never_get_a_client_key(gateway: Gateway) -> None:
    gateway.configure(a={})
    assert await gateway.ask("sk-a") == "hi"
    assert (gateway.served, gateway.credentials) == (["a"], [None])


async def test_key_is_not_passed_on_when_keys_are_removed_during_the_request(gateway: Gateway) -> None:
    gateway.configure(a={})
    gateway.go_on.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(gateway.ask("sk-a"))
        await gateway.arrived.wait()
        gateway.configure()
        gateway.go_on.set()
    assert gateway.credentials == [None]


async def test_no_credential_of_an_unidentified_request_is_passed_on(gateway: Gateway) -> None:
    request = make_mocked_request("POST", PATH, {"Authorization": "Bearer sk-a"})
    assert gateway.keys.credential_for_engines(request) is None
    gateway.keys.find_client_key(request)
    assert gateway.keys.credential_for_engines(request) == "Bearer sk-a"


def test_x_api_key_is_passed_on_as_a_bearer_token(clock: Clock) -> None:
    gateway = Gateway(clock)
    request = make_mocked_request("POST", "/v1/messages", headers={"X-Api-Key": "sk-a"})
    gateway.keys.find_client_key(request)
    assert gateway.keys.credential_for_engines(request) == "Bearer sk-a"


async def test_sdk_raises_authentication_error_for_a_wrong_key(gateway: Gateway) -> None:
    gateway.configure(a={})
    with pytest.raises(openai.AuthenticationError) as refused:
        await gateway.ask("sk-b")
    error = refused.value
    assert (error.status_code, error.code, error.type) == (401, "invalid_api_key", "invalid_request_error")
    assert "sk-b" not in error.message
    assert (gateway.served, gateway.ended) == ([], [None])


async def test_sdk_raises_rate_limit_error_and_knows_when_there_is_room(gateway: Gateway) -> None:
    gateway.configure(a={"requests_per_minute": 1})
    await gateway.ask("sk-a")
    with pytest.raises(openai.RateLimitError) as refused:
        await gateway.ask("sk-a")
    assert (refused.value.code, refused.value.type) == ("key_rate", "rate_limit_error")
    headers = refused.value.response.headers
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("60001", "61")
    assert gateway.ended == ["a", "a"]  # the refused one is known by its name, too


async def test_sdk_raises_rate_limit_error_for_one_request_too_many_at_a_time(gateway: Gateway) -> None:
    gateway.configure(a={"max_concurrent": 1})
    gateway.go_on.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.ask("sk-a"))
        await gateway.arrived.wait()
        with pytest.raises(openai.RateLimitError) as refused:
            await gateway.ask("sk-a")
        gateway.go_on.set()
    assert refused.value.code == "key_concurrency"
    assert refused.value.response.headers["retry-after-ms"] == "1000"
    assert first.result() == "hi"
    assert await gateway.ask("sk-a") == "hi"


@pytest.mark.parametrize(
    ("header", "status"), [("X-Api-Key: sk-a", 200), ("X-Api-Key: sk-b", 401), ("X-Other: 1", 401)]
)
async def test_client_is_rejected_before_its_body_is_read(gateway: Gateway, header: str, status: int) -> None:
    gateway.configure(a={})
    async with AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection(HOST, gateway.port)
        stack.callback(writer.close)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: 2\r\n\r\n".encode())
        if status == 200:
            writer.write(b"{}")
        assert (await reader.readline()).split()[1] == str(status).encode()
