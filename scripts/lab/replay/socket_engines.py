"""Engines over HTTP: what they answer and when is the model's affair, what they are asked must be as it should be.

They speak the pull protocol, in which a prefiller's answer has parameters for the decoder, and SGLang's, in which both
get the request at once and meet in a room. Raw asyncio: they share their core with whoever asks.

A request's `seed` is its number in the trace, by which engines know it. A prompt has 4 bytes of text a token, which
are the same for equal names of its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, cast

import httptools
import orjson

from lab.common.engines import STREAM_HEAD, chunk, event, json_answer, kv_params, usage
from lab.common.load import post
from lab.replay.engines import Engine
from lab.replay.fleet import Course
from lab.replay.trace import BLOCK_TOKENS, Request
from proxy.common.backend import Backend, Role
from proxy.sim.hardware.work import Work

# Tokens that a stream sends together: every token by itself is what scripts/bench is for.
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
    """What a client sends: a completion, streamed."""
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
    # Traces may name fewer blocks than there are: nobody has what lies behind them.
    return text + _filled(f"{request.at} ", size - len(text))


@lru_cache(maxsize=20_000)
def _block(name: int) -> bytes:
    return _filled(f"{name} ", BYTES_PER_TOKEN * BLOCK_TOKENS)


def _filled(word: str, size: int) -> bytes:
    return (word.encode() * (size // len(word) + 1))[:size]


def refusal(why: str) -> bytes:
    """Of what should not have come."""
    return json_answer({"error": {"message": why, "type": "BadRequestError", "code": 400}}, "400 Bad Request")


def _choice(count: int, finish_reason: str | None) -> dict[str, Any]:
    text = WORD * count
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}


def _prefilled(request: Request, cached_tokens: int, params: dict[str, Any] | None) -> bytes:
    """A prefiller's answer that is not streamed."""
    told = usage(request.input_tokens, 1, cached_tokens)
    return json_answer({**_HEAD, "choices": [_choice(1, "length")], "usage": told, "kv_transfer_params": params})


def _tokens(count: int, finish_reason: str | None = None) -> bytes:
    """An event with so many tokens."""
    return event({**_HEAD, "choices": [_choice(count, finish_reason)]})


def _end(request: Request, cached_tokens: int) -> bytes:
    """What follows the last token of a stream."""
    told = usage(request.input_tokens, request.output_tokens, cached_tokens)
    return event({**_HEAD, "choices": [], "usage": told}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engines:
    """All engines of a fleet, and the KV that is on its way between them."""

    def __init__(self, engines: dict[Backend, Engine], courses: Sequence[Course]) -> None:
        """`courses`: of the requests, by their number."""
        self.courses = courses
        self._engines = engines
        self._kept: dict[str, tuple[Engine, Work]] = {}
        self._rooms: dict[int, asyncio.Future[tuple[Engine, Work]]] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Engines:
        """Serve, each engine at its backend's port, or a free one for 0."""
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
        """At which they serve."""
        return [server.sockets[0].getsockname()[1] for server in self._servers]

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, connection: _Connection, request: dict[str, Any]) -> None:
        """Answer a request on its connection, in time."""
        task = self._loop.create_task(self._serve(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, asked: dict[str, Any]) -> None:
        number = asked.get("seed")
        if not isinstance(number, int) or not 0 <= number < len(self.courses):
            connection.write(refusal("no request of the trace"))
            return
        course = self.courses[number]
        if len(asked["prompt"]) != BYTES_PER_TOKEN * course.request.input_tokens:
            connection.write(refusal("not the prompt of this request"))
        elif connection.backend.role is Role.PREFILL:
            await self._prefill(connection, asked, course)
        else:
            await self._decode(connection, asked, course)

    async def _prefill(self, connection: _Connection, asked: dict[str, Any], course: Course) -> None:
        request, engine, room = course.request, connection.engine, asked.get("bootstrap_room")
        wanted = asked.get("kv_transfer_params") or {}
        if not isinstance(room, int) and (wanted.get("do_remote_decode") is not True or asked.get("max_tokens") != 1):
            connection.write(refusal("not a prefill"))
            return
        course.prefiller = connection.backend
        work = await engine.prefill(request.input_tokens, request.blocks[: request.input_tokens // BLOCK_TOKENS])
        course.cached_tokens = work.cached_tokens
        if isinstance(room, int):
            self._room(room).set_result((engine, work))
            if asked.get("stream"):
                connection.write(STREAM_HEAD + _tokens(1, "length") + _end(request, work.cached_tokens))
            else:
                connection.write(_prefilled(request, work.cached_tokens, None))
            return
        name = f"{asked['seed']}-{len(self._kept)}-{self._loop.time()}"
        self._kept[name] = engine, work
        params = kv_params(name, connection.backend.host)
        connection.write(_prefilled(request, work.cached_tokens, params))

    async def _decode(self, connection: _Connection, asked: dict[str, Any], course: Course) -> None:
        request, room = course.request, asked.get("bootstrap_room")
        if asked.get("max_tokens") != request.output_tokens or not asked.get("stream"):
            connection.write(refusal("not what the client asked for"))
            return
        if isinstance(room, int):
            prefiller, kv = await self._room(room)
            del self._rooms[room]
        else:
            kept = self._kept.pop((asked.get("kv_transfer_params") or {}).get("remote_request_id", ""), None)
            if kept is None:
                connection.write(refusal("no KV of a prefiller, or used already"))
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
        """Where the two legs of SGLang's protocol meet, whoever comes first."""
        return self._rooms.setdefault(number, self._loop.create_future())


class _Connection(asyncio.Protocol):
    """One connection to an engine, with one request after the other."""

    def __init__(self, engines: Engines, backend: Backend, engine: Engine) -> None:
        self.backend = backend
        self.engine = engine
        self._engines = engines
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router looks whether gRPC is spoken here
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if self._parser.get_method() == b"GET":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]}
            self.write(json_answer(models if self._url.startswith(b"/v1/models") else {}))
            return
        self._engines.serve(self, orjson.loads(body))

    def write(self, data: bytes) -> None:
        """To whoever asked, if it is still there."""
        if not self._transport.is_closing():
            self._transport.write(data)
