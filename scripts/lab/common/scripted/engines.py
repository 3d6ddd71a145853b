"""Prefillers and decoders in one process: `python -m lab.common.scripted.engines PREFILL_PORTS DECODE_PORTS`.

Each request says how it is answered, see Script. They speak the pull protocol as far as a proxy can get it wrong, and a
stream has the shape of vLLM's. What reaches any of them is noted on arrival, by one clock: GET /arrivals tells it, and
forgets. GET /finish ends the streams that have no end of their own.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import httptools
import orjson
import uvloop

from proxy.backend import Role
from proxy.balancer.policies.least_tokens import WEIGHTS
from proxy.dialects.openai import ChatCompletions
from proxy.dialects.requests import read
from proxy.settings.model import Cost

ENGINE_ID: Final = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"
_MESSAGE: Final = {"id": "chatcmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91", "created": 1760000000, "model": "sim"}
_CHAT: Final = ChatCompletions()
_COST: Final = Cost()


@dataclass(frozen=True, slots=True)
class Script:
    """The member `script` of a request: how it is answered."""

    tokens: int | None = None
    """The length of the answer; None: until /finish."""
    step_ms: float = 1000.0
    """Between two tokens; 0: as fast as they are taken."""
    prefill_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reached an engine: by how much the engine had more to do than the one that had least.

    In requests, and in what the gateway's pool weighs: tokens, those of a prefiller's KV cache left aside.
    """

    engine: int
    excess_requests: int
    excess_weight: int
    weight: int
    """Of the request itself."""


class Books:
    """Who works on what, in all engines of one role."""

    def __init__(self, role: Role, engines: int) -> None:
        self._role = role
        self._requests = [0] * engines
        self._weights = [0] * engines
        self.arrivals: list[Arrival] = []

    def enter(self, engine: int, body: bytes) -> int:
        """A request has arrived; its weight, which `leave` wants back."""
        call = _CHAT.parse(read(body), _COST, {})
        per_compute, per_kv = WEIGHTS[self._role]
        if self._role is Role.PREFILL:
            weight = per_compute * call.pick_request().prefill.compute
        else:
            weight = per_compute * call.pick_request().decode.compute + per_kv * call.pick_request().decode.kv
        excess = self._requests[engine] - min(self._requests), self._weights[engine] - min(self._weights)
        self.arrivals.append(Arrival(engine, *excess, weight))
        self._requests[engine] += 1
        self._weights[engine] += weight
        return weight

    def leave(self, engine: int, weight: int) -> None:
        self._requests[engine] -= 1
        self._weights[engine] -= weight

    def tell(self) -> list[Arrival]:
        """And forget."""
        told, self.arrivals = self.arrivals, []
        return told


@dataclass(slots=True)
class Engines:
    """All of them."""

    books: dict[Role, Books]
    endless: set[Exchange]
    """Streams that wait for /finish."""


class Exchange(asyncio.Protocol):
    """One connection to one engine, and the request on it."""

    def __init__(self, engines: Engines, role: Role, engine: int) -> None:
        self._engines = engines
        self._role = role
        self._books = engines.books[role]
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._timer: asyncio.Handle | None = None
        self._weight: int | None = None
        self._script = Script()
        self._sent = 0
        self._token = b""
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._weight is not None:
            self._step()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(_json_answer(self._look(self._url)))
            return
        body = b"".join(self._body)
        self._body = []
        request = orjson.loads(body)
        self._weight = self._books.enter(self._engine, body)
        self._script = Script(**request["script"])
        given = request.get("kv_transfer_params") or {}
        if self._role is Role.DECODE:
            if given.get("remote_engine_id") != ENGINE_ID:
                self._refuse()
            else:
                self._begin_stream(request)
        elif given.get("do_remote_decode") is not True or request["max_tokens"] != 1:
            self._refuse()
        else:
            self._later(self._script.prefill_ms, self._end, _PREFILLED)

    def finish(self) -> None:
        """End the stream after one more token."""
        self._script = Script(self._sent + 1, step_ms=0)
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_full:
            self._step()

    def _look(self, url: bytes) -> object:
        if url == b"/arrivals":
            return {role.value: books.tell() for role, books in self._engines.books.items()}
        if url == b"/finish":
            for exchange in tuple(self._engines.endless):
                exchange.finish()
        return {}

    def _refuse(self) -> None:
        self._end(_json_answer({"error": {"message": "these are no KV parameters"}}, "400 Bad Request"))

    def _begin_stream(self, request: dict[str, Any]) -> None:
        ids = {"token_ids": [12345]} if request.get("return_token_ids") else {}
        self._token = _event([{"index": 0, "delta": {"content": " token"}, "logprobs": None, **ids}])
        prompt = {"prompt_token_ids": list(range(30_000, 30_100))} if ids else {}
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        self._sent = 0
        if self._script.tokens is None:
            self._engines.endless.add(self)
        self._transport.write(_STREAM_HEAD + _event([role], **prompt))
        self._step()

    def _step(self) -> None:
        self._sent += 1
        if self._sent == self._script.tokens:
            last = _event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}])
            usage = {"prompt_tokens": 100, "completion_tokens": self._sent, "total_tokens": 100 + self._sent}
            self._end(self._token + last + _event([], usage=usage) + _STREAM_END)
            return
        self._transport.write(self._token)
        if not self._is_full:
            self._later(self._script.step_ms, self._step)

    def _later(self, ms: float, act: Any, *arguments: object) -> None:
        self._timer = asyncio.get_running_loop().call_later(ms / 1000, act, *arguments)

    def _end(self, last: bytes) -> None:
        self._leave()
        self._transport.write(last)

    def _leave(self) -> None:
        self._engines.endless.discard(self)
        if self._weight is not None:
            self._books.leave(self._engine, self._weight)
            self._weight = None


def _json_answer(payload: object, status: str = "200 OK") -> bytes:
    body = orjson.dumps(payload)
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[dict[str, Any]], **more: object) -> bytes:
    payload = {**_MESSAGE, "object": "chat.completion.chunk", "choices": choices, **more}
    return _chunk(b"data: " + orjson.dumps(payload) + b"\n\n")


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_PREFILLED = _json_answer(
    {
        **_MESSAGE,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": " token"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(7)),
            "remote_engine_id": ENGINE_ID,
            "remote_request_id": "chatcmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
)


async def _serve(ports: dict[Role, list[int]]) -> None:
    loop = asyncio.get_running_loop()
    engines = Engines({role: Books(role, len(ports[role])) for role in ports}, set())
    for role in ports:
        for index, port in enumerate(ports[role]):
            await loop.create_server(partial(Exchange, engines, role, index), "127.0.0.1", port, backlog=4096)
    # Whoever started this process holds the other end: its end, however it comes, is the end here, too.
    await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    lists = ([int(port) for port in argument.split(",")] for argument in sys.argv[1:3])
    uvloop.run(_serve(dict(zip((Role.PREFILL, Role.DECODE), lists, strict=True))))
