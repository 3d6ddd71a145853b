"""Prefillers and decoders that cost next to nothing, in one process on uvloop, with answers built beforehand.

Usage: `python -m lab.common.engines PREFILL_PORTS DECODE_PORTS [without-ids]`; `without-ids`: engines send no token
ids.
They speak the pull protocol: a prefiller insists on `do_remote_decode` and one token, a decoder on the prefiller's
parameters. They also speak SGLang's, in which both get the same request with a `bootstrap_room` at the same time, and
neither answers before the other has it.
A stream has the shape of vLLM's, write by write: the headers at once, then the role chunk with the first token, then a
token per write, with token ids if the request asks for them. All streams of a decoder get their token in the same step,
as in a real engine. Streams of more than half a second per token have separate clocks.
A request may have a `Script` for its answer. Its arrival is recorded by one clock for all engines: GET /arrivals
returns and deletes the records. GET /finish ends the streams that have no end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, cast

import httptools
import orjson
import uvloop

MODEL: Final = "bench"
"""Prefix of model names such as `bench-50ms`. The name sets the pace, because some routers drop unknown fields."""
FIRST_TOKEN_SECONDS: Final = 0.002
"""Time from a request to the first token, for every answer."""
TEXT_BYTES_PER_TOKEN: Final = 4
MEBIBYTE: Final = 1 << 20
ENGINE_ID: Final = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"
WORD: Final = " token"
_ID: Final = "chatcmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91"
_CREATED: Final = 1760000000
_LONGEST_STEP_SECONDS: Final = 0.5
_IMAGE_TOKENS: Final = 2000
_ROLES: Final = ("prefill", "decode")


# Answers


def json_answer(payload: object, status: str = "200 OK") -> bytes:
    """Return head and body of an answer."""
    body = orjson.dumps(payload)
    head = (
        f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    """Return one event of a stream, in a chunk."""
    return chunk(b"data: " + orjson.dumps(payload) + b"\n\n")


def _chat_event(choices: list[dict[str, Any]], **more: object) -> bytes:
    head = {"id": _ID, "object": "chat.completion.chunk", "created": _CREATED, "model": MODEL}
    return event({**head, "choices": choices, **more})


def _token(finish_reason: str | None, token_ids: list[int] | None) -> bytes:
    delta = {"content": WORD, "reasoning": None}
    return _chat_event(
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": token_ids}]
    )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return the member `usage` of an answer. `cached_tokens`: None omits the member."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        **({} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}),
    }


@lru_cache
def role_chunk(prompt_tokens: int | None) -> bytes:
    """Return the role chunk. `prompt_tokens`: number of prompt token ids in it, or None for no ids."""
    delta = {"role": "assistant", "content": ""}
    prompt = None if prompt_tokens is None else list(range(30_000, 30_000 + prompt_tokens))
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return _chat_event([choice], prompt_token_ids=prompt)


@lru_cache
def end(completion_tokens: int, sends_ids: bool) -> bytes:
    """Return the last token, usage, [DONE] and the end of the body."""
    token = _token("length", [12345] if sends_ids else None)
    last = _chat_event([], usage=usage(100, completion_tokens, 99))
    return token + last + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@lru_cache
def completion(completion_tokens: int, kv_params: bytes = b"null", cached_tokens: int | None = 99) -> bytes:
    """Return an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": WORD * completion_tokens, "reasoning": None}
    choice = {"index": 0, "message": {**message, "tool_calls": []}, "logprobs": None, "finish_reason": "length"}
    return json_answer(
        {
            "id": _ID,
            "object": "chat.completion",
            "created": _CREATED,
            "model": MODEL,
            "choices": [{**choice, "stop_reason": None}],
            "usage": usage(100, completion_tokens, cached_tokens),
            "kv_transfer_params": orjson.loads(kv_params),
        }
    )


def kv_params(request_id: str, host: str = "127.0.0.1") -> dict[str, Any]:
    """Return the KV parameters of a prefiller in the pull protocol."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(7)),
        "remote_engine_id": ENGINE_ID,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": 5600,
        "tp_size": 1,
    }


STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_TOKENS: Final = {sends_ids: _token(None, [12345] if sends_ids else None) for sends_ids in (False, True)}
_PREFILLED: Final = completion(1, orjson.dumps(kv_params(_ID)))
"""Answer of a prefiller in the pull protocol."""
_SCRIPTED: Final = completion(1, orjson.dumps(kv_params(_ID)), None)
"""The same answer for a request with a script, from an engine without a prefix cache."""
_BOOTSTRAPPED: Final = {False: completion(1), True: STREAM_HEAD + role_chunk(None) + end(1, False)}
"""Answer of a prefiller in SGLang's protocol, by whether it is streamed. Routers drop it."""
_NO_PREFILL: Final = json_answer({"error": {"message": "not a prefill request"}}, "400 Bad Request")
_NO_KV: Final = json_answer({"error": {"message": "no KV parameters of a prefiller"}}, "400 Bad Request")


