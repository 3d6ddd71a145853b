"""Engines over HTTP: they check requests, and answer at the times of the hardware model.

They speak the pull protocol, in which a prefiller's answer has parameters for the decoder, and SGLang's, in which both
get the request at once and meet in a room. They use raw asyncio, because they share their core with the clients.
The `seed` of a request is its number in the trace. A prompt has 4 bytes of text per token, which are equal for equal
names of its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import orjson

from lab.common.engines import STREAM_HEAD, HttpConnection, chunk, event, json_answer, kv_params, usage
from lab.common.load import post
from lab.replay.engines import Engine
from lab.replay.fleet import Course
from lab.replay.trace import BLOCK_TOKENS, Request
from proxy.common.backend import Backend, Role
from proxy.sim.hardware.work import Work

# Tokens per write of a stream. Single tokens are the subject of scripts/bench.
_STREAM_INTERVAL: Final = 32
MODEL: Final = "replay"
BYTES_PER_TOKEN: Final = 4
WORD: Final = " tok"
_HEAD: Final = {
    "id": "cmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91",
    "object": "text_completion",
    "created": 1760000000,
    "model": MODEL,
}


def request_bytes(request: Request, number: int, port: int) -> bytes:
    """Return a client's request for a streamed completion."""
    rest = {
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
    }
    body = b'{"model":"%b","prompt":"%b",%b' % (MODEL.encode(), _prompt(request), orjson.dumps(rest)[1:])
    return post(port, body, "/v1/completions", Connection="close")


def _prompt(request: Request) -> bytes:
    size = BYTES_PER_TOKEN * request.input_tokens
    text = b"".join(map(_block, request.blocks))[:size]
    # Traces may name fewer blocks than a prompt has. The rest of the prompt is unique.
    return text + _filled(f"{request.at} ", size - len(text))


@lru_cache(maxsize=20_000)
def _block(name: int) -> bytes:
    return _filled(f"{name} ", BYTES_PER_TOKEN * BLOCK_TOKENS)


