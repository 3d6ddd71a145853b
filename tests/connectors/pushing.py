"""Simulate engines that push KV layer by layer: a decoder that calls back and waits, and its prefiller.

They agree on nothing but the id that each makes of its X-Request-Id, as vLLM does: where that is not the same, or the
prefiller never says that it is done, a decoder waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

from proxy.sim.state import EngineState
from tests.canned import Received, data

TEXT = "pushed"


class SideChannel:
    """What prefillers tell decoders: that all of a request's KV has been sent."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def send(self, engine_id: str) -> None:
        self._sent[engine_id].set()

    async def arrival(self, engine_id: str) -> None:
        await self._sent[engine_id].wait()


@dataclass
class PushEngine:
    """Looks like a SimulatedEngine to a Deployment. `state.disconnects` are those that its clients left waiting."""

    channel: SideChannel
    role: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    received: list[Received] = field(default_factory=list)
    state: EngineState = field(default_factory=EngineState)
    pins: dict[str, Any] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    before: Callable[[], Awaitable[None]] | None = None
    """An event that it awaits before it handles a request."""
    refusal: int | None = None
    """The status of all its answers."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._look), web.post("/{path:.*}", self._serve)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _look(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        received = Received(request.path, {name.lower(): value for name, value in request.headers.items()}, body)
        self.received.append(received)
        self.state.live += 1
        self.state.notify_waiters()
        try:
            if self.before is not None:
                await self.before()
            if self.refusal is not None:
                return web.json_response({"error": {"message": "no"}}, status=self.refusal)
            return await self.serve(request, orjson.loads(body), engine_id(received))
        except (asyncio.CancelledError, ConnectionError):
            self.state.disconnects += 1
            raise
        finally:
            self.state.live -= 1
            self.state.notify_waiters()

    async def serve(self, request: web.Request, body: Any, engine_id: str) -> web.StreamResponse:
        raise NotImplementedError


def engine_id(received: Received) -> str:
    attempt_id = received.headers["x-request-id"]
    return f"chatcmpl-{attempt_id}" if "chat" in received.path else f"cmpl-{attempt_id}-0"


@dataclass
class PushPrefiller(PushEngine):
    loss: asyncio.Event | None = None
    """When its connection breaks, after it has sent the KV and before it answers."""

    async def serve(self, request: web.Request, body: Any, engine_id: str) -> web.StreamResponse:
        assert body["kv_transfer_params"]["remote_cached_tokens"] >= 0
        self.channel.send(engine_id)
        if self.loss is not None:
            await self.loss.wait()
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
        return web.json_response({"id": engine_id, "choices": [], "usage": usage, "kv_transfer_params": None})


@dataclass
class PushDecoder(PushEngine):
    calls: int = 1
    """How often it calls back for a request."""
    start: asyncio.Event | None = None
    """An event that it awaits when it has the KV."""
    holds: asyncio.Event | None = None
    """An event that it awaits after its first token."""
    fails_to_load: bool = False
    """The KV has been sent, and did not arrive."""
    statuses: list[int] = field(default_factory=list)
    """The answers to its callbacks."""

    async def serve(self, request: web.Request, body: Any, engine_id: str) -> web.StreamResponse:
        answer = web.StreamResponse()
        if body.get("stream"):
            answer.content_type = "text/event-stream"
            await answer.prepare(request)  # vLLM does not wait for its engine with that
        url = body["kv_transfer_params"]["metaserver"]
        for _ in range(self.calls):
            self.statuses.append(await self._call_back(url, callback(engine_id)))
        await self.channel.arrival(engine_id)
        if self.start is not None:
            await self.start.wait()
        if self.fails_to_load:
            error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
            if not body.get("stream"):
                return web.json_response(error, status=500)
            await answer.write(data(error) + b"data: [DONE]\n\n")
        elif body.get("stream"):
            await self._stream(answer, engine_id, is_chat="messages" in body)
        else:
            part = {"message": {"role": "assistant", "content": TEXT}} if "messages" in body else {"text": TEXT}
            return web.json_response(_payload(engine_id, "stop", part) | {"usage": _USAGE})
        return answer

    async def _stream(self, answer: web.StreamResponse, engine_id: str, *, is_chat: bool) -> None:
        for position, text in enumerate((TEXT[:3], TEXT[3:], "")):
            if position and self.holds is not None:
                await self.holds.wait()
            part = {"delta": {"content": text}} if is_chat else {"text": text}
            await answer.write(data(_payload(engine_id, None if text else "stop", part)))
        await answer.write(data({"id": engine_id, "choices": [], "usage": _USAGE}) + b"data: [DONE]\n\n")

    async def _call_back(self, url: str, payload: dict[str, Any]) -> int:
        async with self._session.post(url, json=payload) as answer:
            await answer.read()
            return answer.status


_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


def _payload(engine_id: str, finish_reason: str | None, part: dict[str, Any]) -> dict[str, Any]:
    return {"id": engine_id, "choices": [{"index": 0, "finish_reason": finish_reason, **part}]}


def callback(engine_id: str) -> dict[str, Any]:
    """Return the body that MooncakeLayerwiseConnector.update_state_after_alloc posts."""
    return {
        "token_ids": [],
        "request_id": engine_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_block_size": [128],
        "remote_engine_id": "5f1c",
        "remote_host": "10.0.0.2",
        "remote_port": 30100,
        "remote_tp_size": 4,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }
