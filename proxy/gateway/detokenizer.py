"""What token ids mean, and text is in them: the engines' tokenizer, asked over HTTP, since the gateway has none.

Asking changes nothing for the engine that is asked. It holds no load there, and says nothing about its health: an API
server that can detokenize may stand before a hung engine, and one that cannot may serve well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.balancer.engines import KIMI_REASONING, KIMI_TOOLS, LENGTH_BESIDE_TOOL_CALLS, TOKEN_IDS
from proxy.common.errors import NoBackendAvailable, UpstreamError
from proxy.dialects.grammars import GRAMMARS, PROMPT_TAIL_TOKENS, grammar_of
from proxy.resume.chat_as_completion import ChatPrompt, may_be_completion
from proxy.wire.document import REMOVED
from proxy.wire.python_json import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from proxy.balancer.pool import Pools
    from proxy.common.backend import Backend
    from proxy.dialects.call import Call
    from proxy.gateway.common_abilities import CommonAbilities
    from proxy.resume.engines import Engine
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


logger = logging.getLogger("proxy.flow.chat_prompts")

# They are asked for before there is room for the request, which may yet be refused: so engines are not to be kept busy.
_MOST_AT_A_TIME: Final = 16


class ChatPrompts:
    """Has engines render chats, two questions for each: the prompt's token ids, and the text of their end."""

    def __init__(self, abilities: CommonAbilities, detokenizer: Detokenizer) -> None:
        self._abilities = abilities
        self._detokenizer = detokenizer
        self._asking = 0
        self._told: set[str] = set()
        """Why chats stay chats, as far as the log says it already."""

    async def of(self, call: Call, sampling: Sequence[str]) -> ChatPrompt | None:
        """None: it stays a chat, and one warning says why, if it is not for what it asks. `sampling`: the setting."""
        engine, has = self._abilities.engine, self._abilities.has
        if engine is None or not may_be_completion(engine, call):
            return None
        if not (has(TOKEN_IDS) and has(KIMI_TOOLS)):
            self._say("not all engines are SGLang from 0.5.17 on with --tool-call-parser kimi_k2")
            return None
        if self._asking >= _MOST_AT_A_TIME:
            self._say(f"engines are to render {self._asking} at the same time already")
            return None
        self._asking += 1
        try:
            return await self._rendered(engine, call, sampling)
        finally:
            self._asking -= 1

    async def _rendered(self, engine: Engine, call: Call, sampling: Sequence[str]) -> ChatPrompt | None:
        has = self._abilities.has
        ids = await self._detokenizer.chat_tokens(call)
        if ids is None:
            return None  # nobody can be asked, or the request is wrong, which the engine says in its own words
        told = orjson.dumps(ids)
        grammar = grammar_of(told)
        if grammar not in GRAMMARS:
            self._say("their prompts are not those of Kimi K2")
            return None
        tail = await self._detokenizer.text(call.values.get("model"), ids[-PROMPT_TAIL_TOKENS:], call.headers)
        room = (self._abilities.max_model_len() or 0) - len(ids)
        if tail is None or room <= 0:
            return None
        in_reasoning = bool(grammar.opens_reasoning(tail))
        if in_reasoning and not has(KIMI_REASONING):
            self._say("they begin with reasoning, and not all engines have --reasoning-parser kimi_k2")
            return None
        return ChatPrompt(
            engine,
            told,
            len(ids),
            room,
            _numbers(sampling),
            grammar,
            in_reasoning=in_reasoning,
            keeps_length=has(LENGTH_BESIDE_TOOL_CALLS),
        )

    def _say(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("sglang.chat_sampling has no effect on chats that cannot be completions here: %s", reason)


def _numbers(sampling: Sequence[str]) -> Mapping[str, float]:
    """The setting's names and numbers, whole ones as such: `top_k` must be."""
    pairs = (item.partition("=") for item in sampling)
    return {name: int(value) if (value := float(number)).is_integer() else value for name, _, number in pairs}
