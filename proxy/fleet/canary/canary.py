"""Sends canaries: through a pair of engines by the connector, or to one decoder alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.common.terms import Stage
from proxy.dialects.openai import Completions
from proxy.dialects.requests import read
from proxy.fleet.canary.compare import by_counters, by_usage
from proxy.fleet.canary.reading import CanaryReader
from proxy.fleet.inspector.scraping import scrape
from proxy.observe.timeline import Timeline
from proxy.wire.exposition import parse_prompt_tokens
from proxy.wire.usage import told_of_prompt

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.connectors.base import Connector, ConnectorContext
    from proxy.connectors.legs import Attempt
    from proxy.dialects.call import Call
    from proxy.fleet.canary.prompt import CanaryPrompt
    from proxy.wire.exposition import PromptTokens

# vLLM counts a prompt with its first token; SGLang, and several API servers, a moment later.
_COUNTED_SECONDS: Final = (0.0, 0.1, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """What became of one. `prefiller` None: the decoder was asked alone."""

    prefiller: Backend | None
    decoder: Backend
    problem: str = ""
    """Why it was not answered, as what the blamed one did, if there is one, and without a word of an engine's own;
    empty: it was."""
    failure: Failure | None = None
    """What kind of problem it was, if an engine had it."""
    blamed: Backend | None = None
    """Which engine had it."""
    is_busy: bool = False
    """The problem is that there was no room for it, or no instance to take it."""
    kv: HandoffVerdict = HandoffVerdict.UNKNOWN
    kv_handed_over: bool = True
    """False: the prefiller's answer named nothing to fetch, so the decoder was left alone."""
    prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    """From the prefiller's answer, where the legs come one after the other, to the decoder's first token; None: there
    was none."""
    seconds: float = 0.0
    """All of it."""
    prompt_tokens: int | None = None
    """As the prefiller counts them; None: it does not tell."""
    decoder_prompt_tokens: int | None = None
    answer: tuple[int, ...] | str = field(default="", repr=False)
    """Token ids, or text where none are told."""


class Canary:
    """Sends one prompt as often as it is told to, each time for at most so many seconds."""

    def __init__(self, connector: Connector, context: ConnectorContext, prompt: CanaryPrompt, seconds: float) -> None:
        self._connector = connector
        self._context = context
        self._prompt = prompt
        self._seconds = seconds

    async def hand_over(self, prefiller: Backend, decoder: Backend) -> CanaryResult:
        """Have this pair of engines serve the prompt, and judge whether the KV cache arrived. That an engine failed, or
        took too long, is the result's `problem`.
        """
        traits = self._context.settings.connector_traits
        before = await self._counters(decoder)
        call, request, timeline = self._call(prefiller, decoder)
        opening = self._connector.open(call, request, timeline)
        result, usage = await self._send(opening, timeline, CanaryResult(prefiller=prefiller, decoder=decoder))
        tokens = result.decoder_prompt_tokens or result.prompt_tokens
        if result.problem or not result.kv_handed_over or tokens is None:
            return result
        kv = HandoffVerdict.UNKNOWN
        if not traits.has_sglang_routes:  # SGLang's decoders tell what their prefillers had cached
            kv = by_usage(told_of_prompt(usage)[1], tokens)
        if kv is HandoffVerdict.UNKNOWN and before is not None:
            kv = await self._counted(decoder, before, tokens, from_store=traits.is_store)
        return replace(result, kv=kv)

    async def alone(self, decoder: Backend) -> CanaryResult | None:
        """Have the decoder compute the prompt and write the answer by itself. None: no decoder of this protocol can."""
        call, request, timeline = self._call(None, decoder)
        opening = self._connector.alone(call, request, timeline)
        if opening is None:
            return None
        return (await self._send(opening, timeline, CanaryResult(prefiller=None, decoder=decoder)))[0]

    def _call(self, prefiller: Backend | None, decoder: Backend) -> tuple[Call, PickRequest, Timeline]:
        """A request that nobody else can be chosen for."""
        call = Completions().parse(read(orjson.dumps(self._prompt.body())), self._context.settings.cost, {})
        pools = self._context.pools
        others = {*pools.prefill.backends(), *pools.decode.backends()}.difference({prefiller, decoder})
        return call, call.pick_request(avoid=others, prefer=prefiller), Timeline()

    async def _send(
        self, opening: AbstractAsyncContextManager[Attempt], timeline: Timeline, result: CanaryResult
    ) -> tuple[CanaryResult, Any]:
        """What became of it, and what the decoder tells of the tokens."""
        began = timeline.clock()
        reader = None
        try:
            async with asyncio.timeout(self._seconds), opening as attempt:
                reader = CanaryReader(attempt)
                await reader.read(self._context.settings.timeouts)
        except TimeoutError:
            blamed = result.prefiller if timeline.stage is Stage.PREFILL else result.decoder
            problem = f"did not answer within {self._seconds:g} s"
            result = replace(result, problem=problem, failure=Failure.TIMEOUT, blamed=blamed)
        except UpstreamError as error:
            is_busy = error.is_backpressure or (reader is not None and reader.is_preempted)
            problem = error.message.removeprefix(f"{error.backend.role.value} instance: ")
            result = replace(result, problem=problem, failure=error.failure, blamed=error.backend, is_busy=is_busy)
        except NoBackendAvailable as error:
            result = replace(result, problem=error.message, is_busy=True)
        timeline.leave()
        usage = None if reader is None else reader.usage
        return replace(result, **_measured(timeline, began), **_told(timeline, usage, reader)), usage

    async def _counters(self, decoder: Backend) -> PromptTokens | None:
        exposition = await scrape(self._context.client, self._context.keys, decoder)
        return None if exposition is None else parse_prompt_tokens(exposition)

    async def _counted(
        self, decoder: Backend, before: PromptTokens, tokens: int, *, from_store: bool
    ) -> HandoffVerdict:
        for pause_seconds in _COUNTED_SECONDS:
            await asyncio.sleep(pause_seconds)
            verdict = by_counters(before, await self._counters(decoder), tokens, from_store=from_store)
            if verdict is not None:
                return verdict
        return HandoffVerdict.UNKNOWN


def _measured(timeline: Timeline, began: float) -> dict[str, Any]:
    seconds = timeline.seconds
    return {
        "prefill_seconds": seconds.get(Stage.PREFILL),
        "first_token_seconds": (
            seconds.get(Stage.HANDOFF, 0.0) + seconds.get(Stage.FIRST_TOKEN, 0.0) if Stage.STREAM in seconds else None
        ),
        "seconds": timeline.clock() - began,
    }


def _told(timeline: Timeline, usage: Any, reader: CanaryReader | None) -> dict[str, Any]:
    return {
        "kv_handed_over": timeline.kv != "local",
        "prompt_tokens": timeline.usage.prompt_tokens,
        "decoder_prompt_tokens": told_of_prompt(usage)[0],
        "answer": "" if reader is None else tuple(reader.token_ids) or reader.text,
    }
