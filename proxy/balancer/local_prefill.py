"""Decides which prompts decoders compute, because that is faster than a prefiller and a handoff.

These are short prompts, and long prompts that are mostly in the decoder's cache. After an answer the cache
holds the prompt and the answer, so only the tool's result is new in the next turn of an agent. The prefill time of
decoders is learned from the prompts that they compute, and the time of a handoff from handoffs.

Running answers slow down meanwhile. The policy for decoders learns by how much. On the other hand, all queued requests
gain the time of a prefiller. A decoder is chosen if all requests together gain time.

Learned times must prove themselves: decoders must compute their prompts in less time than was predicted for prefillers.
Otherwise all prompts go to prefillers for an hour.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import PendingSamples
from proxy.balancer.policies.prefill_cost import PrefillCost, RecordKind, kind_and_slot, unpacked
from proxy.balancer.policies.prefixes import CacheCount, CachedPrefixes

if TYPE_CHECKING:
    from proxy.balancer.pick import PickRequest
    from proxy.balancer.policies.prefill_cost import PromptCosts
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.backend import Backend

logger = logging.getLogger(__name__)

# Assumed cost of a running answer, as a share of the prefill time, until it is learned.
_ASSUMED_HARM: Final = 0.25
# The same for careful decisions: running answers stop.
_MAX_HARM: Final = 1.0
# Weight of a new sample in the mean time of a handoff.
_HANDOFF_STEP: Final = 0.1
# A decoder computes at most twice the tokens that one has computed faster than prefillers, and at first this many.
# The time of long prompts cannot be learned from short ones.
_FIRST_TOKENS: Final = 512.0
# If a prefill takes this number of times the prediction and cached tokens are not reported, none were cached.
_MUCH_LONGER: Final = 3.0
# Number of prompts of decoders until their own prefill times are used instead of those of prefillers.
_ENOUGH_TIMES: Final = 8
# Weight of a new sample in the mean wait for the steps of running answers.
_WAIT_STEP: Final = 0.1
# Share of a prompt's time that is its own at least, however long it has probably waited.
_MIN_OWN_SHARE: Final = 0.2
# Share of the expected cached tokens that a decoder is assumed to find until its answers show it. A prompt that finds
# less is compared as any other, so that a wrong assumption ends after some prompts.
_FIRST_TRUST: Final = 1.0
# Maximum use of a decoder's KV memory, as a share, with the prompt included.
_MAX_KV_SHARE: Final = 0.9
# Number of the last locally computed prompts that are compared, and the minimum for a verdict.
_PROOFS: Final = 32
_ENOUGH_PROOFS: Final = 8
DOUBT_SECONDS: Final = 3600.0
"""Time for which all prompts go to prefillers after decoders were not faster."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocalChoice:
    """Decision that a decoder computes a prompt without a prefiller."""

    decoder: Backend
    prompt: PromptCosts
    is_idle: bool
    """Whether the decoder writes no answers."""
    harm: float
    """Cost of the stalled answers of this decoder, as a share of the prefill time."""
    instead_seconds: float
    """Predicted time to first token with a prefiller and a handoff, and what queued requests lose meanwhile."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time of an answer's first token."""

    at: float
    """Its time on the clock of the pools."""
    seconds: float
    """Time since the request to the decoder, or with a prefiller since its response."""


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A prompt that a decoder has computed itself."""

    name: str
    """Name of the decoder."""
    uncached: float
    cached: float
    seconds: float
    choice: LocalChoice


class LocalPrefill:
    """Learned times of one worker for prompts that decoders compute."""

    def __init__(self, prefill: Pool, decode: Pool, journal: JournalWriter | None = None) -> None:
        """Create a predictor of local prefills without learned times.

        `journal`: has the cache counts of decoders. None: they publish no KV events.
        """
        self._tried_tokens = _FIRST_TOKENS / 2
        self._prefill = prefill
        self._decode = decode
        self._journal = journal
        self.cost = PrefillCost()
        """Prefill time of decoders."""
        self._step_wait = 0.0  # additional seconds of a prompt on a decoder with running answers
        self.handoff_seconds: float | None = None
        """Mean time from the end of a prefill to the first token. None: there was no handoff yet."""
        self._eligible: tuple[Backend, ...] = ()
        self._cached: dict[str, CachedPrefixes] = {}  # prefixes of the eligible decoders, by name
        context = prefill.policy.context
        self._clock = context.clock
        self._pending: PendingSamples[_Computed | float] = PendingSamples(context)
        """Prompts that decoders have computed, and handoffs in seconds."""
        self._proofs: deque[tuple[float, float]] = deque(maxlen=_PROOFS)
        """Times of the last local prompts with their harm, and the predicted times with prefillers."""
        self._doubted_until = -inf

    def faster_decoder(self, prompt: PromptCosts, max_tokens: int, *, is_careful: bool = False) -> LocalChoice | None:
        """Return the decoder that would compute a prompt in the least time, or None if prefillers are faster.

        None is also returned if times are unknown, or if the request avoids or prefers backends. Decoders at their
        saturation point or short of KV memory are not considered, and neither are those that would have to compute more
        than `max_tokens` tokens.

        `is_careful`: assume that running answers stop during a prefill, until their true harm is learned.
        """
        request = prompt.request
        self._learn()
        if request.subject is None or request.avoid or request.prefer is not None or self.handoff_seconds is None:
            return None
        soonest = self._prefill.soonest_seconds(request)
        if soonest is None or self._clock() < self._doubted_until:
            return None
        best: Backend | None = None
        best_harm, is_idle = 0.0, False
        instead = least = soonest + self.handoff_seconds + self._prefill.relief_seconds(request)
        most_tokens = min(max_tokens, 2 * self._tried_tokens)
        harm_each = self._decode.policy.append_harm
        if harm_each is None:
            harm_each = _MAX_HARM if is_careful else _ASSUMED_HARM
        for backend in self._refresh():
            streams = self._decode.scoreboard.requests(backend.slot)
            if not self._has_capacity(backend, streams, request):
                continue
            prefixes = self._cached[backend.name]
            hit = prefixes.hit(prompt.keys)
            cached = prefixes.found(prompt.ends, hit, prompt.tokens)
            # An idle decoder has no answers to stall.
            if prompt.tokens - cached > (most_tokens if streams else max_tokens):
                continue
            cached *= prefixes.trust
            seconds = self._seconds(prompt.tokens - cached, cached) * self.cost.slowness(backend.name)
            if streams:
                seconds += self._step_wait
            harm = harm_each * streams
            if seconds * (1 + harm) < least:
                best, best_harm, least, is_idle = backend, harm, seconds * (1 + harm), not streams
        if best is None:
            return None
        return LocalChoice(decoder=best, prompt=prompt, is_idle=is_idle, harm=best_harm, instead_seconds=instead)

    def note_handoff(
        self, decoder: str, prompt: PromptCosts, first_token: FirstToken | None, answer_tokens: int
    ) -> None:
        """Learn from an answer whose prompt a prefiller has computed.

        `decoder` is the name of the decoder. `first_token` counts from the prefiller's response. None: it is unknown.
        """
        if first_token is not None:
            self._pending.add(first_token.seconds, first_token.at - first_token.seconds, first_token.at)
            self._learn()
        if (prefixes := self._cached_by(decoder)) is not None:
            prefixes.use(prompt.keys, prompt.ends, prompt.tokens + answer_tokens)

    def note_local_prefill(
        self,
        decoder: str,
        choice: LocalChoice,
        first_token: FirstToken | None,
        answer_tokens: int,
        prompt_counts: tuple[int, int] | None,
    ) -> None:
        """Learn from an answer whose prompt the decoder has computed.

        Args:
            decoder: Name of the decoder.
            choice: The decision for it.
            first_token: The first token. None: it is unknown.
            answer_tokens: Length of the answer.
            prompt_counts: Tokens of the prompt, and cached tokens among these. None: they are not reported.
        """
        if (prefixes := self._cached_by(decoder)) is None:
            return
        prompt = choice.prompt
        hit = prefixes.hit(prompt.keys)
        expected = prefixes.found(prompt.ends, hit, prompt.tokens)
        predicted = self._seconds(prompt.tokens - expected, expected) * self.cost.slowness(decoder)
        if prompt_counts is None and first_token is not None and first_token.seconds > _MUCH_LONGER * predicted:
            prompt_counts = prompt.tokens, 0
        there = expected if prompt_counts is None else prompt.tokens * prompt_counts[1] / max(1, prompt_counts[0])
        odometer = prefixes.odometer
        readings = prefixes.use(prompt.keys, prompt.ends, prompt.tokens - there + answer_tokens)
        if prompt_counts is not None:
            prefixes.tell(prompt_counts[1])
        if prompt.keys:
            prefixes.learn(readings, odometer, prompt.ends, expected, there)
        tokens, cached = float(prompt.tokens), expected
        if prompt_counts is not None:
            tokens, cached = float(prompt_counts[0]), float(prompt_counts[1])
        if first_token is not None:
            computed = _Computed(decoder, tokens - cached, cached, first_token.seconds, choice)
            self._pending.add(computed, first_token.at - first_token.seconds, first_token.at)
            self._learn()

    def _learn(self) -> None:
        """Learn from the samples for which the lag of the event loop is known."""
        for sample, ended, is_timely in self._pending.settled():
            if not is_timely:
                continue
            if isinstance(sample, _Computed):
                self._take_in(sample, ended)
            else:
                before = self.handoff_seconds
                self.handoff_seconds = sample if before is None else before + _HANDOFF_STEP * (sample - before)

    def _take_in(self, computed: _Computed, ended: float) -> None:
        """Learn from a prompt that a decoder has computed, and stop using decoders if they are not faster."""
        self._learn_time(computed)
        if ended < self._doubted_until:
            return
        took, instead = computed.seconds * (1 + computed.choice.harm), computed.choice.instead_seconds
        if took < instead:
            self._tried_tokens = max(self._tried_tokens, computed.uncached)
        self._proofs.append((took, instead))
        all_took = sum([took for took, _ in self._proofs])
        all_instead = sum([instead for _, instead in self._proofs])
        if len(self._proofs) >= _ENOUGH_PROOFS and all_took >= all_instead:
            self._doubted_until = ended + DOUBT_SECONDS
            self._tried_tokens = _FIRST_TOKENS / 2
            self._proofs.clear()
            logger.warning(
                "skip_prefill: paused for an hour, all prompts go to prefillers: decoders were not faster",
                extra={"fields": {"seconds": round(all_took, 3), "prefill_seconds": round(all_instead, 3)}},
            )

    def _learn_time(self, computed: _Computed) -> None:
        """Learn the time of a prompt. A part of it is the wait for the steps of running answers."""
        name, uncached, cached, seconds = computed.name, computed.uncached, computed.cached, computed.seconds
        if not computed.choice.is_idle:
            waited = seconds - self._seconds(uncached, cached) * self.cost.slowness(name)
            self._step_wait = max(0.0, self._step_wait + _WAIT_STEP * (waited - self._step_wait))
            seconds = max(_MIN_OWN_SHARE * seconds, seconds - self._step_wait)
        self.cost.learn(name, uncached, cached, seconds)

    def _seconds(self, uncached: float, cached: float) -> float:
        """Return the predicted time of a prefill on a decoder of normal speed."""
        seconds = None
        if self.cost.samples < _ENOUGH_TIMES:
            seconds = self._prefill.policy.prefill_seconds(uncached, cached)
        return self.cost.seconds(uncached, cached) if seconds is None else seconds

    def _has_capacity(self, backend: Backend, streams: int, request: PickRequest) -> bool:
        """Return whether a decoder is below its limit and saturation point and has KV memory, as far as known."""
        decode = self._decode
        bounds = (decode.limit(backend), decode.policy.most_running(backend))
        if any(bound is not None and streams >= bound for bound in bounds):
            return False
        facts = decode.health.of(backend).facts
        if facts is None or facts.kv_tokens is None:
            return True
        return (
            decode.scoreboard.load(backend.slot).kv_tokens + request.decode.kv_tokens <= _MAX_KV_SHARE * facts.kv_tokens
        )

    def _refresh(self) -> tuple[Backend, ...]:
        """Update the prefixes of the eligible decoders, and return these. A decoder that was away has none."""
        eligible = self._decode.eligible()
        if eligible is not self._eligible:
            self._eligible, before = eligible, self._cached
            names = [backend.name for backend in eligible]
            self._cached = {name: before.get(name) or _new_prefixes() for name in names}
            for name in before.keys() - self._cached.keys():
                self.cost.forget(name)
        if self._journal is not None and self._journal.has_new_records:
            self._read_journal(self._journal)
        return eligible

    def _read_journal(self, journal: JournalWriter) -> None:
        """Apply the cache counts of decoders that the journal reports."""
        names = {backend.slot: backend.name for backend in self._eligible}
        for data in journal.new_records():
            kind, slot = kind_and_slot(data)
            if kind == RecordKind.COUNTED and slot in names:
                prefixes = self._cached[names[slot]]
                if prefixes.follow(CacheCount(*unpacked(data).numbers), computing=0.0):
                    prefixes.clear()

    def _cached_by(self, decoder: str) -> CachedPrefixes | None:
        self._refresh()
        return self._cached.get(decoder)


def _new_prefixes() -> CachedPrefixes:
    prefixes = CachedPrefixes()
    prefixes.trust = _FIRST_TRUST
    return prefixes
