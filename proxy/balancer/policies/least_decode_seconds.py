"""Least load in seconds, for decoders: an answer goes where it and the answers that are written there lose least time.

The time of a token beside other answers is learned from answers that ended (decode_pace). A decoder should get no more
answers than it has at its saturation point, so requests wait in the gateway's queue instead. This restriction is
learned and fails open: see DecodePace, and `would_take` and `hold_seconds` below.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.pick import EQUAL, LEAST_SECONDS, PendingSamples, Tracker
from proxy.balancer.policies.decode_pace import PLACES, SIZES, TRUSTED_SECONDS, DecodePace
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.shared.scoreboard import SlotReader
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext
    from proxy.common.backend import Backend

    _Snapshot = tuple[Sequence[int], Sequence[float], bool, Sequence[float] | None]
    """Running answers of the candidates, their seconds per token, whether several are equal, and what slow handoffs add
    to the seconds per token. None: no handoff is slow."""

logger = logging.getLogger(__name__)

# Interval at which learned values are updated.
_LOOK_SECONDS: Final = 1.0
# Number of ended answers that are learned in one batch, which costs a fraction of learning each at its end.
_BATCH_ANSWERS: Final = 64
# Maximum number of answers that wait to be learned. The oldest ones are dropped first.
_MAX_PENDING: Final = 1024
# Answers are not used if the event loop was late by more than this share of their time, or by this time.
_MAX_LAG_SHARE: Final = 0.02
_MAX_LAG_SECONDS: Final = 0.5
# Weight of an answer's KV relative to the answer itself, so that decoders with less KV win among otherwise equal ones.
_KV_SHARE: Final = 0.1
# Weight of a second until the first token relative to a second of the rest of the answer.
_FIRST_TOKEN_WEIGHT: Final = 5.0
# Assumed time of a decoding step without other answers, until it is learned.
_LIKELY_STEP_SECONDS: Final = 0.02
# Scores that differ by less than this share are equal.
_TIE: Final = 1e-3
_BELOW: Final = 1 - _TIE
_AS_GOOD: Final = 1 + _TIE
# Tiers of candidates. A higher tier gets an answer only if no lower one exists. In ascending order, they have as many
# answers as were tried recently, are at the saturation point, or lack KV memory.
_IS_TRIED: Final = 1
_IS_SATURATED: Final = 2
_LACKS_KV: Final = 3
# Shorter answers are not learned, because their pace predicts little.
_MIN_TOKENS: Final = 8
# Mean lengths of answers are learned for each power of two of their limits, over about this number of answers.
_LENGTHS: Final = 20
# Minimum number of answers for the use of a mean length.
_ENOUGH_LENGTHS: Final = 8
_HELD_STEP: Final = 0.05
# Maximum sum of the final KV of all answers, including those in prefill, as a multiple of a decoder's KV memory. It may
# exceed 1 because answers do not end at the same time.
_FULL: Final = 1.2
# Maximum wait of a request, as a multiple of the time that it is predicted to gain by waiting.
_HOLD_GAINS: Final = 2.0
_ANY: Final = float("inf")


@dataclass(slots=True, eq=False)
class _Decoder:
    """Activity of one decoder, as this worker knows it."""

    at: float
    """The time up to which `spent` is counted."""
    spent: list[float] = field(default_factory=list)
    """Seconds in each bucket of numbers of answers, up to the last bucket with any."""
    writing: int = 0
    """Answers of this worker that it writes."""


@dataclass(slots=True, eq=False)
class _Ended:
    """An answer that ended and was not learned yet."""

    name: str
    """The decoder's."""
    spent_before: Sequence[float]
    """The decoder's `spent` when the answer began."""
    spent: Sequence[float]
    """The same when it ended."""
    tokens: int


class _Answer(Tracker):
    """An answer from its lease to its end."""

    __slots__ = ("backend", "began_at", "request", "spent_before", "_decoder", "_policy")

    def __init__(
        self, compute: int, kv: int, policy: LeastDecodeSeconds, backend: Backend, request: PickRequest
    ) -> None:
        self.compute = compute
        self.kv = kv
        self.backend = backend
        self.request = request
        self.spent_before: Sequence[float] = ()
        self.began_at = 0.0
        self._policy = policy
        self._decoder: _Decoder | None = None  # once it has begun

    def note_first_token(self) -> None:
        """See Tracker."""
        decoder = self._decoder = self._policy.begin(self.backend)
        self.began_at = decoder.at
        self.spent_before = decoder.spent.copy()

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        """See Tracker."""
        if self._decoder is not None:
            self._policy.end(self, self._decoder, answer_tokens if served else None)


