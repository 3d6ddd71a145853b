"""Canaries of a running gateway, which go through all pairs of engines in turn.

Answers to clients show only the pairs that requests use, and never whether the KV cache arrived undamaged. One worker
sends the canaries of the gateway. A canary counts as a request for health and for the quarantine of pairs. It does not
wait in a queue and has no line in the access log.
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
from proxy.fleet.canary import Agreement, Canary, CanaryPrompt, agreement, prompt_bytes
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.health import Health
    from proxy.common.backend import Backend
    from proxy.connectors.base import Connector, ConnectorContext
    from proxy.fleet.canary import CanaryResult
    from proxy.settings import Settings

logger = logging.getLogger("proxy.canary.watch")

Pair = tuple["Backend", "Backend"]


class CanaryOutcome(StrEnum):
    """The outcome of a canary. The values are metric labels."""

    TRANSFERRED = "transferred"
    UNKNOWN = "unknown"
    """There was an answer, and the engines do not report whether the KV cache was fetched."""
    COMPUTED = "computed"
    DIFFERS = "differs"
    """The answer differs from that of the decoder alone."""
    FAILED = "failed"
    BUSY = "busy"
    """An engine had no room for the canary."""


_BAD = frozenset({CanaryOutcome.COMPUTED, CanaryOutcome.DIFFERS, CanaryOutcome.FAILED})


@dataclass(slots=True)
class _Round:
    """Prompts and comparisons that the canaries of one interval share."""

    prompts: dict[tuple[str, int], CanaryPrompt] = field(default_factory=dict)
    """Prompts by model and length in bytes."""
    alone: dict[tuple[Backend, CanaryPrompt], CanaryResult | None] = field(default_factory=dict)
    """Result of each decoder alone, by prompt; None: decoders of this protocol cannot answer alone."""


class CanaryWatch(BackgroundOwner):
    """Sends canaries inside `async with`, unless `doctor.every_seconds` is 0."""

    def __init__(self, connector: Connector, context: ConnectorContext, health: Health) -> None:
        self._connector = connector
        self._context = context
        self._health = health
        self._changed = asyncio.Event()
        self._every_seconds = context.settings.doctor.every_seconds
        self._reported_pairs: set[Pair] = set()
        """Pairs with a warning in the log that still holds."""
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
                await self._send_round(self._pairs())
            else:
                await self._changed.wait()

    def _pairs(self) -> Sequence[Pair]:
        pools = self._context.pools
        if not self._context.settings.connector_traits.takes_prefillers:
            return ()
        return [(prefiller, decoder) for decoder in pools.decode.eligible() for prefiller in pools.prefill.eligible()]

    async def _send_round(self, pairs: Sequence[Pair]) -> None:
        """Send a canary through each pair, spread over the interval, until a reload changes the interval."""
        self._reported_pairs = {pair for pair in self._reported_pairs if self._is_member(*pair)}
        current = _Round()
        for number in range(max(1, len(pairs))):
            try:
                async with asyncio.timeout(self._every_seconds / max(1, len(pairs))):
                    await self._changed.wait()
                    return
            except TimeoutError:
                pass
            if number < len(pairs):
                await self._send(pairs[number], current)

    def _is_member(self, prefiller: Backend, decoder: Backend) -> bool:
        pools = self._context.pools
        return prefiller in pools.prefill.backends() and decoder in pools.decode.backends()

    async def _send(self, pair: Pair, current: _Round) -> None:
        """Send a canary through a pair, and one to the decoder alone if it has not answered this prompt alone."""
        common = _common_model([self._health.of(backend).facts for backend in pair])
        if common is None or not all(self._health.of(backend).is_healthy for backend in pair):
            return
        settings = self._context.settings
        model, lengths = common
        tokens = max(settings.doctor.canary_tokens, settings.kv.prefill_min_tokens)
        size = prompt_bytes(tokens, settings.cost.bytes_per_token, lengths)
        prompt = current.prompts.setdefault((model, size), CanaryPrompt.of(model, size))
        canary = Canary(self._connector, self._context, prompt, settings.doctor.canary_seconds)
        prefiller, decoder = pair
        result = await canary.check_pair(prefiller, decoder)
        if not result.problem and (decoder, prompt) not in current.alone:
            current.alone[decoder, prompt] = await canary.check_decoder(decoder)
        outcome = outcome_of(result, current.alone.get((decoder, prompt)))
        self._context.metrics.canaries_total.labels(outcome.value).inc()
        self._log(pair, outcome, result)

    def _log(self, pair: Pair, outcome: CanaryOutcome, result: CanaryResult) -> None:
        """Log one line when a pair becomes bad, and one when it is good again."""
        prefiller, decoder = (backend.name for backend in pair)
        if outcome in _BAD and pair not in self._reported_pairs:
            self._reported_pairs.add(pair)
            line = "canary: bad pair: %s; prefill instance %s, decode instance %s"
            logger.warning(line, _description(outcome, result), prefiller, decoder, extra=logs.ALWAYS)
        elif outcome is CanaryOutcome.TRANSFERRED and pair in self._reported_pairs:
            self._reported_pairs.discard(pair)
            line = "canary: pair is good again: KV is fetched; prefill instance %s, decode instance %s"
            logger.info(line, prefiller, decoder, extra=logs.ALWAYS)


def outcome_of(result: CanaryResult, alone: CanaryResult | None) -> CanaryOutcome:
    """Return the outcome of a canary. `alone`: result of the decoder alone; None if there is none."""
    if result.is_busy:
        return CanaryOutcome.BUSY
    if result.problem:
        return CanaryOutcome.FAILED
    if result.kv is HandoffVerdict.COMPUTED or not result.kv_handed_over:
        return CanaryOutcome.COMPUTED
    if alone is not None and not alone.problem and agreement(result.answer, alone.answer) is Agreement.DIFFERS:
        return CanaryOutcome.DIFFERS
    return CanaryOutcome(result.kv.value)


def _description(outcome: CanaryOutcome, result: CanaryResult) -> str:
    if outcome is CanaryOutcome.DIFFERS:
        return "the answer differs from that of the decoder alone, so the KV cache arrives damaged; see pdproxy doctor"
    if outcome is CanaryOutcome.COMPUTED and not result.kv_handed_over:
        return f"the prefiller {NO_KV_PARAMS}"
    if outcome is CanaryOutcome.COMPUTED:
        return "the decoder computes the prompt again; see pdproxy doctor"
    blamed = "" if result.blamed is None else f"{result.blamed.role} instance {result.blamed.name} "
    return f"{blamed}{result.problem}"


def _common_model(facts: Sequence[EngineFacts | None]) -> tuple[str, list[int]] | None:
    """Return a model that all engines serve, with the known limits of its sequences in tokens; None if there is none.

    Facts None: not known yet, so there is no common model.
    """
    known = [each for each in facts if each is not None]
    models = frozenset.intersection(*(each.identity.models for each in known)) if len(known) == len(facts) else None
    if not models:
        return None
    return min(models), [each.max_model_len for each in known if each.max_model_len is not None]
