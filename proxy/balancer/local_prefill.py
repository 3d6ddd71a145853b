"""Whether a decoder would have a prompt computed by itself sooner than a prefiller computes it and hands it over.

That is so for short prompts, and for long ones of which the decoder has nearly all in its cache: after an answer it
has the prompt and the answer, so that of the next turn of a loop of tool calls only the result is new to it. How long
decoders take is learned from those prompts that they were left with, how long a hand-over takes from hand-overs.

What was learned must prove itself: the decoders must take less time for the prompts that they compute than prefillers
would have taken, by the prediction at that time. Otherwise all prompts go to prefillers for an hour.
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

# Each answer that is being written there waits meanwhile: it counts as this part of what the prompt takes.
_HARM: Final = 0.25
_HANDOVER_STEP: Final = 0.1
# A decoder is not left with more than twice what one has computed sooner than prefillers would have, and at first with
# no more than this: of short prompts cannot be learned what long ones take.
_FIRST_TOKENS: Final = 512.0
# One that does not tell what was cached, and takes so many times as long as predicted, had nothing.
_MUCH_LONGER: Final = 3.0
# Up to this part of a decoder's KV memory it may be given a prompt that the policy has not sent there.
_MOST_KV: Final = 0.9
# The last prompts that decoders have computed, and the number of them that is enough for the proof.
_PROOFS: Final = 32
_ENOUGH_PROOFS: Final = 8
DOUBT_SECONDS: Final = 3600.0
"""Prompts go to prefillers for this time after decoders were not sooner."""
# A first token teaches nothing if the event loop was late by more than this, or this share of what it took, meanwhile.
_MOST_LAG_SECONDS: Final = 0.05
_MOST_LAG_SHARE: Final = 0.1
# First tokens that wait until it is known whether the loop was late.
_MAX_PENDING: Final = 256


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocalChoice:
    """A prompt that a decoder is to compute by itself."""

    decoder: Backend
    prompt: PromptCosts
    harm: float
    """The time of the answers that wait meanwhile, as a share of what the prompt takes."""
    instead_seconds: float
    """Predicted until the first token by a prefiller and a hand-over."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer."""

    at: float
    """When it came, on the clock of the pools."""
    seconds: float
    """What it took since the decoder was prompt, or since the prefiller answered."""


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A prompt that a decoder has computed."""

    name: str
    """The decoder's."""
    uncached: float
    cached: float
    seconds: float
    choice: LocalChoice


