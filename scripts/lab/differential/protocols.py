"""Rules and answers of each protocol.

An engine without the parameters that its protocol needs answers 400, and records the problem.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from typing import Any, Protocol

from aiohttp import web

from lab.common.processes import HOST, fetch, free_ports
from lab.differential.requests import CHAT, COMPLETIONS, GENERATE, MODEL

_PROMPTS = ("prompt", "text", "input_ids")
# Members of a body that are lists with an entry for each prompt, or for each answer.
_LISTS = ("sampling_params", "image_data", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_NO_SEED = -1


def prompts(body: Mapping[str, Any]) -> int:
    """Return the number of prompts in a body."""
    listed = _listed(body)
    return 1 if listed is None else len(body[listed])


def answers(body: Mapping[str, Any]) -> int:
    """Return the number of requested answers."""
    return prompts(body) * _samples(body)


def is_several(body: Mapping[str, Any]) -> bool:
    """Return whether a body requests several answers, or has the form for several."""
    return _listed(body) is not None or _samples(body) > 1


def units(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the requests for single answers."""
    listed, samples = _listed(body), _samples(body)
    single = {name: value for name, value in body.items() if name not in ("n", "best_of")}
    for number, (prompt, sample) in enumerate(product(range(prompts(body)), range(samples))):
        unit = dict(single)
        if listed is not None:
            unit[listed] = body[listed][prompt]
        for name in _LISTS:
            if isinstance(body.get(name), list):
                unit[name] = body[name][number * len(body[name]) // answers(body)]
        if isinstance(body.get("seed"), int) and body["seed"] != _NO_SEED:
            unit["seed"] = body["seed"] + sample
        if samples > 1 and "sampling_params" in unit:
            unit["sampling_params"] = {**unit["sampling_params"], "n": 1}
        yield unit


def _listed(body: Mapping[str, Any]) -> str | None:
    """Return the member with a list of prompts, or None. A list of numbers is one prompt."""
    for name in _PROMPTS:
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return name
    return None


def _samples(body: Mapping[str, Any]) -> int:
    params = body.get("sampling_params")
    if isinstance(params, list):
        params = params[0]
    return body.get("n") or (params or {}).get("n") or 1


_WORDS = ("Hello", " you")
_PROMPT_IDS = [1, 2, 3, 4]


def answer(path: str, body: Mapping[str, Any], kv_params: object = None) -> Answer:
    """Return the answer to a body. `kv_params` are part of an answer without a stream."""
    if path == GENERATE:
        return _native(body)
    stream = _events(path, body) if body.get("stream") else None
    return Answer(events=stream) if stream is not None else Answer(payload=_whole(path, body, kv_params))


def _whole(path: str, body: Mapping[str, Any], kv_params: object) -> dict[str, Any]:
    text_member: dict[str, Any] = (
        {"message": {"role": "assistant", "content": "".join(_WORDS)}} if path == CHAT else {"text": "".join(_WORDS)}
    )
    choices = [
        {"index": index, **text_member, "logprobs": None, "finish_reason": "length"} for index in range(answers(body))
    ]
    return {**_frame(path, body, ""), "choices": choices, "usage": _usage(body), "kv_transfer_params": kv_params}


def _events(path: str, body: Mapping[str, Any]) -> Sequence[str]:
    frame = _frame(path, body, ".chunk")
    ids = bool(body.get("return_token_ids"))
    chunks: list[dict[str, Any]] = []
    for index in range(answers(body)):
        if path == CHAT:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append({"choices": [role], **({"prompt_token_ids": _PROMPT_IDS} if ids else {})})
        for number, word in enumerate(_WORDS):
            text_member: dict[str, Any] = {"delta": {"content": word}} if path == CHAT else {"text": word}
            choice = {"index": index, **text_member, "finish_reason": "length" if word is _WORDS[-1] else None}
            if ids:
                choice["token_ids"] = [10 + number]
                if path != CHAT and number == 0:
                    choice["prompt_token_ids"] = _PROMPT_IDS
            chunks.append({"choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": _usage(body)})
    return [*(json.dumps({**frame, **chunk}) for chunk in chunks), "[DONE]"]


def _frame(path: str, body: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if path == CHAT else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1_760_000_000, "model": body.get("model")}


def _usage(body: Mapping[str, Any]) -> dict[str, Any]:
    read, written = len(_PROMPT_IDS) * prompts(body), len(_WORDS) * answers(body)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _native(body: Mapping[str, Any]) -> Answer:
    meta: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": "length", "length": len(_WORDS)},
        "prompt_tokens": len(_PROMPT_IDS),
        "completion_tokens": len(_WORDS),
        "cached_tokens": 0,
    }
    if body.get("return_logprob"):
        meta |= {"input_token_logprobs": [[-0.5, 1, None]], "output_token_logprobs": [[-0.5, 10, None]]}
    several = answers(body)
    text_member = {"text": "".join(_WORDS), "output_ids": [10, 11], "meta_info": meta}
    if body.get("stream"):
        chunks = [text_member] if several == 1 else [{**text_member, "index": index} for index in range(several)]
        return Answer(events=[*map(json.dumps, chunks), "[DONE]"])
    return Answer(payload=text_member if several == 1 else [text_member] * several)


