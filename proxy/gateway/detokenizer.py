"""What token ids mean, and text is in them: the engines' tokenizer, asked over HTTP, since the gateway has none.

Asking changes nothing for the engine that is asked. It holds no load there, and says nothing about its health: an API
server that can detokenize may stand before a hung engine, and one that cannot may serve well.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.errors import NoBackendAvailable, UpstreamError
from proxy.wire.document import REMOVED
from proxy.wire.python_json import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from proxy.balancer.pool import Pools
    from proxy.common.backend import Backend
    from proxy.dialects.call import Call
    from proxy.upstream import Upstream
    from proxy.wire.document import Body

_PATH: Final = "/detokenize"
_TOKENIZE_PATH: Final = "/tokenize"
_ENGINES_ASKED: Final = 2
_OF_THE_ANSWER: Final = ("stream", "stream_options")


class Detokenizer:
    """Asks prefillers, and decoders only where no prefiller is left: a decoder's API process is busy with streams."""

    def __init__(self, pools: Pools, upstream: Upstream, timeout_seconds: float = 5.0) -> None:
        """`timeout_seconds` is for one engine, connecting included."""
        self._pools = (pools.prefill, pools.decode)
        self._upstream = upstream
        self._timeout_seconds = timeout_seconds

    async def text(self, model: str | None, ids: Sequence[int] | bytes, headers: Mapping[str, str]) -> str | None:
        """The text of token ids, special tokens shown, an unfinished character as U+FFFD.

        `model` None: the engine's own. `ids` as bytes are a JSON array. `headers` are the client's that are passed on.
        None when no engine tells; raises nothing.
        """
        # SGLang is told to show special tokens; vLLM does in any case, and does not know the member.
        asked: dict[str, Any] = {"skip_special_tokens": False} | ({} if model is None else {"model": model})
        body = orjson.dumps({**asked, "tokens": orjson.Fragment(ids) if isinstance(ids, bytes) else list(ids)})
        text = await self._ask_some(_PATH, body, headers, ("prompt", "text"))
        return text if isinstance(text, str) else None

    async def tokens(self, model: str | None, text: str, headers: Mapping[str, str]) -> list[int] | None:
        """The token ids that engines make of a prompt. None when no engine tells; raises nothing."""
        asked: dict[str, Any] = {} if model is None else {"model": model}
        body = dumps({**asked, "prompt": text})
        tokens = await self._ask_some(_TOKENIZE_PATH, body, headers, ("tokens",))
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None

    async def chat_tokens(self, call: Call) -> list[int] | None:
        """The token ids of a chat's prompt, as engines render it. None when no engine tells; raises nothing."""
        body = call.body(dict.fromkeys(_OF_THE_ANSWER, REMOVED))  # a question that is to be streamed is refused
        tokens = await self._ask_some(_TOKENIZE_PATH, body, call.headers, ("tokens",))
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None

    async def _ask_some(self, path: str, body: Body, headers: Mapping[str, str], members: Sequence[str]) -> Any:
        """What the first engine tells that tells anything in one of these members; None: no engine does."""
        avoid: set[Backend] = set()
        while len(avoid) < _ENGINES_ASKED and (backend := self._pick(avoid)) is not None:
            told = await self._ask(backend, path, body, headers)
            for name in members:
                if told.get(name) is not None:
                    return told[name]
            avoid.add(backend)
        return None

    def _pick(self, avoid: Set[Backend]) -> Backend | None:
        """Without a lease: there is no load to hold, and no outcome to report."""
        for pool in self._pools:
            try:
                return pool.pick(avoid)
            except NoBackendAvailable:
                continue
        return None

    async def _ask(self, backend: Backend, path: str, body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
        """POST /detokenize, which vLLM answers with `{"prompt": text}` and SGLang with `{"text": text}`
        (DetokenizeResponse), or /tokenize, with `{"tokens": ids}`; nothing for anything else.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response, answer = await self._upstream.fetch(
                    backend, path, body, headers, answer_seconds=self._timeout_seconds, resend_if_stale=True
                )
            told = loads(answer) if response.status == 200 else None
        except (UpstreamError, TimeoutError, ValueError):  # ValueError: no JSON, or a name that can be no host's
            return {}
        return told if isinstance(told, dict) else {}
