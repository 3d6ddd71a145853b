"""Canaries in a running gateway: one after the other through all pairs, again and again, counted and told quietly.

Live traffic tells only of pairs that it takes, and never whether the KV cache arrived undamaged. One worker does this
for all. A canary is a request like any other to pools and engines, so it counts as one for health and the quarantine of
pairs; but it waits in no queue and has no line in the access log.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.balancer.handoff_verdicts import HandoffVerdict
from proxy.balancer.incompatibilities import NO_KV_PARAMS
from proxy.common.background import Background, BackgroundOwner
from proxy.fleet.canary.canary import Canary
from proxy.fleet.canary.compare import Agreement, agreement
from proxy.fleet.canary.prompt import CanaryPrompt, prompt_bytes
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.health import Health
    from proxy.common.backend import Backend
    from proxy.connectors.base import Connector, ConnectorContext
    from proxy.fleet.canary.canary import CanaryResult
    from proxy.settings import Settings

logger = logging.getLogger("proxy.canary.watch")

Pair = tuple["Backend", "Backend"]


class CanaryOutcome(StrEnum):
    """What a canary has shown. The values are metric labels."""

    TRANSFERRED = "transferred"
    UNKNOWN = "unknown"
    """It was answered, and the engines do not tell whether the KV cache was fetched."""
    COMPUTED = "computed"
    DIFFERS = "differs"
    """The answer is not that of the decoder alone."""
    FAILED = "failed"
    BUSY = "busy"
    """An engine had no room for it."""


_BAD = frozenset({CanaryOutcome.COMPUTED, CanaryOutcome.DIFFERS, CanaryOutcome.FAILED})


@dataclass(slots=True)
class _Round:
    """What the canaries of one interval have in common."""

    prompts: dict[tuple[str, int], CanaryPrompt] = field(default_factory=dict)
    """By model and length in bytes."""
    alone: dict[tuple[Backend, CanaryPrompt], CanaryResult | None] = field(default_factory=dict)
    """What each decoder alone has come to."""


class CanaryWatch(BackgroundOwner):
    """`async with` it. It sends nothing while `doctor.every_seconds` is 0."""

    def __init__(self, connector: Connector, context: ConnectorContext, health: Health) -> None:
        self._connector = connector
        self._context = context
        self._health = health
        self._changed = asyncio.Event()
        self._every_seconds = context.settings.doctor.every_seconds
        self._told: set[Pair] = set()
        """The pairs of which it is known in the log that something is wrong."""
        self._background = Background(logger, "a canary")

    def _begin(self) -> None:
        self._background.keep(self._keep_sending, "canaries", self._context.metrics.background_restarts_total)

    def configure(self, settings: Settings) -> None:
        """Take changed settings. A changed interval begins at once."""
        if settings.doctor.every_seconds != self._every_seconds:
            self._every_seconds = settings.doctor.every_seconds
            self._changed.set()

    async def _keep_sending(self) -> None:
        while True:
            self._changed.clear()
            if self._every_seconds:
                await self._round(self._pairs())
            else:
                await self._changed.wait()

    def _pairs(self) -> Sequence[Pair]:
        pools = self._context.pools
        if not self._context.settings.connector_traits.takes_prefillers:
            return ()
        return [(prefiller, decoder) for decoder in pools.decode.eligible() for prefiller in pools.prefill.eligible()]

    async def _round(self, pairs: Sequence[Pair]) -> None:
        """A canary for each pair, spread over the interval; what has changed ends it."""
        self._told = {(prefiller, decoder) for prefiller, decoder in self._told if self._is_member(prefiller, decoder)}
        known = _Round()
        for number in range(max(1, len(pairs))):
            try:
                async with asyncio.timeout(self._every_seconds / max(1, len(pairs))):
                    await self._changed.wait()
                    return
            except TimeoutError:
                pass
            if number < len(pairs):
                await self._send(pairs[number], known)

    def _is_member(self, prefiller: Backend, decoder: Backend) -> bool:
        pools = self._context.pools
        return prefiller in pools.prefill.backends() and decoder in pools.decode.backends()

    async def _send(self, pair: Pair, known: _Round) -> None:
        """One canary, and one to the decoder alone if it had none of this prompt."""
        facts = [self._health.of(backend).facts for backend in pair]
        told = _common(facts)
        if told is None or not all(
            self._context.pools.of(backend.role).health.of(backend).is_healthy for backend in pair
        ):
            return
        settings = self._context.settings
        model, lengths = told
        tokens = max(settings.doctor.canary_tokens, settings.kv.prefill_min_tokens)
        size = prompt_bytes(tokens, settings.cost.bytes_per_token, lengths)
        prompt = known.prompts.setdefault((model, size), CanaryPrompt.of(model, size))
        canary = Canary(self._connector, self._context, prompt, settings.doctor.canary_seconds)
        prefiller, decoder = pair
        result = await canary.hand_over(prefiller, decoder)
        if not result.problem and (decoder, prompt) not in known.alone:
            known.alone[decoder, prompt] = await canary.alone(decoder)
        outcome = outcome_of(result, known.alone.get((decoder, prompt)))
        self._context.metrics.canaries_total.labels(outcome.value).inc()
        self._tell(pair, outcome, result)

    def _tell(self, pair: Pair, outcome: CanaryOutcome, result: CanaryResult) -> None:
        """One line for a pair that turns out bad, and one when it is well again."""
        prefiller, decoder = (backend.name for backend in pair)
        if outcome in _BAD and pair not in self._told:
            self._told.add(pair)
            line = "a canary from prefill instance %s to decode instance %s: %s"
            logger.warning(line, prefiller, decoder, _words(outcome, result), extra=logs.ALWAYS)
        elif outcome is CanaryOutcome.TRANSFERRED and pair in self._told:
            self._told.discard(pair)
            line = "canaries from prefill instance %s to decode instance %s are well again: KV is fetched"
            logger.info(line, prefiller, decoder, extra=logs.ALWAYS)


def outcome_of(result: CanaryResult, alone: CanaryResult | None) -> CanaryOutcome:
    """What a canary has shown; `alone`: that of the decoder alone, None where there is none."""
    if result.is_busy:
        return CanaryOutcome.BUSY
    if result.problem:
        return CanaryOutcome.FAILED
    if result.kv is HandoffVerdict.COMPUTED or not result.kv_handed_over:
        return CanaryOutcome.COMPUTED
    if alone is not None and not alone.problem and agreement(result.answer, alone.answer) is Agreement.DIFFERS:
        return CanaryOutcome.DIFFERS
    return CanaryOutcome(result.kv.value)


def _words(outcome: CanaryOutcome, result: CanaryResult) -> str:
    if outcome is CanaryOutcome.DIFFERS:
        return (
            "the answer is another than that of the decoder alone, so the KV cache arrives damaged: see pdproxy doctor"
        )
    if outcome is CanaryOutcome.COMPUTED and not result.kv_handed_over:
        return f"the prefiller {NO_KV_PARAMS}"
    if outcome is CanaryOutcome.COMPUTED:
        return "the decoder computes the prompt once more: see pdproxy doctor"
    blamed = "" if result.blamed is None else f"{result.blamed.role} instance {result.blamed.name} "
    return f"{blamed}{result.problem}"


def _common(facts: Sequence[EngineFacts | None]) -> tuple[str, list[int]] | None:
    """A model that all serve, and how long its sequences may be on each; None: there is none, as far as is known."""
    known = [told for told in facts if told is not None]
    models = frozenset.intersection(*(told.identity.models for told in known)) if len(known) == len(facts) else None
    if not models:
        return None
    return min(models), [told.max_model_len for told in known if told.max_model_len is not None]
