"""Who waits for whom in each protocol, and what is against its rules.

An engine that is not given what its protocol needs answers 400, and what was wrong is noted.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any, Protocol

from lab.common.processes import fetch
from lab.differential.requests import CHAT, GENERATE

_PROMPTS = ("prompt", "text", "input_ids")
# Members of a body that have a list with an entry for each prompt, or for each answer.
_LISTS = ("sampling_params", "image_data", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_NO_SEED = -1


def prompts(asked: Mapping[str, Any]) -> int:
    """How many there are in a body."""
    listed = _listed(asked)
    return 1 if listed is None else len(asked[listed])


def answers(asked: Mapping[str, Any]) -> int:
    """How many are wanted."""
    return prompts(asked) * _samples(asked)


def is_several(asked: Mapping[str, Any]) -> bool:
    """Whether more than one answer is wanted, or it is spelled as if there were."""
    return _listed(asked) is not None or _samples(asked) > 1


def units(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The single requests."""
    listed, samples = _listed(asked), _samples(asked)
    single = {name: value for name, value in asked.items() if name not in ("n", "best_of")}
    for number, (prompt, sample) in enumerate(product(range(prompts(asked)), range(samples))):
        unit = dict(single)
        if listed is not None:
            unit[listed] = asked[listed][prompt]
        for name in _LISTS:
            if isinstance(asked.get(name), list):
                unit[name] = asked[name][number * len(asked[name]) // answers(asked)]
        if isinstance(asked.get("seed"), int) and asked["seed"] != _NO_SEED:
            unit["seed"] = asked["seed"] + sample
        if samples > 1 and "sampling_params" in unit:
            unit["sampling_params"] = {**unit["sampling_params"], "n": 1}
        yield unit


def _listed(asked: Mapping[str, Any]) -> str | None:
    """The member that is a list of prompts. A list of numbers is one prompt."""
    for name in _PROMPTS:
        value = asked.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return name
    return None


def _samples(asked: Mapping[str, Any]) -> int:
    params = asked.get("sampling_params")
    if isinstance(params, list):
        params = params[0]
    return asked.get("n") or (params or {}).get("n") or 1


_WORDS = ("Hello", " you")
_PROMPT_IDS = [1, 2, 3, 4]


def answer(path: str, asked: Mapping[str, Any], kv_params: object = None) -> Answer:
    """What a body is answered with; with `kv_params` if it is not streamed."""
    if path == GENERATE:
        return _native(asked)
    stream = _events(path, asked) if asked.get("stream") else None
    return Answer(events=stream) if stream is not None else Answer(payload=_whole(path, asked, kv_params))


def _whole(path: str, asked: Mapping[str, Any], kv_params: object) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": "".join(_WORDS)}} if path == CHAT else {"text": "".join(_WORDS)}
    )
    choices = [{"index": index, **said, "logprobs": None, "finish_reason": "length"} for index in range(answers(asked))]
    return {**_frame(path, asked, ""), "choices": choices, "usage": _usage(asked), "kv_transfer_params": kv_params}