_PATIENCE_SECONDS = 2.0
ENGINE_ID = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it arrived. Header names are in lower case."""

    role: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: JSON, or the events of a stream."""

    status: int = 200
    payload: object = None
    events: Sequence[str] | None = None


class ProtocolViolation(Exception):
    """A request that violates the protocol."""


class EngineProtocol(Protocol):
    """The answers of both engines of a protocol."""

    async def prefill(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        """Answer as the prefiller. Raises ProtocolViolation."""

    async def decode(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        """Answer as the decoder. Raises ProtocolViolation."""


class Pull:
    """vLLM's NixlConnector: the prefiller's answer locates the KV, and each is fetched once."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._kept: set[str] = set()

    async def prefill(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        params = body.get("kv_transfer_params") or {}
        _require(params.get("do_remote_decode") is True, "the prefiller is not asked to keep its KV")
        _require_one_token(body)
        kept = f"chatcmpl-{request.headers.get('x-request-id')}-{next(self._numbers)}"
        self._kept.add(kept)
        where = {"remote_engine_id": ENGINE_ID, "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], **where}
        return answer(request.path, body, {**params, "remote_request_id": kept})

    async def decode(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        kept = (body.get("kv_transfer_params") or {}).get("remote_request_id")
        _require(kept in self._kept, "the decoder gets KV parameters that are unknown or used already")
        self._kept.discard(str(kept))
        return answer(request.path, body)


class MeetingProtocol:
    """Protocols in which the engines meet by a key that both requests have."""

    def __init__(self) -> None:
        self._arrived: defaultdict[tuple[str, Any], asyncio.Event] = defaultdict(asyncio.Event)

    async def _meet(self, role: str, other: str, key: Any) -> None:
        _require(not self._arrived[role, key].is_set(), f"the key of a {role} was used before")
        self._arrived[role, key].set()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._arrived[other, key].wait()
        except TimeoutError:
            raise ProtocolViolation(f"a {role} waits for a {other} that does not arrive") from None


class Bootstrap(MeetingProtocol):
    """SGLang: both get the same body, with the room in which they meet.

    A list of prompts needs a room each. A single number stands for itself and its successors.
    """

    async def prefill(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        return await self._answer("prefill", "decode", request, body)

    async def decode(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        return await self._answer("decode", "prefill", request, body)

    async def _answer(self, role: str, other: str, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        rooms = body.get("bootstrap_room")
        if not isinstance(rooms, list):
            rooms = [rooms]
        _require(all(isinstance(room, int) and 0 < room < 2**63 for room in rooms), f"a {role} gets no room")
        several = answers(body)
        _require(len(rooms) in (1, prompts(body), several), f"a {role} gets {len(rooms)} rooms for {several} answers")
        _require(bool(body.get("bootstrap_host")), f"a {role} gets no bootstrap_host")
        await self._meet(role, other, tuple(rooms))
        return answer(request.path, body)


class Push(MeetingProtocol):
    """vLLM's MooncakeConnector: both get the id of a transfer, and the decoder waits for the prefiller.

    The prefiller answers when it has prefilled, and sends its KV when the decoder requests it.
    """

    async def prefill(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        params = body.get("kv_transfer_params") or {}
        _require(params.get("do_remote_decode") is True, "the prefiller is not asked to send its KV")
        _require_one_token(body)
        self._arrived["prefill", params.get("transfer_id")].set()
        return answer(request.path, body)

    async def decode(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        params = body.get("kv_transfer_params") or {}
        _require(params.get("do_remote_prefill") is True, "the decoder gets no do_remote_prefill")
        _require(params.get("remote_engine_id") == ENGINE_ID, "the decoder gets another engine id than the prefiller's")
        await self._meet("decode", "prefill", params.get("transfer_id"))
        return answer(request.path, body)


class Layerwise(MeetingProtocol):
    """vLLM-Ascend's MooncakeLayerwiseConnector: the decoder is first, and reports where the prefiller may write."""

    async def prefill(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        params = body.get("kv_transfer_params") or {}
        _require("remote_cached_tokens" in params, "the prefiller does not get the decoder's parameters")
        _require_one_token(body)
        external = params.get("request_id")
        _require(external in _external_ids(request, body), "a prefiller's X-Request-Id is not that of the decoder")
        for each in _external_ids(request, body):
            self._arrived["prefill", each].set()
        return answer(request.path, body, {})

    async def decode(self, request: EngineRequest, body: Mapping[str, Any]) -> Answer:
        url = (body.get("kv_transfer_params") or {}).get("metaserver")
        _require(isinstance(url, str), "the decoder gets no metaserver")
        requests = _external_ids(request, body)
        await asyncio.gather(*(_call_metaserver(str(url), each) for each in requests))
        await asyncio.gather(*(self._meet("decode", "prefill", each) for each in requests))
        return answer(request.path, body)


def _external_ids(request: EngineRequest, body: Mapping[str, Any]) -> list[str]:
    """Return vLLM's ids of the requests of a body."""
    given = request.headers.get("x-request-id")
    if request.path == CHAT:
        return [f"chatcmpl-{given}"]
    return [f"cmpl-{given}-{index}" for index in range(prompts(body))]


async def _call_metaserver(url: str, external: str) -> None:
    """Post what vLLM-Ascend's decoder posts to the metaserver. It ignores the answer."""
    where = {"remote_engine_id": ENGINE_ID, "remote_host": "127.0.0.1", "remote_port": 30100}
    sizes = {"remote_tp_size": 1, "remote_pcp_size": 1, "remote_dcp_size": 1, "remote_cached_tokens": 0}
    blocks = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1]],
        "remote_block_size": [128],
    }
    body = json.dumps({"token_ids": [], "request_id": external, **blocks, **where, **sizes}).encode()
    await asyncio.to_thread(fetch, url, body)