@dataclass(slots=True, eq=False)
class _Bounds:
    """Learned and reported bounds of some candidates. Each list has the order of the candidates."""

    reader: SlotReader
    limits: list[float]
    """The most requests by configuration or by the engines' reports."""
    most: list[float]
    """The most answers that each should have. Requests wait while all have that many."""
    preferred: list[float]
    """The same for choosing, which never makes requests wait. While one decoder is to have fewer answers, to find out,
    the others should have no more than some have had."""
    kv: list[float]
    """The most KV tokens that each should hold."""
    slowness: list[float]
    has_kv: bool = False
    is_open: bool = False
    """None of them has any bound for choosing."""
    has_most: bool = False
    """Some have a bound for which requests wait."""

    def __post_init__(self) -> None:
        self.has_kv = min(self.kv, default=_ANY) < _ANY
        self.is_open = not self.has_kv and min(self.preferred, default=_ANY) == _ANY
        self.has_most = self.has_kv or min(self.most, default=_ANY) < _ANY


class LeastDecodeSeconds(LeastTokens):
    """The policy `least_load` for decoders."""

    label = "least_load"

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self.pace = DecodePace()
        self._decoders: dict[str, _Decoder] = {}  # by name, which has the cheaper hash
        self._pending: PendingSamples[_Ended] = PendingSamples(
            self.context, max_lag_seconds=_MAX_LAG_SECONDS, max_lag_share=_MAX_LAG_SHARE, capacity=_MAX_PENDING
        )
        self._lengths: dict[int, tuple[float, int]] = {}  # mean and number, by the limit's bit length
        self._held = 0.0  # KV tokens of one answer, over the last ones
        self._candidates: Sequence[Candidate] = ()
        self._bounds: _Bounds  # of these
        self._due = 0.0  # when to look again
        self._has_held = False  # the saturation point has made requests wait since it was believed

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Return the candidate where a token takes least, for all answers there together. Equal ones take turns."""
        bounds = self._bounds if candidates is self._candidates else self._bounds_of(candidates)
        running = bounds.reader.running()
        held = sum(weights) / (sum(running) or 1) or 1.0
        pace, share = self.pace, _KV_SHARE / held
        slope, step = 2 * pace.slope, pace.step + pace.slope
        slowness, is_open = bounds.slowness, bounds.is_open
        least, best_tier = _ANY, _LACKS_KV
        equal: list[Candidate] = []
        seconds: list[float] = []
        handoffs = self._handoffs(candidates, request) if request.partner is not None else None
        for place, candidate in enumerate(candidates):
            answers, weight, percent = running[place], weights[place], candidate.share_percent
            load = answers + share * weight
            score = (step + slope * load) * slowness[place]
            seconds.append(score)
            if percent != FULL_PERCENT:
                load = (load + 1) * FULL_PERCENT / percent - 1
                score = (step + slope * load) * slowness[place]
            if handoffs is not None:
                score += handoffs[place]
            tier = 0 if is_open else self._tier(bounds, place, answers, weight)
            if tier > best_tier:
                continue
            if tier < best_tier:
                best_tier, least = tier, _ANY
            if score < least * _BELOW:
                least, equal = score, [candidate]
            elif score <= least * _AS_GOOD:
                equal.append(candidate)
        is_equal = len(equal) > 1
        self.snapshot = running, seconds, is_equal, handoffs
        return self._take_turn(equal) if is_equal else equal[0]

    def _handoffs(self, candidates: Sequence[Candidate], request: PickRequest) -> list[float] | None:
        """Return what slow handoffs add to the scores of the candidates. None: none of them is slow.

        A second until the first token counts as several seconds of the rest of the answer.
        """
        handoffs, partner = self.context.handoffs, request.partner
        if handoffs is None or partner is None:
            return None
        extra = handoffs.extra_seconds(partner, candidates, request.prompt_tokens or request.decode.kv)
        if extra is None:
            return None
        pace = self.pace
        unit = _FIRST_TOKEN_WEIGHT / max(1.0, self._likely_tokens(request))
        if not pace.is_fitted:
            unit *= pace.step / _LIKELY_STEP_SECONDS
        return [unit * each for each in extra]

    def _tier(self, bounds: _Bounds, place: int, answers: int, held: int) -> int:
        """Return how little a candidate should get one more answer. Within a tier the least loaded one gets it."""
        if self._lacks_kv(bounds, place, answers, held):
            return _LACKS_KV
        if answers >= bounds.most[place]:
            return _IS_SATURATED
        return _IS_TRIED if answers >= bounds.preferred[place] else 0

    def reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        """See Policy."""
        return EQUAL if snapshot[2] else LEAST_SECONDS

    def figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        """See Policy."""
        running, seconds, _, handoffs = snapshot
        if handoffs is None:
            return {"running": running, "token_seconds": seconds}, seconds
        scores = list(map(add, seconds, handoffs))
        return {"running": running, "token_seconds": seconds, "handoff_token_seconds": handoffs}, scores

    # For the queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its saturation point and has KV memory for one more answer."""
        if candidates is not self._candidates:
            if self.context.clock() >= self._due:
                self._look(candidates)
            else:
                self._candidates, self._bounds = candidates, self._bounds_of(candidates)
        bounds = self._bounds
        if not bounds.has_most or self._has_free(bounds):
            return True
        if not self._has_held and self.pace.most < _ANY and self.would_take(candidates):
            self._has_held = True
            logger.info(
                "decode policy: saturation point learned: requests wait before the limits of the engines are reached",
                extra={"fields": {"most_running": int(self.pace.most)}},
            )
        return False

    def would_take(self, candidates: Sequence[Candidate]) -> bool:
        """See Policy. Charges of the answers that are written count, and what was learned does not."""
        bounds = self._bounds if candidates is self._candidates else self._bounds_of(candidates)
        running = bounds.reader.running()
        held = bounds.reader.weights(0, 1) if bounds.has_kv else running
        return any(
            answers < bounds.limits[place] and (not answers or tokens <= bounds.kv[place])
            for place, (answers, tokens) in enumerate(zip(running, held, strict=True))
        )

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """See Policy: twice what the answer is predicted to gain.

        Without the limit the answer would share its decoder with all that wait, too. So it gains the time that each
        token of these saves. That is more with each of them, where the throughput falls further.
        """
        if not self.pace.gain_seconds or not self._candidates or self._has_free(self._bounds):
            return _ANY
        bounds = self._bounds
        sharing = (sum(bounds.reader.running()) + waiting) / len(bounds.most)
        return _HOLD_GAINS * self.pace.gain_at(sharing) * sharing * self._likely_tokens(request)

    def most_running(self, backend: Backend) -> int | None:
        """Return the answers at the saturation point."""
        return None if self.pace.most == _ANY else int(self.pace.most)

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return what the answer takes of a decoder at its highest throughput; 0.0: not known."""
        return self.pace.token_seconds * self._likely_tokens(request)

    def _has_free(self, bounds: _Bounds) -> bool:
        running = bounds.reader.running()
        held = bounds.reader.weights(0, 1) if bounds.has_kv else running
        for place, answers in enumerate(running):
            if answers < bounds.most[place] and not self._lacks_kv(bounds, place, answers, held[place]):
                return True
        return False

    def _lacks_kv(self, bounds: _Bounds, place: int, answers: int, held: int) -> bool:
        """Return whether a candidate has no KV memory for one answer more, beside some that are charged with `held`.

        The next answer counts as the last ones did, but as no more than those here: after a few that were large, small
        ones must not go one by one.
        """
        return answers > 0 and held + min(self._held, held / answers) > bounds.kv[place]

    # Charges

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """Return the prompt's KV and what the answer will probably add to it."""
        return Load(request.decode.compute, self._kv_of(request))

    def _kv_of(self, request: PickRequest) -> int:
        limit = 0 if request.subject is None else request.subject.output_tokens
        kv = request.decode.kv
        known = self._lengths.get(limit.bit_length())
        if known is not None and known[1] >= _ENOUGH_LENGTHS:
            likely = round(known[0])
            if likely < limit:
                kv += likely - limit
        self._held += _HELD_STEP * (kv - self._held) if self._held else kv
        return kv

    def _likely_tokens(self, request: PickRequest | None) -> float:
        """Return the probable length of an answer: the mean of those with such a limit, or the limit."""
        if request is None:
            lengths = [mean for mean, _ in self._lengths.values()]
            return max(lengths, default=0.0)
        limit = request.output_tokens
        mean, number = self._lengths.get(limit.bit_length(), (0.0, 0))
        return limit if number < _ENOUGH_LENGTHS else min(limit, mean)

    # Learning

    def track(self, backend: Backend, request: PickRequest) -> _Answer:
        """See Policy."""
        return _Answer(request.decode.compute, self._kv_of(request), self, backend, request)

    def begin(self, backend: Backend) -> _Decoder:
        """Note that a decoder writes one answer more."""
        now = self.context.clock()
        decoder = self._decoders.get(backend.name)
        if decoder is None:
            decoder = self._decoders[backend.name] = _Decoder(now)
        self._count_elapsed_time(backend, decoder, now)
        decoder.writing += 1
        return decoder

    def end(self, answer: _Answer, decoder: _Decoder, tokens: int | None) -> None:
        """Note that a decoder writes one answer less. It teaches if it is complete and its tokens are known."""
        now, backend = self.context.clock(), answer.backend
        self._count_elapsed_time(backend, decoder, now)
        decoder.writing -= 1
        if tokens:
            subject = answer.request.subject
            if subject is not None:
                length = subject.output_tokens.bit_length()
                mean, number = self._lengths.get(length, (0.0, 0))
                if number < _LENGTHS:
                    number += 1
                self._lengths[length] = mean + 1 / number * (tokens - mean), number
            if tokens >= _MIN_TOKENS:
                ended = _Ended(backend.name, answer.spent_before, decoder.spent.copy(), tokens)
                self._pending.add(ended, answer.began_at, now)
                if len(self._pending) % _BATCH_ANSWERS == 0:
                    self._learn()
        if now >= self._due:
            self._look(self._candidates)

    def _count_elapsed_time(self, backend: Backend, decoder: _Decoder, now: float) -> None:
        """Count the time until now: the decoder has written the same number of answers."""
        if answers := decoder.writing:
            if self.context.others_running is not None:
                answers += self.context.others_running(backend)
            place, spent = PLACES[answers] if answers < len(PLACES) else len(SIZES) - 1, decoder.spent
            if place >= len(spent):
                spent += [0.0] * (place + 1 - len(spent))
            spent[place] += now - decoder.at
        decoder.at = now

    def _look(self, candidates: Sequence[Candidate]) -> None:
        """Use what was learned for choosing among these from now on."""
        now = self.context.clock()
        self._due = now + _LOOK_SECONDS
        self._learn()
        before = self.pace.most
        self.pace.look(now)
        if self.pace.most == _ANY and before < _ANY:
            self._log_dropped(before)
        present = {candidate.backend.name for candidate in candidates}
        for name in [name for name, known in self._decoders.items() if name not in present and not known.writing]:
            del self._decoders[name]
            self.pace.forget(name)
        if candidates:
            self._candidates, self._bounds = candidates, self._bounds_of(candidates)

    def _log_dropped(self, most: float) -> None:
        held, self._has_held = self._has_held, False
        if held:
            why = "throughput was not higher at this point" if self.pace.is_doubted else "it is no longer certain"
            logger.log(
                logging.WARNING if self.pace.is_doubted else logging.INFO,
                "decode policy: learned saturation point dropped: %s",
                why,
                extra={"fields": {"most_running": int(most)}},
            )

    def _learn(self) -> None:
        """Learn from the answers that ended, in their order, as far as it is known whether the event loop was late."""
        for ended, at, is_timely in self._pending.settled():
            if is_timely:
                both = zip_longest(ended.spent_before, ended.spent, fillvalue=0.0)
                spent = [(place, after - before) for place, (before, after) in enumerate(both) if after > before]
                self.pace.learn(ended.name, spent, ended.tokens - 1, at)

    def _bounds_of(self, candidates: Sequence[Candidate]) -> _Bounds:
        pace = self.pace
        most = [pace.most] * len(candidates)
        # Each decoder is the one that finds out in turn.
        scout = int(self._due / TRUSTED_SECONDS) % len(most)
        most[scout] = pace.scout_most
        preferred = most.copy()
        if pace.scout_prefers < _ANY and len(most) > 1:
            preferred = [min(each, pace.most_seen) for each in most]
            preferred[scout] = pace.scout_prefers
        backends = [candidate.backend for candidate in candidates]
        facts = [self.context.facts(backend) for backend in backends]
        limits = [_ANY if candidate.limit is None else float(candidate.limit) for candidate in candidates]
        return _Bounds(
            reader=SlotReader(candidates[0].scoreboard, [backend.slot for backend in backends]),
            limits=limits,
            most=list(map(min, most, limits)),
            preferred=list(map(min, preferred, limits)),
            kv=[_ANY if each is None or each.kv_tokens is None else _FULL * each.kv_tokens for each in facts],
            slowness=[pace.slowness(backend.name) for backend in backends],
        )