class LocalPrefill:
    """What one worker knows of it. `cost` is that of decoders."""

    def __init__(self, prefill: Pool, decode: Pool, journal: JournalWriter | None = None) -> None:
        """`journal`: where it hears what decoders tell of their caches; None: they do not."""
        self._tried_tokens = _FIRST_TOKENS / 2
        self._prefill = prefill
        self._decode = decode
        self._journal = journal
        self.cost = PrefillCost()
        self.handover_seconds: float | None = None
        """From the end of a prefill to the first token; None: none was seen."""
        self._eligible: tuple[Backend, ...] = ()
        self._cached: dict[str, CachedPrefixes] = {}  # of those, by their names
        context = prefill.policy.context
        self._clock = context.clock
        self._pending: PendingSamples[_Computed | float] = PendingSamples(
            context, most_lag_seconds=_MOST_LAG_SECONDS, most_lag_share=_MOST_LAG_SHARE, capacity=_MAX_PENDING
        )
        """Prompts that decoders have computed, and seconds of hand-overs."""
        self._proofs: deque[tuple[float, float]] = deque(maxlen=_PROOFS)
        """What these prompts took, the harm included, and what they would have taken by the prediction."""
        self._doubted_until = -inf

    def faster_decoder(self, prompt: PromptCosts, max_tokens: int) -> LocalChoice | None:
        """The decoder that would be the first to have the prompt, sooner than any prefiller; None: there is none, it is
        not known, or it is not free to choose. None of them is at its knee, or short of KV memory, or would have to
        compute more than `max_tokens` of the prompt.
        """
        request = prompt.request
        self._learn()
        if request.subject is None or request.avoid or request.prefer is not None or self.handover_seconds is None:
            return None
        soonest = self._prefill.soonest_seconds(request)
        if soonest is None or self._clock() < self._doubted_until:
            return None
        best: Backend | None = None
        best_harm = 0.0
        instead = least = soonest + self.handover_seconds
        most_tokens = min(max_tokens, 2 * self._tried_tokens)
        for backend in self._known():
            streams = self._decode.scoreboard.requests(backend.slot)
            if not self._has_time(backend, streams, request):
                continue
            prefixes = self._cached[backend.name]
            hit = prefixes.hit(prompt.keys)
            cached = prefixes.found(prompt.ends, hit, prompt.tokens)
            if prompt.tokens - cached > most_tokens:
                continue
            cached *= prefixes.trust
            seconds = self.cost.seconds(prompt.tokens - cached, cached) * self.cost.slowness(backend.name)
            harm = _HARM * streams
            if seconds * (1 + harm) < least:
                best, best_harm, least = backend, harm, seconds * (1 + harm)
        if best is None:
            return None
        return LocalChoice(decoder=best, prompt=prompt, harm=best_harm, instead_seconds=instead)

    def note_handoff(
        self, decoder: str, prompt: PromptCosts, first_token: FirstToken | None, answer_tokens: int
    ) -> None:
        """A decoder of this name got the prompt from a prefiller, and has answered.

        `first_token`: since the prefiller's answer; None: that is not known.
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
        told: tuple[int, int] | None,
    ) -> None:
        """A decoder has computed the prompt by itself, and answered.

        `first_token`: None if it is not known. `told`: tokens of the prompt, and those of them that were cached; None:
        it does not tell.
        """
        if (prefixes := self._cached_by(decoder)) is None:
            return
        prompt = choice.prompt
        hit = prefixes.hit(prompt.keys)
        expected = prefixes.found(prompt.ends, hit, prompt.tokens)
        predicted = self.cost.seconds(prompt.tokens - expected, expected) * self.cost.slowness(decoder)
        if told is None and first_token is not None and first_token.seconds > _MUCH_LONGER * predicted:
            told = prompt.tokens, 0
        there = expected if told is None else prompt.tokens * told[1] / max(1, told[0])
        odometer = prefixes.odometer
        known = prefixes.use(prompt.keys, prompt.ends, prompt.tokens - there + answer_tokens)
        if told is not None:
            prefixes.tell(told[1])
        if prompt.keys:
            prefixes.learn(known, odometer, prompt.ends, expected, there)
        tokens, cached = (float(prompt.tokens), expected) if told is None else (float(told[0]), float(told[1]))
        if first_token is not None:
            computed = _Computed(decoder, tokens - cached, cached, first_token.seconds, choice)
            self._pending.add(computed, first_token.at - first_token.seconds, first_token.at)
            self._learn()

    def _learn(self) -> None:
        """Learn from first tokens as far as it is known whether the event loop was late."""
        for sample, ended, is_timely in self._pending.settled():
            if not is_timely:
                continue
            if isinstance(sample, _Computed):
                self._take_in(sample, ended)
            else:
                before = self.handover_seconds
                self.handover_seconds = sample if before is None else before + _HANDOVER_STEP * (sample - before)

    def _take_in(self, computed: _Computed, ended: float) -> None:
        """Learn from a prompt that a decoder has computed. All go to prefillers if decoders are not sooner."""
        self.cost.learn(computed.name, computed.uncached, computed.cached, computed.seconds)
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
                "skip_prefill: prompts go to prefillers for an hour: decoders were not sooner",
                extra={"fields": {"seconds": round(all_took, 3), "prefill_seconds": round(all_instead, 3)}},
            )

    def _has_time(self, backend: Backend, streams: int, request: PickRequest) -> bool:
        """Whether it is below its limit and its knee, and has KV memory to spare, as far as they are known."""
        decode = self._decode
        bounds = (decode.limit(backend), decode.policy.most_running(backend))
        if any(bound is not None and streams >= bound for bound in bounds):
            return False
        facts = decode.health.of(backend).facts
        if facts is None or facts.kv_tokens is None:
            return True
        return decode.scoreboard.load(backend.slot).kv + request.decode.kv <= _MOST_KV * facts.kv_tokens

    def _known(self) -> tuple[Backend, ...]:
        """The decoders there are. One that was away has an empty cache."""
        eligible = self._decode.eligible()
        if eligible is not self._eligible:
            self._eligible, before = eligible, self._cached
            names = [backend.name for backend in eligible]
            self._cached = {name: before.get(name) or CachedPrefixes() for name in names}
            for name in before.keys() - self._cached.keys():
                self.cost.forget(name)
        if self._journal is not None and self._journal.has_new_records:
            self._hear(self._journal)
        return eligible

    def _hear(self, journal: JournalWriter) -> None:
        """Take in what decoders have told of their caches."""
        names = {backend.slot: backend.name for backend in self._eligible}
        for data in journal.new_records():
            kind, slot = kind_and_slot(data)
            if kind == RecordKind.COUNTED and slot in names:
                prefixes = self._cached[names[slot]]
                if prefixes.follow(CacheCount(*unpacked(data).numbers), computing=0.0):
                    prefixes.clear()

    def _cached_by(self, decoder: str) -> CachedPrefixes | None:
        self._known()
        return self._cached.get(decoder)
