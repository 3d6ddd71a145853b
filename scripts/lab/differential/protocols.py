"""Who waits for whom in each protocol, and what is against its rules.

An engine that is not given what its protocol needs answers 400, and what was wrong is noted.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any, Protocol
from urllib.parse import urlsplit

from lab.differential.answers import answer
from lab.differential.requests import CHAT
from lab.differential.units import answers, prompts
from lab.differential.wire import Answer, Heard

_PATIENCE_SECONDS = 2.0
ENGINE_ID = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"


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
    target = urlsplit(url)
    where = {"remote_engine_id": ENGINE_ID, "remote_host": "127.0.0.1", "remote_port": 30100}
    sizes = {"remote_tp_size": 1, "remote_pcp_size": 1, "remote_dcp_size": 1, "remote_cached_tokens": 0}
    blocks = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1]],
        "remote_block_size": [128],
    }
    body = json.dumps({"token_ids": [], "request_id": external, **blocks, **where, **sizes}).encode()
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    head = f"POST {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    await reader.read()
    writer.close()


def _insist_on_one_token(asked: Mapping[str, Any]) -> None:
    _insist(asked.get("max_tokens") == 1 and not asked.get("stream"), "a prefiller is asked for more than one token")
    _insist((asked.get("min_tokens") or 0) <= 1, "a prefiller gets min_tokens above max_tokens")
    _insist(not asked.get("stream_options"), "a prefiller gets stream_options without stream")


def _insist(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AgainstTheRules(otherwise)
