"""Decides which prompts decoders compute, because that is faster than a prefiller and a handoff.

These are short prompts, and long prompts that are mostly in the decoder's cache. After an answer the cache
holds the prompt and the answer, so only the tool's result is new in the next turn of an agent. The prefill time of
decoders is learned from the prompts that they compute, and the time of a handoff from handoffs.

Running answers slow down meanwhile. The policy for decoders learns by how much. On the other hand, all queued requests
gain the time of a prefiller. A decoder is chosen if all requests together gain time.

Learned times must prove themselves: decoders must compute their prompts in less time than was predicted for prefillers.
Otherwise all prompts go to prefillers for some minutes.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import PendingSamples
from proxy.balancer.policies.prefill_cost import (
    PrefillCost,
    RecordKind,
    kind_and_slot,
    make_prompt_costs,
    unpack_record,
)
from proxy.balancer.policies.prefixes import CacheCount, CachedPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import PickRequest, RoutingSubject
    from proxy.balancer.policies.prefill_cost import PromptCosts
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.backend import Backend

logger = logging.getLogger(__name__)

# Assumed cost of a running answer, as a share of the prefill time, until it is learned.
_ASSUMED_HARM: Final = 0.25
# The same for careful decisions: running answers stop.
_MAX_HARM: Final = 1.0
# Weight of a second until the first token relative to a second of the rest of an answer.
_FIRST_TOKEN_WEIGHT: Final = 2.0
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
# Number of decoders that are examined for a prompt.
_MAX_EXAMINED: Final = 4
# Number of remembered ends of prompts.
_MAX_TAILS: Final = 16_384
# Number of the last locally computed prompts that are compared, and the minimum for a verdict.
_PROOFS: Final = 32
_ENOUGH_PROOFS: Final = 8
# Decoders are surely not faster if their prompts take this multiple of the predicted time with prefillers. Many choices
# gain little, so the sums of both times are often nearly equal.
_SURELY_SLOWER: Final = 1.1
DOUBT_SECONDS: Final = 300.0
"""Time for which all prompts go to prefillers after decoders were not faster. It doubles up to an hour."""
_MAX_DOUBT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocalChoice:
    """Decision that a decoder computes a prompt without a prefiller."""

    decoder: Backend
    prompt_costs: PromptCosts
    is_decoder_idle: bool
    """Whether the decoder writes no answers."""
    harm_per_second: float
    """Weighted cost of the stalled answers of this decoder, as a share of the prefill time."""
    prefiller_seconds: float
    """Predicted time to first token with a prefiller and a handoff, and what queued requests lose meanwhile."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time of an answer's first token."""

    received_at: float
    """Its time on the clock of the pools."""
    seconds_since_start: float
    """Time since the request to the decoder, or with a prefiller since its response."""


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A prompt that a decoder has computed itself."""

    decoder_name: str
    """Name of the decoder."""
    uncached_tokens: float
    cached_tokens: float
    prefill_seconds: float
    local_choice: LocalChoice


class LocalPrefill:
    """Learned times of one worker for prompts that decoders compute."""

    def __init__(self, prefill: Pool, decode: Pool, journal: JournalWriter | None = None) -> None:
        """Create a predictor of local prefills without learned times.

        `journal`: has the cache counts of decoders. None: they publish no KV events.
        """
        self._longest_tried_tokens = _FIRST_TOKENS / 2
        self._prefill_policy = prefill
        self._decode_policy = decode
        self._journal = journal
        self.prefill_cost = PrefillCost()
        """Prefill time of decoders."""
        self._step_wait_seconds = 0.0  # additional seconds of a prompt on a decoder with running answers
        self.handoff_seconds: float | None = None
        """Mean time from the end of a prefill to the first token. None: there was no handoff yet."""
        self._eligible_decoders: tuple[Backend, ...] = ()
        self._prefixes_by_decoder: dict[str, CachedPrefixes] = {}  # prefixes of the eligible decoders, by name
        context = prefill.policy.context
        self._clock = context.clock
        self._pending_samples: PendingSamples[_Computed | float] = PendingSamples(context)
        """Prompts that decoders have computed, and handoffs in seconds."""
        self._proofs: deque[tuple[float, float]] = deque(maxlen=_PROOFS)
        """Times of the last local prompts with their harm, and the predicted times with prefillers."""
        self._doubted_until = -inf
        self._doubt_seconds = DOUBT_SECONDS
        self._decoders_by_tail: dict[int, str] = {}  # names, by the keys at the ends of prompts, the oldest first
        self._next_examined = 0
        self._reserved: tuple[RoutingSubject, LocalChoice] | None = None
        """The request that skips the queue, and its decoder, until its legs begin. None: there is none."""

    def skips_queue(self, request: PickRequest, max_tokens: int, *, is_cautious: bool = False) -> bool:
        """Return whether a decoder should compute a prompt at once that would otherwise wait in the queue.

        The next call of `find_faster_decoder` for the same request returns this decoder.
        """
        prompt = make_prompt_costs(request)
        choice = self.find_faster_decoder(prompt, max_tokens, is_cautious=is_cautious, must_queue=True)
        subject = request.request_subject
        self._reserved = None if choice is None or subject is None else (subject, choice)
        return choice is not None

    def find_faster_decoder(
        self, prompt: PromptCosts, max_tokens: int, *, is_cautious: bool = False, must_queue: bool = False
    ) -> LocalChoice | None:
        """Return the decoder that would compute a prompt in the least time, or None if prefillers are faster.

        None is also returned if times are unknown, or if the request avoids or prefers backends. Decoders at their
        saturation point or short of KV memory are not considered, and neither are those that would have to compute more
        than `max_tokens` tokens.

        Args:
            prompt: The prompt.
            max_tokens: Maximum number of tokens to compute.
            is_cautious: Whether only prompts that would wait in the queue are computed by decoders, and running answers
                are assumed to stop during a prefill until their harm is learned.
            must_queue: Whether the prompt would wait in the queue for a prefiller.
        """
        request = prompt.pick_request
        if self._reserved is not None:
            (subject, reserved), self._reserved = self._reserved, None
            if subject is request.request_subject:
                return reserved
        if is_cautious and not must_queue:
            return None
        self._learn_pending()
        if (
            request.request_subject is None
            or request.avoided_backends
            or request.preferred_backend is not None
            or self.handoff_seconds is None
        ):
            return None
        now = self._clock()
        if now < self._doubted_until or not (possible := self._possible_decoders(prompt, max_tokens)):
            return None
        soonest = self._prefill_policy.soonest_completion_seconds(request)
        if soonest is None:
            return None
        instead = soonest + self.handoff_seconds
        if must_queue:
            instead += self._prefill_policy.queue_wait_seconds(request)
        relief = self._prefill_policy.queue_relief_seconds(request)
        harm_each = self._decode_policy.policy.append_harm_per_second
        if harm_each is None:
            harm_each = _MAX_HARM if is_cautious else _ASSUMED_HARM
        harm_each /= _FIRST_TOKEN_WEIGHT
        best: tuple[Backend, int] | None = None
        least = instead + relief
        for backend, streams, uncached, cached in possible:
            seconds = self._predicted_seconds(uncached, cached) * self.prefill_cost.slowness_of(backend.name)
            if streams:
                seconds += self._step_wait_seconds
            cost = seconds * (1 + harm_each * streams)
            # Neither the request nor all requests together may lose time.
            if seconds < instead and cost < least and self._has_capacity(backend, streams, request):
                best, least = (backend, streams), cost
        if best is None:
            return None
        return LocalChoice(
            decoder=best[0],
            prompt_costs=prompt,
            is_decoder_idle=not best[1],
            harm_per_second=harm_each * best[1],
            prefiller_seconds=instead + relief,
        )

    def _possible_decoders(self, prompt: PromptCosts, max_tokens: int) -> list[tuple[Backend, int, float, float]]:
        """Return the decoders that may compute a prompt: running answers, and the expected uncached and cached tokens.

        This costs less than the prediction for prefillers, and most prompts without a cached prefix end here.
        """
        possible: list[tuple[Backend, int, float, float]] = []
        most_tokens = min(max_tokens, 2 * self._longest_tried_tokens)
        for backend in self._examined_decoders(prompt.prefix_keys):
            streams = self._decode_policy.scoreboard.open_leases(backend.slot)
            prefixes = self._prefixes_by_decoder[backend.name]
            hit = prefixes.count_cached_pieces(prompt.prefix_keys)
            cached = prefixes.predict_found_tokens(prompt.piece_ends, hit, prompt.prompt_tokens)
            # An idle decoder has no answers to stall.
            if prompt.prompt_tokens - cached <= (most_tokens if streams else max_tokens):
                cached *= prefixes.hit_trust
                possible.append((backend, streams, prompt.prompt_tokens - cached, cached))
        return possible

    def _examined_decoders(self, prefix_keys: Sequence[int]) -> Sequence[Backend]:
        """Return the decoder of the conversation's last turn, and some others in turn.

        Large fleets cost no more. Small fleets are examined as a whole.
        """
        eligible = self._update_eligible_decoders()
        if len(eligible) <= _MAX_EXAMINED:
            return eligible
        self._next_examined = (self._next_examined + _MAX_EXAMINED) % len(eligible)
        examined = [*eligible, *eligible][self._next_examined : self._next_examined + _MAX_EXAMINED]
        for key in reversed(prefix_keys):
            last = self._decoders_by_tail.get(key)
            if last is not None:
                backend = next((each for each in eligible if each.name == last), None)
                if backend is not None and backend not in examined:
                    examined[0] = backend
                break
        return examined

    def _remember_decoder(self, decoder: str, prefix_keys: Sequence[int]) -> None:
        """Note the decoder of a conversation's last turn.

        The last piece of a prompt may be partial, so the one before counts, too.
        """
        tails = self._decoders_by_tail
        for key in prefix_keys[-2:]:
            tails.pop(key, None)
            tails[key] = decoder
        while len(tails) > _MAX_TAILS:
            del tails[next(iter(tails))]

    def learn_from_handoff(
        self, decoder: str, prompt: PromptCosts, first_token: FirstToken | None, answer_tokens: int
    ) -> None:
        """Learn from an answer whose prompt a prefiller has computed.

        `decoder` is the name of the decoder. `first_token` counts from the prefiller's response. None: it is unknown.
        """
        if first_token is not None:
            self._pending_samples.add_sample(
                first_token.seconds_since_start,
                first_token.received_at - first_token.seconds_since_start,
                first_token.received_at,
            )
            self._learn_pending()
        if (prefixes := self._cached_prefixes_of(decoder)) is not None:
            prefixes.record_prompt(prompt.prefix_keys, prompt.piece_ends, prompt.prompt_tokens + answer_tokens)
            self._remember_decoder(decoder, prompt.prefix_keys)

    def learn_from_local_prefill(
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
        if (prefixes := self._cached_prefixes_of(decoder)) is None:
            return
        prompt = choice.prompt_costs
        self._remember_decoder(decoder, prompt.prefix_keys)
        hit = prefixes.count_cached_pieces(prompt.prefix_keys)
        expected = prefixes.predict_found_tokens(prompt.piece_ends, hit, prompt.prompt_tokens)
        predicted = self._predicted_seconds(prompt.prompt_tokens - expected, expected) * self.prefill_cost.slowness_of(
            decoder
        )
        if (
            prompt_counts is None
            and first_token is not None
            and first_token.seconds_since_start > _MUCH_LONGER * predicted
        ):
            prompt_counts = prompt.prompt_tokens, 0
        there = (
            expected if prompt_counts is None else prompt.prompt_tokens * prompt_counts[1] / max(1, prompt_counts[0])
        )
        odometer = prefixes.token_odometer
        readings = prefixes.record_prompt(
            prompt.prefix_keys, prompt.piece_ends, prompt.prompt_tokens - there + answer_tokens
        )
        if prompt_counts is not None:
            prefixes.learn_block_size(prompt_counts[1])
        if prompt.prefix_keys:
            prefixes.learn_from_report(readings, odometer, prompt.piece_ends, expected, there)
        tokens, cached = float(prompt.prompt_tokens), expected
        if prompt_counts is not None:
            tokens, cached = float(prompt_counts[0]), float(prompt_counts[1])
        if first_token is not None:
            computed = _Computed(decoder, tokens - cached, cached, first_token.seconds_since_start, choice)
            self._pending_samples.add_sample(
                computed, first_token.received_at - first_token.seconds_since_start, first_token.received_at
            )
            self._learn_pending()

    def record_failure(self) -> None:
        """Pause after a decoder failed on a prompt without a prefiller: perhaps it cannot compute prompts."""
        now = self._clock()
        if now >= self._doubted_until:
            logger.warning(
                "skip_prefill: paused, all prompts go to prefillers: a decoder failed",
                extra={"fields": {"paused_seconds": round(self._pause(now))}},
            )

    def _learn_pending(self) -> None:
        """Learn from the samples for which the lag of the event loop is known."""
        for sample, ended, is_timely in self._pending_samples.take_settled():
            if not is_timely:
                continue
            if isinstance(sample, _Computed):
                self._learn_from_prompt(sample, ended)
            else:
                before = self.handoff_seconds
                self.handoff_seconds = sample if before is None else before + _HANDOFF_STEP * (sample - before)

    def _learn_from_prompt(self, computed: _Computed, ended_at: float) -> None:
        """Learn from a prompt that a decoder has computed, and stop using decoders if they are not faster."""
        self._learn_prefill_time(computed)
        if ended_at < self._doubted_until:
            return
        took, instead = (
            computed.prefill_seconds * (1 + computed.local_choice.harm_per_second),
            computed.local_choice.prefiller_seconds,
        )
        if took < instead:
            self._longest_tried_tokens = max(self._longest_tried_tokens, computed.uncached_tokens)
        self._proofs.append((took, instead))
        all_took = sum([took for took, _ in self._proofs])
        all_instead = sum([instead for _, instead in self._proofs])
        if len(self._proofs) == _PROOFS and all_took < all_instead:
            self._doubt_seconds = DOUBT_SECONDS
        if len(self._proofs) >= _ENOUGH_PROOFS and all_took > _SURELY_SLOWER * all_instead:
            paused_seconds = self._pause(ended_at)
            logger.warning(
                "skip_prefill: paused, all prompts go to prefillers: decoders were not faster",
                extra={
                    "fields": {
                        "paused_seconds": round(paused_seconds),
                        "seconds": round(all_took, 3),
                        "prefill_seconds": round(all_instead, 3),
                    }
                },
            )

    def _pause(self, now: float) -> float:
        """Send all prompts to prefillers for some time, and return this time in seconds."""
        paused_seconds = self._doubt_seconds
        self._doubted_until = now + paused_seconds
        self._doubt_seconds = min(_MAX_DOUBT_SECONDS, 2 * paused_seconds)
        self._longest_tried_tokens = _FIRST_TOKENS / 2
        self._proofs.clear()
        return paused_seconds

    def _learn_prefill_time(self, computed: _Computed) -> None:
        """Learn the time of a prompt. A part of it is the wait for the steps of running answers."""
        name, uncached, cached, seconds = (
            computed.decoder_name,
            computed.uncached_tokens,
            computed.cached_tokens,
            computed.prefill_seconds,
        )
        if not computed.local_choice.is_decoder_idle:
            waited = seconds - self._predicted_seconds(uncached, cached) * self.prefill_cost.slowness_of(name)
            self._step_wait_seconds = max(
                0.0, self._step_wait_seconds + _WAIT_STEP * (waited - self._step_wait_seconds)
            )
            seconds = max(_MIN_OWN_SHARE * seconds, seconds - self._step_wait_seconds)
        self.prefill_cost.learn_prefill(name, uncached, cached, seconds)

    def _predicted_seconds(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Return the predicted time of a prefill on a decoder of normal speed."""
        seconds = None
        if self.prefill_cost.sample_count < _ENOUGH_TIMES:
            seconds = self._prefill_policy.policy.predicted_prefill_seconds(uncached_tokens, cached_tokens)
        return self.prefill_cost.predict_seconds(uncached_tokens, cached_tokens) if seconds is None else seconds

    def _has_capacity(self, backend: Backend, streams: int, request: PickRequest) -> bool:
        """Return whether a decoder is below its limit and saturation point and has KV memory, as far as known."""
        decode = self._decode_policy
        bounds = (decode.running_limit(backend), decode.policy.learned_max_running(backend))
        if any(bound is not None and streams >= bound for bound in bounds):
            return False
        facts = decode.health.health_of(backend).engine_facts
        if facts is None or facts.kv_memory_tokens is None:
            return True
        return (
            decode.scoreboard.load_of(backend.slot).kv_tokens + request.decode_load.kv_tokens
            <= _MAX_KV_SHARE * facts.kv_memory_tokens
        )

    def _update_eligible_decoders(self) -> tuple[Backend, ...]:
        """Update the prefixes of the eligible decoders, and return these. A decoder that was away has none."""
        eligible = self._decode_policy.eligible_backends()
        if eligible is not self._eligible_decoders:
            self._eligible_decoders, before = eligible, self._prefixes_by_decoder
            names = [backend.name for backend in eligible]
            self._prefixes_by_decoder = {name: before.get(name) or _new_prefixes() for name in names}
            for name in before.keys() - self._prefixes_by_decoder.keys():
                self.prefill_cost.forget_backend(name)
        if self._journal is not None and self._journal.has_new_records:
            self._read_journal(self._journal)
        return eligible

    def _read_journal(self, journal: JournalWriter) -> None:
        """Apply the cache counts of decoders that the journal reports."""
        names = {backend.slot: backend.name for backend in self._eligible_decoders}
        for data in journal.new_records():
            kind, slot = kind_and_slot(data)
            if kind == RecordKind.COUNTED and slot in names:
                prefixes = self._prefixes_by_decoder[names[slot]]
                if prefixes.apply_count(CacheCount(*unpack_record(data).record_numbers), computing_tokens=0.0):
                    prefixes.forget_all()

    def _cached_prefixes_of(self, decoder: str) -> CachedPrefixes | None:
        self._update_eligible_decoders()
        return self._prefixes_by_decoder.get(decoder)


def _new_prefixes() -> CachedPrefixes:
    prefixes = CachedPrefixes()
    prefixes.hit_trust = _FIRST_TRUST
    return prefixes