def _events(path: str, asked: Mapping[str, Any]) -> Sequence[str]:
    frame = _frame(path, asked, ".chunk")
    ids = bool(asked.get("return_token_ids"))
    chunks: list[dict[str, Any]] = []
    for index in range(answers(asked)):
        if path == CHAT:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append({"choices": [role], **({"prompt_token_ids": _PROMPT_IDS} if ids else {})})
        for number, word in enumerate(_WORDS):
            said: dict[str, Any] = {"delta": {"content": word}} if path == CHAT else {"text": word}
            choice = {"index": index, **said, "finish_reason": "length" if word is _WORDS[-1] else None}
            if ids:
                choice["token_ids"] = [10 + number]
                if path != CHAT and number == 0:
                    choice["prompt_token_ids"] = _PROMPT_IDS
            chunks.append({"choices": [choice]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": _usage(asked)})
    return [*(json.dumps({**frame, **chunk}) for chunk in chunks), "[DONE]"]


def _frame(path: str, asked: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if path == CHAT else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1_760_000_000, "model": asked.get("model")}


def _usage(asked: Mapping[str, Any]) -> dict[str, Any]:
    read, written = len(_PROMPT_IDS) * prompts(asked), len(_WORDS) * answers(asked)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _native(asked: Mapping[str, Any]) -> Answer:
    meta: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": "length", "length": len(_WORDS)},
        "prompt_tokens": len(_PROMPT_IDS),
        "completion_tokens": len(_WORDS),
        "cached_tokens": 0,
    }
    if asked.get("return_logprob"):
        meta |= {"input_token_logprobs": [[-0.5, 1, None]], "output_token_logprobs": [[-0.5, 10, None]]}
    several = answers(asked)
    said = {"text": "".join(_WORDS), "output_ids": [10, 11], "meta_info": meta}
    if asked.get("stream"):
        chunks = [said] if several == 1 else [{**said, "index": index} for index in range(several)]
        return Answer(events=[*map(json.dumps, chunks), "[DONE]"])
    return Answer(payload=said if several == 1 else [said] * several)


_PATIENCE_SECONDS = 2.0
ENGINE_ID = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"


@dataclass(frozen=True, slots=True)
class Heard:
    """A request as it arrived. Header names are in lower case."""

    role: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """JSON, or a stream of events."""

    status: int = 200
    payload: object = None
    events: Sequence[str] | None = None


class AgainstTheRules(Exception):
    """What an engine of this protocol could not work with."""


class Hearings(Protocol):
    """Both engines of a protocol: each hears a request and says what it answers."""

    async def prefill(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        """The prefiller. Raises AgainstTheRules."""

    async def decode(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        """The decoder. Raises AgainstTheRules."""


class Pull:
    """vLLM's NixlConnector: the prefiller's answer says where the decoder finds the KV, and each is fetched once."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._kept: set[str] = set()

    async def prefill(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        params = asked.get("kv_transfer_params") or {}
        _insist(params.get("do_remote_decode") is True, "a prefiller is not asked to keep its KV")
        _insist_on_one_token(asked)
        kept = f"chatcmpl-{heard.headers.get('x-request-id')}-{next(self._numbers)}"
        self._kept.add(kept)
        where = {"remote_engine_id": ENGINE_ID, "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], **where}
        return answer(heard.path, asked, {**params, "remote_request_id": kept})

    async def decode(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        kept = (asked.get("kv_transfer_params") or {}).get("remote_request_id")
        _insist(kept in self._kept, "a decoder is sent for KV that nobody keeps, or that has been fetched")
        self._kept.discard(str(kept))
        return answer(heard.path, asked)


class Together:
    """Protocols in which the engines meet by what is in both requests."""

    def __init__(self) -> None:
        self._arrived: defaultdict[tuple[str, Any], asyncio.Event] = defaultdict(asyncio.Event)

    async def _meet(self, role: str, other: str, key: Any) -> None:
        _insist(not self._arrived[role, key].is_set(), f"the meeting point of a {role} was used before")
        self._arrived[role, key].set()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._arrived[other, key].wait()
        except TimeoutError:
            raise AgainstTheRules(f"a {role} waits for a {other} that does not come") from None


class Bootstrap(Together):
    """SGLang: the same body for both, with the room in which they meet. A list of prompts needs a room each; one number
    stands for itself and those that follow it.
    """

    async def prefill(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        return await self._answer("prefill", "decode", heard, asked)

    async def decode(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        return await self._answer("decode", "prefill", heard, asked)

    async def _answer(self, role: str, other: str, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        rooms = asked.get("bootstrap_room")
        if not isinstance(rooms, list):
            rooms = [rooms]
        _insist(all(isinstance(room, int) and 0 < room < 2**63 for room in rooms), f"a {role} gets no room")
        several = answers(asked)
        _insist(len(rooms) in (1, prompts(asked), several), f"a {role} gets {len(rooms)} rooms for {several} answers")
        _insist(bool(asked.get("bootstrap_host")), f"a {role} is not told where the prefiller is")
        await self._meet(role, other, tuple(rooms))
        return answer(heard.path, asked)


class Push(Together):
    """vLLM's MooncakeConnector: both get the number of a transfer, and the decoder waits for the prefiller. That one
    answers when it has prefilled, and sends its KV whenever the decoder asks for it.
    """

    async def prefill(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        params = asked.get("kv_transfer_params") or {}
        _insist(params.get("do_remote_decode") is True, "a prefiller is not asked to send its KV")
        _insist_on_one_token(asked)
        self._arrived["prefill", params.get("transfer_id")].set()
        return answer(heard.path, asked)

    async def decode(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        params = asked.get("kv_transfer_params") or {}
        _insist(params.get("do_remote_prefill") is True, "a decoder is not told that KV comes")
        _insist(
            params.get("remote_engine_id") == ENGINE_ID, "a decoder is told another engine than that which prefills"
        )
        await self._meet("decode", "prefill", params.get("transfer_id"))
        return answer(heard.path, asked)


class Layerwise(Together):
    """vLLM-Ascend's MooncakeLayerwiseConnector: the decoder comes first, and tells where the prefiller may write."""

    async def prefill(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        params = asked.get("kv_transfer_params") or {}
        _insist("remote_cached_tokens" in params, "a prefiller is not given what the decoder said")
        _insist_on_one_token(asked)
        external = params.get("request_id")
        _insist(external in _external_ids(heard, asked), "a prefiller's X-Request-Id is not that of the decoder")
        for each in _external_ids(heard, asked):
            self._arrived["prefill", each].set()
        return answer(heard.path, asked, {})

    async def decode(self, heard: Heard, asked: Mapping[str, Any]) -> Answer:
        url = (asked.get("kv_transfer_params") or {}).get("metaserver")
        _insist(isinstance(url, str), "a decoder is not told whom to call")
        requests = _external_ids(heard, asked)
        await asyncio.gather(*(_tell(str(url), each) for each in requests))
        await asyncio.gather(*(self._meet("decode", "prefill", each) for each in requests))
        return answer(heard.path, asked)


def _external_ids(heard: Heard, asked: Mapping[str, Any]) -> list[str]:
    """How vLLM calls the requests that it makes of a body."""
    given = heard.headers.get("x-request-id")
    if heard.path == CHAT:
        return [f"chatcmpl-{given}"]
    return [f"cmpl-{given}-{index}" for index in range(prompts(asked))]


async def _tell(url: str, external: str) -> None:
    """What vLLM-Ascend's decoder posts to the metaserver, whose answer it does not look at."""
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


def _insist_on_one_token(asked: Mapping[str, Any]) -> None:
    _insist(asked.get("max_tokens") == 1 and not asked.get("stream"), "a prefiller is asked for more than one token")
    _insist((asked.get("min_tokens") or 0) <= 1, "a prefiller gets min_tokens above max_tokens")
    _insist(not asked.get("stream_options"), "a prefiller gets stream_options without stream")


def _insist(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AgainstTheRules(otherwise)