# Engines


@dataclass(frozen=True, slots=True)
class Script:
    """How to answer a request: its member `script`."""

    tokens: int | None = None
    """Length of the answer. None: until GET /finish."""
    step_ms: int = 1000
    """Time between two tokens. 0: as fast as the client reads them."""
    prefill_ms: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """An arrival of a request: the load of its engine, in excess of the least loaded one of the role.

    Load is counted in requests, and in the weights of the gateway's pool: tokens, without a prefiller's KV cache.
    """

    engine: int
    excess_requests: int
    excess_weight: int
    weight: int
    """Weight of the request itself."""


class _RoleLoad:
    """The load of all engines of one role."""

    def __init__(self, role: str, engines: int) -> None:
        self._role = role
        self._requests = [0] * engines
        self._weights = [0] * engines
        self.arrivals: list[Arrival] = []

    def enter(self, engine: int, body: bytes) -> int:
        """Record an arrival. Return its weight, the argument of `leave`."""
        weight = _weigher()(self._role, body)
        excess = self._requests[engine] - min(self._requests), self._weights[engine] - min(self._weights)
        self.arrivals.append(Arrival(engine, *excess, weight))
        self._requests[engine] += 1
        self._weights[engine] += weight
        return weight

    def leave(self, engine: int, weight: int) -> None:
        self._requests[engine] -= 1
        self._weights[engine] -= weight


@lru_cache
def _weigher() -> Callable[[str, bytes], int]:
    """Return a function that weighs a request as the gateway's pool does.

    The import is local because load generators import this module and must start quickly.
    """
    from proxy.balancer.policies.least_tokens import WEIGHTS
    from proxy.common.backend import Role
    from proxy.dialects.openai import ChatCompletions
    from proxy.dialects.requests import parse_body
    from proxy.settings.model import Cost

    chat, cost = ChatCompletions(), Cost()

    def weight(role: str, body: bytes) -> int:
        request = chat.parse_request(parse_body(body), cost, {}).make_pick_request()
        per_compute, per_kv = WEIGHTS[Role(role)]
        if role == "prefill":
            return per_compute * request.prefill_load.compute_tokens
        return per_compute * request.decode_load.compute_tokens + per_kv * request.decode_load.kv_tokens

    return weight


class _Engines:
    """State that all engines share."""

    def __init__(self, ports: dict[str, list[int]], *, has_ids: bool) -> None:
        self.loads = {role: _RoleLoad(role, len(of_role)) for role, of_role in ports.items()}
        self.has_ids = has_ids
        self.endless: set[_Exchange] = set()
        """Streams without an end, which GET /finish ends."""
        self._waiting: dict[int, Callable[[], object]] = {}
        """Callbacks of the side of a room that arrived first, by room."""

    def meet(self, room: int, proceed: Callable[[], object]) -> None:
        """Call both sides of a room when the second one arrives."""
        partner = self._waiting.pop(room, None)
        if partner is None:
            self._waiting[room] = proceed
        else:
            partner()
            proceed()

    def get(self, url: bytes) -> object:
        """Handle GET requests. Return the JSON to answer with."""
        if url == b"/finish":
            for exchange in tuple(self.endless):
                exchange.finish()
        if url != b"/arrivals":
            return {}
        found = {role: loads.arrivals for role, loads in self.loads.items()}
        for loads in self.loads.values():
            loads.arrivals = []
        return found


