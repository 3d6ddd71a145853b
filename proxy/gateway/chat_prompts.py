"""Chats whose engines tell token ids of completions alone: their prompts, so that they can be asked for as completions.

Only where operators say what chats are sampled by (`sglang.chat_sampling`), which no route of SGLang tells.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.engines.engine_facts import KIMI_REASONING, KIMI_TOOLS, LENGTH_BESIDE_TOOL_CALLS, TOKEN_IDS
from proxy.dialects.grammars import GRAMMARS, PROMPT_TAIL_TOKENS, grammar_of
from proxy.resume.chat_as_completion import ChatPrompt, may_be_completion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.call import Call
    from proxy.gateway.common_abilities import CommonAbilities
    from proxy.gateway.detokenizer import Detokenizer
    from proxy.resume.engines import Engine

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