def _require_one_token(body: Mapping[str, Any]) -> None:
    _require(body.get("max_tokens") == 1 and not body.get("stream"), "the prefiller is asked for more than one token")
    _require((body.get("min_tokens") or 0) <= 1, "a prefiller gets min_tokens above max_tokens")
    _require(not body.get("stream_options"), "a prefiller gets stream_options without stream")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolViolation(otherwise)


_LARGEST_BODY = 64 << 20
_GENERATION = (CHAT, COMPLETIONS, GENERATE)
# Answers to requests about the engine. Other paths get an empty object.
_FACTS: Mapping[str, Any] = {
    "/version": {"version": "0.33.0"},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]},
    "/query": {"0": {"engine_id": ENGINE_ID, "worker_addr": {}}},
}


@dataclass(slots=True)
class Engines:
    """Both engines. `bootstrap_port`: of the prefiller's transfer engine."""

    prefill_port: int
    decode_port: int
    bootstrap_port: int
    _requests: list[EngineRequest] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)

    def take(self) -> tuple[list[EngineRequest], list[str]]:
        """Return the requests since the last call in the order of arrival, and their problems."""
        taken = self._requests, self._problems
        self._requests, self._problems = [], []
        return taken

    async def answer(self, protocol: EngineProtocol, request: EngineRequest) -> Answer:
        """Answer a request, and record it if it generates tokens."""
        if request.method != "POST" or request.path not in _GENERATION:
            return Answer(payload=_FACTS.get(request.path, {}))
        self._requests.append(request)
        try:
            body = json.loads(request.body)
            return await (protocol.prefill if request.role == "prefill" else protocol.decode)(request, body)
        except (ProtocolViolation, ValueError) as error:
            self._problems.append(str(error))
            return Answer(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})


@contextmanager
def running(protocol: EngineProtocol) -> Iterator[Engines]:
    """Run both engines in a thread."""
    prefill_port, decode_port, bootstrap_port = free_ports(3)
    engines = Engines(prefill_port, decode_port, bootstrap_port)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runners = asyncio.run_coroutine_threadsafe(_serve(engines, protocol), loop).result()
        yield engines
        asyncio.run_coroutine_threadsafe(_end(runners), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(engines: Engines, protocol: EngineProtocol) -> list[web.AppRunner]:
    runners = []
    ports = {engines.prefill_port: "prefill", engines.decode_port: "decode", engines.bootstrap_port: "bootstrap"}
    for port, role in ports.items():
        application = web.Application(client_max_size=_LARGEST_BODY)
        application.router.add_route("*", "/{path:.*}", partial(_handle, engines, protocol, role))
        runners.append(web.AppRunner(application, access_log=None, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], HOST, port).start()
    return runners


async def _handle(engines: Engines, protocol: EngineProtocol, role: str, received: web.Request) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in received.headers.items()}
    request = EngineRequest(role, received.method, received.path, headers, await received.read())
    answer = await engines.answer(protocol, request)
    if answer.events is None:
        return web.json_response(answer.payload, status=answer.status)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(received)
    for event in answer.events:
        await response.write(f"data: {event}\n\n".encode())
    return response


async def _end(runners: list[web.AppRunner]) -> None:
    for runner in runners:
        await runner.cleanup()