class HttpConnection(asyncio.Protocol):
    """The server side of a connection, which calls `on_request` for each request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router probes for gRPC
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        self.on_request(self._parser.get_method(), self._url, body)

    def on_request(self, method: bytes, url: bytes, body: bytes) -> None:
        """Answer a request that has arrived completely."""
        raise NotImplementedError


class _Exchange(HttpConnection):
    """One connection to one engine, and the request on it. `phase`: start of the steps, as a share of a step."""

    def __init__(self, engines: _Engines, role: str, engine: int, phase: float) -> None:
        super().__init__()
        self._engines = engines
        self._load = engines.loads[role]
        self._answer = self._prefill if role == "prefill" else self._decode
        self._engine = engine
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._role = b""
        self._sends_ids = False
        self._pace_seconds = 0.0
        self._weight: int | None = None
        self._sent = 0
        self._wanted: int | None = 0
        self._is_full = False

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._sent and self._sent != self._wanted:
            self._wait_for_step(self._next_step())

    def on_request(self, method: bytes, url: bytes, body: bytes) -> None:
        if method == b"GET":
            self._transport.write(json_answer(self._engines.get(url)))
            return
        body, tokens = without_image(body)
        request = orjson.loads(body)
        self._sends_ids = self._engines.has_ids and bool(request.get("return_token_ids"))
        self._role = role_chunk(tokens if self._sends_ids else None)
        script = request.get("script")
        if script is None:
            self._wanted = request.get("max_tokens") or request["max_completion_tokens"]
            self._pace_seconds = _pace_seconds(request["model"])
        else:
            self._weight = self._load.enter(self._engine, body)
            self._wanted, self._pace_seconds = script["tokens"], script["step_ms"] / 1000
        self._answer(request)

    def finish(self) -> None:
        """End the stream after one more token."""
        if self._timer is not None:
            self._timer.cancel()
        self._wanted = self._sent + 1
        if self._sent:
            self._step(0)
        else:
            self._first_token()

    def _prefill(self, request: dict[str, Any]) -> None:
        if "bootstrap_room" in request:
            answer = _BOOTSTRAPPED[bool(request.get("stream"))]
            self._engines.meet(request["bootstrap_room"], partial(self._transport.write, answer))
            return
        wanted = request.get("kv_transfer_params") or {}
        fits = wanted.get("do_remote_decode") is True and request.get("max_tokens") == 1 and not request.get("stream")
        if not fits or "script" not in request:
            self._end(_PREFILLED if fits else _NO_PREFILL)
        else:
            self._timer = self._loop.call_later(request["script"]["prefill_ms"] / 1000, self._end, _SCRIPTED)

    def _decode(self, request: dict[str, Any]) -> None:
        room = request.get("bootstrap_room")
        given = request.get("kv_transfer_params") or {}
        if isinstance(room, int):
            self._engines.meet(room, partial(self._answer_as_decoder, request))
        elif given.get("remote_engine_id") == ENGINE_ID:
            self._answer_as_decoder(request)
        else:
            self._end(_NO_KV)

    def _answer_as_decoder(self, request: dict[str, Any]) -> None:
        if request.get("stream"):
            if self._wanted is None:
                self._engines.endless.add(self)
            self._sent = 0
            self._transport.write(STREAM_HEAD)
            self._timer = self._loop.call_later(FIRST_TOKEN_SECONDS, self._first_token)
        else:
            answer = completion(self._wanted or 1)
            self._timer = self._loop.call_later(FIRST_TOKEN_SECONDS, self._transport.write, answer)

    def _first_token(self) -> None:
        if self._wanted == 1:
            self._end(self._role + end(1, self._sends_ids))
            return
        self._sent = 1
        if self._pace_seconds > _LONGEST_STEP_SECONDS:
            self._phase = self._loop.time() / self._pace_seconds % 1
        self._transport.write(self._role + _TOKENS[self._sends_ids])
        self._wait_for_step(self._next_step())

    def _next_step(self) -> int:
        return int(self._loop.time() / self._pace_seconds - self._phase) + 1 if self._pace_seconds else 0

    def _wait_for_step(self, step: int) -> None:
        if self._is_full:
            return
        if not self._pace_seconds:
            self._timer = self._loop.call_soon(self._step, step)
            return
        # The due time is computed from the step's number, so that a late timer does not slow the stream down.
        due = (self._phase + step) * self._pace_seconds
        self._timer = self._loop.call_at(due, self._step, step)

    def _step(self, step: int) -> None:
        self._sent += 1
        if self._sent == self._wanted:
            self._end(end(self._sent, self._sends_ids))
        else:
            self._transport.write(_TOKENS[self._sends_ids])
            self._wait_for_step(step + 1)

    def _end(self, last: bytes) -> None:
        self._leave()
        self._transport.write(last)

    def _leave(self) -> None:
        self._engines.endless.discard(self)
        if self._weight is not None:
            self._load.leave(self._engine, self._weight)
            self._weight = None


def without_image(body: bytes) -> tuple[bytes, int]:
    """Return the body without its image, and the number of prompt tokens. Megabytes of base64 are not parsed."""
    if len(body) < MEBIBYTE:
        return body, len(body) // TEXT_BYTES_PER_TOKEN
    begin = body.index(b'"data:') + 1
    rest = body[:begin] + body[body.index(b'"', begin) :]
    return rest, len(rest) // TEXT_BYTES_PER_TOKEN + _IMAGE_TOKENS


@lru_cache
def _pace_seconds(model: str) -> float:
    return int(model.removeprefix(f"{MODEL}-").removesuffix("ms")) / 1000


async def _serve(ports: dict[str, list[int]], *, has_ids: bool) -> None:
    loop = asyncio.get_running_loop()
    engines = _Engines(ports, has_ids=has_ids)
    for role, of_role in ports.items():
        for index, port in enumerate(of_role):
            make = partial(_Exchange, engines, role, index, index / len(of_role))
            await loop.create_server(make, "127.0.0.1", port, backlog=4096)
    # The script holds the other end of standard input. When it ends in any way, the engines end, too.
    await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    lists = ([int(port) for port in argument.split(",")] for argument in sys.argv[1:3])
    by_role = dict(zip(_ROLES, lists, strict=True))
    uvloop.run(_serve(by_role, has_ids=sys.argv[3:] != ["without-ids"]))
