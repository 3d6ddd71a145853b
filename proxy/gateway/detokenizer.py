"""Converts between text and token ids by the engines' tokenizer, because the gateway has none.

A query is no load for the engine, and does not affect its health. An API server can detokenize while its engine hangs,
and an engine can serve well while its API server cannot detokenize.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.balancer.engines import KIMI_REASONING, KIMI_TOOLS, LENGTH_BESIDE_TOOL_CALLS, TOKEN_IDS
from proxy.common.errors import NoBackendAvailable, UpstreamError
from proxy.dialects.grammars import GRAMMARS, PROMPT_TAIL_TOKENS, recognise_grammar
from proxy.resume.chat_as_completion import ChatPrompt, can_translate_to_completion
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
_MAX_ENGINES: Final = 2
_STREAM_MEMBERS: Final = ("stream", "stream_options")


class Detokenizer:
    """Queries prefillers, or decoders if no prefiller is left, because API servers of decoders are busy."""

    def __init__(self, pools: Pools, upstream: Upstream, timeout_seconds: float = 5.0) -> None:
        """`timeout_seconds`: for one engine, including the connection."""
        self._pools = (pools.prefill, pools.decode)
        self._upstream = upstream
        self._timeout_seconds = timeout_seconds

    async def text_of_ids(
        self, model: str | None, token_ids: Sequence[int] | bytes, headers: Mapping[str, str]
    ) -> str | None:
        """Return the text of token ids, or None if no engine answers. Raises no errors of engines.

        The text includes special tokens. An incomplete character is U+FFFD.

        Args:
            model: The name of the model. None: the engine's default.
            token_ids: The token ids, or their JSON array as bytes.
            headers: The client's headers for engines.
        """
        # SGLang needs the member to show special tokens. vLLM always shows them, and ignores the member.
        members: dict[str, Any] = {"skip_special_tokens": False} | ({} if model is None else {"model": model})
        body = orjson.dumps(
            {**members, "tokens": orjson.Fragment(token_ids) if isinstance(token_ids, bytes) else list(token_ids)}
        )
        text = await self._query_engines(_PATH, body, headers, ("prompt", "text"))
        return text if isinstance(text, str) else None

    async def ids_of_text(self, model: str | None, text: str, headers: Mapping[str, str]) -> list[int] | None:
        """Return the token ids of a prompt, or None if no engine answers. Raises no errors of engines."""
        members: dict[str, Any] = {} if model is None else {"model": model}
        body = dumps({**members, "prompt": text})
        tokens = await self._query_engines(_TOKENIZE_PATH, body, headers, ("tokens",))
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None

    async def ids_of_chat(self, call: Call) -> list[int] | None:
        """Return the token ids of the prompt that engines render from a chat, or None if no engine answers."""
        body = call.make_body(dict.fromkeys(_STREAM_MEMBERS, REMOVED))  # engines reject queries with these members
        tokens = await self._query_engines(_TOKENIZE_PATH, body, call.headers, ("tokens",))
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None

    async def _query_engines(
        self, path: str, body: Body, headers: Mapping[str, str], member_names: Sequence[str]
    ) -> Any:
        """Return the first of these members that an engine's answer has, or None if no engine sends one."""
        avoid: set[Backend] = set()
        while len(avoid) < _MAX_ENGINES and (backend := self._choose_engine(avoid)) is not None:
            answer = await self._query_engine(backend, path, body, headers)
            for name in member_names:
                if answer.get(name) is not None:
                    return answer[name]
            avoid.add(backend)
        return None

    def _choose_engine(self, avoided_backends: Set[Backend]) -> Backend | None:
        """Choose a backend without a lease, because there is no load and no outcome to report."""
        for pool in self._pools:
            try:
                return pool.pick_backend(avoided_backends)
            except NoBackendAvailable:
                continue
        return None

    async def _query_engine(
        self, backend: Backend, path: str, body: Body, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Send one query, and return the answer, which is empty after an error.

        For `/detokenize`, vLLM answers with `{"prompt": text}` and SGLang with `{"text": text}`. For `/tokenize`, both
        answer with `{"tokens": ids}`.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response, raw = await self._upstream.post_and_read_body(
                    backend, path, body, headers, answer_seconds=self._timeout_seconds, resend_if_stale=True
                )
            answer = loads(raw) if response.status == 200 else None
        except (UpstreamError, TimeoutError, ValueError):  # ValueError: invalid JSON, or an invalid host name
            return {}
        return answer if isinstance(answer, dict) else {}


logger = logging.getLogger("proxy.flow.chat_prompts")

# A chat is rendered before there is room for the request, which may still be rejected. So the load is limited.
_MAX_AT_A_TIME: Final = 16


class ChatPrompts:
    """Lets engines render chats, with two queries for each: the prompt's token ids, and the text of the last ones."""

    def __init__(self, abilities: CommonAbilities, detokenizer: Detokenizer) -> None:
        self._abilities = abilities
        self._detokenizer = detokenizer
        self._rendering_count = 0
        """The number of chats that are being rendered."""
        self._logged_reasons: set[str] = set()
        """The reasons that were logged."""

    async def make_chat_prompt(self, call: Call, sampling_options: Sequence[str]) -> ChatPrompt | None:
        """Return the prompt of a chat that engines get as a completion, or None if they get the chat.

        A warning gives the reason once, unless the reason is the request. `sampling_options`: see
        `sglang.chat_sampling`.
        """
        engine, has = self._abilities.common_engine, self._abilities.have_all
        if engine is None or not can_translate_to_completion(engine, call):
            return None
        if not (has(TOKEN_IDS) and has(KIMI_TOOLS)):
            self._log_once("not all engines are SGLang >= 0.5.17 with --tool-call-parser kimi_k2")
            return None
        if self._rendering_count >= _MAX_AT_A_TIME:
            self._log_once(f"engines are rendering {self._rendering_count} other chats")
            return None
        self._rendering_count += 1
        try:
            return await self._render_chat(engine, call, sampling_options)
        finally:
            self._rendering_count -= 1

    async def _render_chat(self, engine: Engine, call: Call, sampling: Sequence[str]) -> ChatPrompt | None:
        has = self._abilities.have_all
        ids = await self._detokenizer.ids_of_chat(call)
        if ids is None:
            return None  # no engine answers, or the request is wrong, which the engine will report
        raw_ids = orjson.dumps(ids)
        grammar = recognise_grammar(raw_ids)
        if grammar not in GRAMMARS:
            self._log_once("the prompts are not those of Kimi K2")
            return None
        tail = await self._detokenizer.text_of_ids(call.values.get("model"), ids[-PROMPT_TAIL_TOKENS:], call.headers)
        room = (self._abilities.max_model_len() or 0) - len(ids)
        if tail is None or room <= 0:
            return None
        in_reasoning = bool(grammar.begins_with_reasoning(tail))
        if in_reasoning and not has(KIMI_REASONING):
            self._log_once("chats begin with reasoning, and not all engines have --reasoning-parser kimi_k2")
            return None
        return ChatPrompt(
            engine,
            raw_ids,
            len(ids),
            room,
            _numeric_options(sampling),
            grammar,
            in_reasoning=in_reasoning,
            keeps_length=has(LENGTH_BESIDE_TOOL_CALLS),
        )

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            logger.warning("sglang.chat_sampling: no effect on chats that cannot be sent as completions: %s", reason)


def _numeric_options(sampling_options: Sequence[str]) -> Mapping[str, float]:
    """Return the numbers in the setting by name. Whole numbers are int, as `top_k` must be."""
    pairs = (item.partition("=") for item in sampling_options)
    return {name: int(value) if (value := float(number)).is_integer() else value for name, _, number in pairs}