def _filled(word: str, size: int) -> bytes:
    return (word.encode() * (size // len(word) + 1))[:size]


def bad_request(message: str) -> bytes:
    """Return the answer to an invalid request."""
    return json_answer({"error": {"message": message, "type": "BadRequestError", "code": 400}}, "400 Bad Request")


def _choice(count: int, finish_reason: str | None) -> dict[str, Any]:
    text = WORD * count
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}


def _prefilled(request: Request, cached_tokens: int, params: dict[str, Any] | None) -> bytes:
    """Return a prefiller's answer without a stream."""
    token_usage = usage(request.input_tokens, 1, cached_tokens)
    return json_answer({**_HEAD, "choices": [_choice(1, "length")], "usage": token_usage, "kv_transfer_params": params})


def _tokens(count: int, finish_reason: str | None = None) -> bytes:
    """Return an event with `count` tokens."""
    return event({**_HEAD, "choices": [_choice(count, finish_reason)]})


def _end(request: Request, cached_tokens: int) -> bytes:
    """Return the end of a stream behind its last token."""
    token_usage = usage(request.input_tokens, request.output_tokens, cached_tokens)
    return event({**_HEAD, "choices": [], "usage": token_usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engines:
    """All engines of a fleet, and the KV caches in transfer between them."""

    def __init__(self, engines: dict[Backend, Engine], courses: Sequence[Course]) -> None:
        self.courses = courses
        self._engines = engines
        self._kept: dict[str, tuple[Engine, Work]] = {}
        self._rooms: dict[int, asyncio.Future[tuple[Engine, Work]]] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Engines:
        """Start a server for each engine at its backend's port. Port 0: any free one."""
        for backend, engine in self._engines.items():
            server = await self._loop.create_server(
                lambda backend=backend, engine=engine: _Connection(self, backend, engine),  # type: ignore[misc]
                *(backend.host, backend.port),
                backlog=4096,
            )
            self._servers.append(server)
        return self

    @property
    def ports(self) -> list[int]:
        """Ports of the engines."""
        return [server.sockets[0].getsockname()[1] for server in self._servers]

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, connection: _Connection, request: dict[str, Any]) -> None:
        """Answer a request on its connection at its time."""
        task = self._loop.create_task(self._serve(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, body: dict[str, Any]) -> None:
        number = body.get("seed")
        if not isinstance(number, int) or not 0 <= number < len(self.courses):
            connection.write(bad_request("seed is not the number of a request in the trace"))
            return
        course = self.courses[number]
        if len(body["prompt"]) != BYTES_PER_TOKEN * course.request.input_tokens:
            connection.write(bad_request("the prompt has another length than in the trace"))
        elif connection.backend.role is Role.PREFILL:
            await self._prefill(connection, body, course)
        else:
            await self._decode(connection, body, course)

    async def _prefill(self, connection: _Connection, body: dict[str, Any], course: Course) -> None:
        request, engine, room = course.request, connection.engine, body.get("bootstrap_room")
        wanted = body.get("kv_transfer_params") or {}
        if not isinstance(room, int) and (wanted.get("do_remote_decode") is not True or body.get("max_tokens") != 1):
            connection.write(bad_request("not a prefill request"))
            return
        course.prefiller = connection.backend
        work = await engine.prefill(request.input_tokens, request.blocks[: request.input_tokens // BLOCK_TOKENS])
        course.cached_tokens = work.cached_tokens
        if isinstance(room, int):
            self._room(room).set_result((engine, work))
            if body.get("stream"):
                connection.write(STREAM_HEAD + _tokens(1, "length") + _end(request, work.cached_tokens))
            else:
                connection.write(_prefilled(request, work.cached_tokens, None))
            return
        name = f"{body['seed']}-{len(self._kept)}-{self._loop.time()}"
        self._kept[name] = engine, work
        params = kv_params(name, connection.backend.host)
        connection.write(_prefilled(request, work.cached_tokens, params))

    async def _decode(self, connection: _Connection, body: dict[str, Any], course: Course) -> None:
        request, room = course.request, body.get("bootstrap_room")
        if body.get("max_tokens") != request.output_tokens or not body.get("stream"):
            connection.write(bad_request("max_tokens or stream differ from the client's request"))
            return
        if isinstance(room, int):
            prefiller, kv = await self._room(room)
            del self._rooms[room]
        else:
            kept = self._kept.pop((body.get("kv_transfer_params") or {}).get("remote_request_id", ""), None)
            if kept is None:
                connection.write(bad_request("unknown KV parameters, or used already"))
                return
            prefiller, kv = kept
        unsent = 0

        def on_tokens(count: int) -> None:
            nonlocal unsent
            unsent += count
            if unsent >= _STREAM_INTERVAL:
                connection.write(_tokens(unsent))
                unsent = 0

        connection.write(STREAM_HEAD)
        work = await connection.engine.begin(request.input_tokens, request.output_tokens, on_tokens)
        prefiller.give_back(kv)
        if not work.is_ended:
            connection.write(_tokens(unsent))
            unsent = 0
            await connection.engine.end(work)
        connection.write(_tokens(unsent, "length") + _end(request, kv.cached_tokens))

    def _room(self, number: int) -> asyncio.Future[tuple[Engine, Work]]:
        """Return the room in which the two legs of SGLang's protocol meet."""
        return self._rooms.setdefault(number, self._loop.create_future())


class _Connection(HttpConnection):
    """A connection to one engine."""

    def __init__(self, engines: Engines, backend: Backend, engine: Engine) -> None:
        super().__init__()
        self.backend = backend
        self.engine = engine
        self._engines = engines

    def on_request(self, method: bytes, url: bytes, body: bytes) -> None:
        if method == b"GET":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]}
            self.write(json_answer(models if url.startswith(b"/v1/models") else {}))
            return
        self._engines.serve(self, orjson.loads(body))

    def write(self, data: bytes) -> None:
        """Write to the client, unless it has disconnected."""
        if not self._transport.is_closing():
            self._transport.write(data)
