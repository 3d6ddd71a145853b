"""Least load in seconds, for decoders: an answer goes where it and the answers that are written there lose least time.

The time of a token beside other answers is learned from answers that ended (decode_pace). A decoder should get no more
answers than it has at its saturation point, so requests wait in the gateway's queue instead. This restriction is
learned and fails open: see DecodePace, and `would_take_ignoring_learned` and `max_hold_seconds` below.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.pick import EQUAL, LEAST_SECONDS, PendingSamples
from proxy.balancer.policies.append_harm import AppendHarm
from proxy.balancer.policies.decode_memory import DecodeMemory, DecoderKv, HeldKv, KvFill
from proxy.balancer.policies.decode_pace import PLACES, SIZES, TRUSTED_SECONDS, DecodePace
from proxy.balancer.policies.least_tokens import WEIGHTS, LeastTokens
from proxy.common.backend import Load, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pick import Candidate, Columns, GapCounter, PickRequest, PolicyContext
    from proxy.balancer.shared.scoreboard import SlotReader
    from proxy.common.backend import Backend

    _Snapshot = tuple[Sequence[int], Sequence[int], Sequence[float], bool, Sequence[float] | None]
    """Places of the examined candidates, their running answers and seconds per token, whether several are equal, and
    what slow handoffs add to the seconds per token. None: no handoff is slow."""

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
# Number of a decoder's answers whose token clocks are read while it computes prompts. The others teach the same.
_MAX_TIMED: Final = 16
# Shorter answers are not learned, because their pace predicts little.
_MIN_TOKENS: Final = 8
# Maximum predicted KV of all answers, including those in prefill, as a share of a decoder's KV memory.
_FULL: Final = 0.95
# Maximum KV of the prompts alone, as a share of the memory, for requests that have waited as long as they may.
_OVERFULL: Final = 1.2
# The peak is only predicted for decoders that are charged with this share of their KV memory.
_MIN_FILL: Final = 0.4
# Maximum wait of a request, as a multiple of the time that it is predicted to gain by waiting.
_HOLD_GAINS: Final = 2.0
# Number of idle decoders in the figures of a choice.
_SHOWN_IDLE: Final = 8
_ANY: Final = float("inf")
_AS_CHARGED: Final = KvFill(1.0, 1.0)


@dataclass(slots=True, eq=False)
class _DecoderActivity:
    """Activity of one decoder, as this worker knows it."""

    counted_until: float
    """The time up to which `seconds_by_bucket` is counted."""
    kv_memory: DecoderKv
    """Its answers, and the tokens that each of them gets."""
    speed_factor: float = 1.0
    """Speed relative to the other decoders."""
    seconds_by_bucket: list[float] = field(default_factory=list)
    """Seconds in each bucket of numbers of answers, up to the last bucket with any."""
    writing_answers: int = 0
    """Answers of this worker that it writes."""
    computing_prompts: int = 0
    """Prompts of this worker that it computes."""
    computing_seconds: float = 0.0
    """Seconds in which it computed such prompts, while it wrote answers."""
    timed_answers: dict[_DecoderAnswer, None] = field(default_factory=dict)
    """Answers that it writes and whose token clocks are read."""


@dataclass(slots=True, eq=False)
class _EndedAnswer:
    """An answer that ended and was not learned yet."""

    decoder_name: str
    """The decoder's."""
    seconds_before_by_bucket: Sequence[float]
    """The decoder's `seconds_by_bucket` when the answer began."""
    seconds_by_bucket: Sequence[float]
    """The same when it ended."""
    answer_tokens: int
    timed_gaps: int
    """Timed gaps between its tokens. 0: its token clock was not read."""
    gaps_computing: int
    """The part of these that ended while the decoder computed prompts."""
    seconds_computing: float
    """Seconds of its time in which the decoder computed prompts."""


class _DecoderAnswer(HeldKv):
    """An answer of a decoder, from its lease to its end."""

    def __init__(self, policy: LeastDecodeSeconds, backend: Backend, request: PickRequest) -> None:
        policy.decode_memory.add_answer(self, backend.name, request)
        self.backend = backend
        self.pick_request = request
        self.seconds_before_by_bucket: Sequence[float] = ()
        self.began_at = 0.0
        self.computing_seconds_before = 0.0
        self.gap_counter: GapCounter | None = None
        self.gaps_before = 0
        """Timed gaps when the decoder began to compute a prompt."""
        self.gaps_computing = 0
        """Timed gaps that ended while the decoder computed prompts."""
        self._decode_policy = policy
        self._decoder_activity: _DecoderActivity | None = None  # once it has begun
        # The decoder until it has computed the prompt. None: a prefiller computes it.
        self._computing_decoder = policy.begin_answer(self, computes_prompt=True) if request.computes_prompt else None

    def record_first_token(self, gap_counter: GapCounter | None = None) -> None:
        if self._computing_decoder is not None:
            self._end_prompt(self._computing_decoder)
        self.gap_counter = gap_counter
        decoder = self._decoder_activity = self._decode_policy.begin_answer(self)
        self.began_at = decoder.counted_until
        self.seconds_before_by_bucket = decoder.seconds_by_bucket.copy()
        self.computing_seconds_before = decoder.computing_seconds

    def record_end(self, is_served: bool, answer_tokens: int | None) -> None:
        tokens = answer_tokens if is_served else None
        if self._computing_decoder is not None:
            self._end_prompt(self._computing_decoder)
        if self._decoder_activity is not None:
            self._decode_policy.end_answer(self, self._decoder_activity, tokens)
        self._decode_policy.decode_memory.remove_answer(self, tokens)

    def begin_computing(self) -> None:
        """Read the token clock, because the decoder begins to compute a prompt."""
        assert self.gap_counter is not None
        self.gaps_before = self.gap_counter.timed_gaps

    def end_computing(self) -> None:
        """Read the token clock, because the decoder has computed a prompt, or the answer has ended."""
        assert self.gap_counter is not None
        self.gaps_computing += self.gap_counter.timed_gaps - self.gaps_before

    def _end_prompt(self, decoder: _DecoderActivity) -> None:
        self._decode_policy.end_prompt(self, decoder)
        self._computing_decoder = None


@dataclass(slots=True, eq=False)
class _CandidateBounds:
    """Learned and reported bounds of some candidates. Each list has the order of the candidates."""

    slot_reader: SlotReader
    running_limits: list[float]
    """The most requests by configuration or by the engines' reports."""
    saturation_points: list[float]
    """The most answers that each should have. Requests wait while all have that many."""
    preferred_answers: list[float]
    """The same for choosing, which never makes requests wait. While one decoder is to have fewer answers, to find out,
    the others should have no more than some have had."""
    kv_capacities: list[float]
    """The highest charge of each, in KV tokens, at which the predicted KV fits into its memory."""
    kv_for_prompts: list[float]
    """The same for the KV of prompts alone."""
    slowness_factors: list[float]
    places_by_speed: list[int] = field(init=False)
    """Places of the candidates, the fastest first."""
    takes_idle: bool = False
    """No bound keeps an answer from an idle candidate."""
    knows_kv_capacity: bool = False
    has_no_limits: bool = False
    """None of them has any bound for choosing."""
    knows_saturation: bool = False
    """Some have a bound for which requests wait."""

    def __post_init__(self) -> None:
        self.knows_kv_capacity = min(self.kv_capacities, default=_ANY) < _ANY
        self.has_no_limits = not self.knows_kv_capacity and min(self.preferred_answers, default=_ANY) == _ANY
        self.knows_saturation = self.knows_kv_capacity or min(self.saturation_points, default=_ANY) < _ANY
        self.takes_idle = min(self.saturation_points, default=0.0) > 0 and min(self.preferred_answers, default=0.0) > 0
        self.places_by_speed = sorted(range(len(self.slowness_factors)), key=self.slowness_factors.__getitem__)

    def fastest_idle_places(self, count: int) -> list[int]:
        """Return the places of the fastest idle candidates, at most `count`."""
        found, busy = [], self.slot_reader.busy_places
        for place in self.places_by_speed:
            if place not in busy:
                found.append(place)
                if len(found) == count:
                    break
        return found


class LeastDecodeSeconds(LeastTokens):
    """The policy `least_load` for decoders."""

    policy_name = "least_load"
    keeps_weights = False

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self.decode_pace = DecodePace()
        self.append_harm = AppendHarm()
        """How much answers slow down while their decoder computes a prompt."""
        self._decoders_by_name: dict[str, _DecoderActivity] = {}  # by name, which has the cheaper hash
        self._pending_answers: PendingSamples[_EndedAnswer] = PendingSamples(
            self.context, max_lag_seconds=_MAX_LAG_SECONDS, max_lag_share=_MAX_LAG_SHARE, capacity=_MAX_PENDING
        )
        self.decode_memory = DecodeMemory()
        self._learned_rates: Sequence[float] = [0.0] * len(SIZES)  # tokens per second of one answer, by bucket
        self._fill_by_decoder: dict[str, KvFill] = {}  # of decoders whose memory may become short
        self._known_candidates: Sequence[Candidate] = ()
        self._candidate_bounds: _CandidateBounds  # of these
        self._next_look_at = 0.0  # when to look again
        self._has_held = False  # the saturation point has made requests wait since it was believed

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Return the candidate where a token takes least, for all answers there together. Equal ones take turns.

        Idle candidates differ only in their speed, so they are not scored one by one.
        """
        bounds = self._candidate_bounds if candidates is self._known_candidates else self._make_bounds(candidates)
        reader = bounds.slot_reader
        running, slowness, is_open = reader.running_by_place, bounds.slowness_factors, bounds.has_no_limits
        handoffs = self._slow_handoff_scores(candidates, request) if request.handoff_partner is not None else None
        places, all_weights = reader.all_places, reader.total_weight
        if weights is not reader.weights_by_place:  # they are raised for candidates with less than a full share
            reader.update_loads()
            all_weights = sum(weights)
        elif handoffs is None and bounds.takes_idle and not reader.are_slots_few:
            places = reader.places_to_score()
        held = all_weights / (reader.total_running or 1) or 1.0
        pace, share = self.decode_pace, _KV_SHARE / held
        slope, step = 2 * pace.slope, pace.step + pace.slope
        least, best_tier = _ANY, _LACKS_KV
        equal: list[int] = []
        seconds: list[float] = []
        charge = self.decode_memory.predict_kv_tokens(request) if bounds.knows_kv_capacity else 0.0
        for place in places:
            answers, weight, percent = running[place], weights[place], candidates[place].request_share_percent
            load = answers + share * weight
            score = (step + slope * load) * slowness[place]
            seconds.append(score)
            if percent != FULL_PERCENT:
                load = (load + 1) * FULL_PERCENT / percent - 1
                score = (step + slope * load) * slowness[place]
            if handoffs is not None:
                score += handoffs[place]
            tier = 0 if is_open else self._exclusion_tier(bounds, place, answers, weight, charge)
            if tier > best_tier:
                continue
            if tier < best_tier:
                best_tier, least = tier, _ANY
            if score < least * _BELOW:
                least, equal = score, [place]
            elif score <= least * _AS_GOOD:
                equal.append(place)
        idle = bounds.fastest_idle_places(_SHOWN_IDLE) if len(places) < len(running) else []
        shown, most = places + idle, 0.0
        answers_there = [running[place] for place in shown]
        if idle:
            seconds += [step * slowness[place] for place in idle]
            best = seconds[len(places)]
            if best_tier > 0 or best < least * _BELOW:
                least, equal = best, []
            if best <= least * _AS_GOOD:
                most = least * _AS_GOOD / step  # an idle candidate is as good as the best one up to this slowness
        if most and (equal or (len(idle) > 1 and slowness[idle[1]] <= most)):
            is_equal, busy = True, reader.busy_places
            chosen = self._next_flagged_place(
                reader.slots, lambda place: slowness[place] <= most if place not in busy else place in equal
            )
        elif len(equal) > 1:
            is_equal = True
            chosen = self._next_equal_place(reader.slots, equal)
        else:
            is_equal = False
            chosen = (equal or idle)[0]
        if idle and chosen not in shown:
            shown.append(chosen)
            answers_there.append(0)
            seconds.append(step * slowness[chosen])
        self.choice_snapshot = shown, answers_there, seconds, is_equal, handoffs
        return candidates[chosen]

    def _slow_handoff_scores(self, candidates: Sequence[Candidate], request: PickRequest) -> list[float] | None:
        """Return what slow handoffs add to the scores of the candidates. None: none of them is slow.

        A second until the first token counts as several seconds of the rest of the answer.
        """
        handoffs, partner = self.context.handoff_predictions, request.handoff_partner
        if handoffs is None or partner is None:
            return None
        extra = handoffs.extra_handoff_seconds(
            partner, candidates, request.prompt_tokens or request.decode_load.kv_tokens
        )
        if extra is None:
            return None
        pace = self.decode_pace
        unit = _FIRST_TOKEN_WEIGHT / max(1.0, self.decode_memory.likely_answer_tokens(request))
        if not pace.is_line_fitted:
            unit *= pace.step / _LIKELY_STEP_SECONDS
        return [unit * each for each in extra]

    def _exclusion_tier(
        self, bounds: _CandidateBounds, place: int, running_answers: int, held_tokens: int, charged_tokens: float
    ) -> int:
        """Return how little a candidate should get an answer with this charge. Within a tier the load decides."""
        if running_answers > 0 and held_tokens + charged_tokens > bounds.kv_capacities[place]:
            return _LACKS_KV
        if running_answers >= bounds.saturation_points[place]:
            return _IS_SATURATED
        return _IS_TRIED if running_answers >= bounds.preferred_answers[place] else 0

    def choice_reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        return EQUAL if snapshot[3] else LEAST_SECONDS

    def examined_candidates(self, snapshot: _Snapshot, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates with answers, and the fastest idle ones."""
        return [candidates[place] for place in snapshot[0]]

    def choice_figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        _, running, seconds, _, handoffs = snapshot
        if handoffs is None:
            return {"running": running, "token_seconds": seconds}, seconds
        scores = list(map(add, seconds, handoffs))
        return {"running": running, "token_seconds": seconds, "handoff_token_seconds": handoffs}, scores

    # For the queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its saturation point and has KV memory for one more answer."""
        if candidates is not self._known_candidates:
            if self.context.clock() >= self._next_look_at:
                self._update_bounds(candidates)
            else:
                self._known_candidates, self._candidate_bounds = candidates, self._make_bounds(candidates)
        bounds = self._candidate_bounds
        if not bounds.knows_saturation or self._has_free_candidate(bounds):
            return True
        if (
            not self._has_held
            and self.decode_pace.saturation_answers < _ANY
            and self.would_take_ignoring_learned(candidates)
        ):
            self._has_held = True
            logger.info(
                "decode policy: saturation point learned: requests wait before the limits of the engines are reached",
                extra={"fields": {"most_running": int(self.decode_pace.saturation_answers)}},
            )
        return False

    def should_admit_first(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Return whether the first request of the queue should go now, and not wait for a better backend.

        A request with a long prompt waits until it fits into the KV memory of a candidate.
        """
        if not self.has_room(candidates):
            return False
        bounds = self._candidate_bounds
        if not bounds.knows_kv_capacity:
            return True
        charge = self.decode_memory.predict_kv_tokens(request())
        held = bounds.slot_reader.held_kv_by_place
        return any(
            answers < bounds.saturation_points[place]
            and (not answers or held[place] + charge <= bounds.kv_capacities[place])
            for place, answers in enumerate(bounds.slot_reader.running_by_place)
        )

    def would_take_ignoring_learned(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its limit, ignoring learned limits.

        The KV of prompts counts. The learned saturation point and lengths of answers do not.
        """
        bounds = self._candidate_bounds if candidates is self._known_candidates else self._make_bounds(candidates)
        bounds.slot_reader.update_loads()
        held = bounds.slot_reader.held_kv_by_place
        return any(
            answers < bounds.running_limits[place] and (not answers or held[place] <= bounds.kv_for_prompts[place])
            for place, answers in enumerate(bounds.slot_reader.running_by_place)
        )

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        """See Policy: twice what the answer is predicted to gain.

        Without the limit the answer would share its decoder with all that wait, too. So it gains the time that each
        token of these saves. That is more with each of them, where the throughput falls further.
        """
        if (
            not self.decode_pace.idle_gain_seconds
            or not self._known_candidates
            or self._has_free_candidate(self._candidate_bounds)
        ):
            return _ANY
        bounds = self._candidate_bounds
        sharing = (bounds.slot_reader.total_running + waiting_count) / len(bounds.saturation_points)
        return (
            _HOLD_GAINS
            * self.decode_pace.greatest_gain_at(sharing)
            * sharing
            * self.decode_memory.likely_answer_tokens(request)
        )

    def learned_max_running(self, backend: Backend) -> int | None:
        """Return the number of running answers at a decoder's saturation point."""
        return None if self.decode_pace.saturation_answers == _ANY else int(self.decode_pace.saturation_answers)

    @property
    def append_harm_per_second(self) -> float | None:
        """See Policy."""
        return self.append_harm.harm_per_second

    def answers_within_pace(self, token_seconds: float) -> float | None:
        pace = self.decode_pace
        return max(1.0, (token_seconds - pace.step) / pace.slope) if pace.is_line_fitted else None

    def shortest_work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return what the answer takes of a decoder at its highest throughput; 0.0: not known."""
        return self.decode_pace.first_token_seconds * self.decode_memory.likely_answer_tokens(request)

    def _has_free_candidate(self, bounds: _CandidateBounds) -> bool:
        reader = bounds.slot_reader
        reader.update_loads()
        if bounds.takes_idle and len(reader.busy_places) < len(reader.all_places):
            return True
        held = reader.held_kv_by_place
        for place, answers in enumerate(reader.running_by_place):
            if answers < bounds.saturation_points[place] and not self._lacks_kv(bounds, place, answers, held[place]):
                return True
        return False

    def _lacks_kv(self, bounds: _CandidateBounds, place: int, running_answers: int, held_tokens: int) -> bool:
        """Return whether a candidate has no KV memory for one answer more, with `held_tokens` charged already.

        The next answer counts as the last ones did, but as no more than those here: after a few that were large, small
        ones must not go one by one.
        """
        return (
            running_answers > 0
            and held_tokens + min(self.decode_memory.mean_charged_tokens, held_tokens / running_answers)
            > bounds.kv_capacities[place]
        )

    # Charges

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return the prompt's KV and what the answer will probably add to it."""
        return Load(request.decode_load.compute_tokens, self.decode_memory.predict_kv_tokens(request))

    # Learning

    def start_tracker(self, backend: Backend, request: PickRequest) -> _DecoderAnswer:
        return _DecoderAnswer(self, backend, request)

    def begin_answer(self, answer: _DecoderAnswer, *, computes_prompt: bool = False) -> _DecoderActivity:
        """Record that a decoder writes one more answer, or until `end_prompt` that it computes its prompt."""
        now, backend = self.context.clock(), answer.backend
        decoder = self._decoders_by_name.get(backend.name)
        if decoder is None:
            decoder = self._decoders_by_name[backend.name] = _DecoderActivity(now, answer.decoder_kv)
        self._count_elapsed_time(backend, decoder, now)
        if computes_prompt:
            if not decoder.computing_prompts:
                for running in decoder.timed_answers:
                    running.begin_computing()
            decoder.computing_prompts += 1
        else:
            decoder.writing_answers += 1
            if answer.gap_counter is not None and len(decoder.timed_answers) < _MAX_TIMED:
                decoder.timed_answers[answer] = None
                if decoder.computing_prompts:
                    answer.begin_computing()
            answer.began = decoder.kv_memory.charged_tokens
        return decoder

    def end_prompt(self, answer: _DecoderAnswer, decoder: _DecoderActivity) -> None:
        """Record that a decoder has computed the prompt of an answer, or has given it up."""
        self._count_elapsed_time(answer.backend, decoder, self.context.clock())
        decoder.computing_prompts -= 1
        if not decoder.computing_prompts:
            for running in decoder.timed_answers:
                running.end_computing()

    def end_answer(self, answer: _DecoderAnswer, decoder: _DecoderActivity, answer_tokens: int | None) -> None:
        """Note that a decoder writes one answer less. It teaches if it is complete and its tokens are known."""
        now, backend = self.context.clock(), answer.backend
        self._count_elapsed_time(backend, decoder, now)
        decoder.writing_answers -= 1
        gaps = 0
        if answer in decoder.timed_answers and answer.gap_counter is not None:
            del decoder.timed_answers[answer]
            gaps = answer.gap_counter.timed_gaps
            if decoder.computing_prompts:
                answer.end_computing()
        if answer_tokens is not None and answer_tokens >= _MIN_TOKENS:
            computing = decoder.computing_seconds - answer.computing_seconds_before
            ended = _EndedAnswer(
                backend.name,
                answer.seconds_before_by_bucket,
                decoder.seconds_by_bucket.copy(),
                answer_tokens,
                gaps,
                answer.gaps_computing,
                computing,
            )
            self._pending_answers.add_sample(ended, answer.began_at, now)
            if len(self._pending_answers) % _BATCH_ANSWERS == 0:
                self._learn_pending()
        if now >= self._next_look_at:
            self._update_bounds(self._known_candidates)

    def _count_elapsed_time(self, backend: Backend, decoder: _DecoderActivity, now: float) -> None:
        """Count the time until now: the decoder has written the same number of answers."""
        if answers := decoder.writing_answers:
            if self.context.others_running_requests is not None:
                answers += self.context.others_running_requests(backend)
            place, spent = PLACES[answers] if answers < len(PLACES) else len(SIZES) - 1, decoder.seconds_by_bucket
            if place >= len(spent):
                spent += [0.0] * (place + 1 - len(spent))
            spent[place] += now - decoder.counted_until
            if decoder.computing_prompts:
                decoder.computing_seconds += now - decoder.counted_until
            decoder.kv_memory.charged_tokens += (
                (now - decoder.counted_until) * self._learned_rates[place] * decoder.speed_factor
            )
        decoder.counted_until = now

    def _update_bounds(self, candidates: Sequence[Candidate]) -> None:
        """Use what was learned for choosing among these from now on."""
        now = self.context.clock()
        self._next_look_at = now + _LOOK_SECONDS
        self._learn_pending()
        before = self.decode_pace.saturation_answers
        self.decode_pace.update_saturation(now)
        if self.decode_pace.saturation_answers == _ANY and before < _ANY:
            self._log_dropped_saturation(before)
        self._learned_rates = self.decode_pace.rates_by_bucket
        for name, known in self._decoders_by_name.items():
            known.speed_factor = 1 / self.decode_pace.slowness_of(name)
        present = {candidate.backend.name for candidate in candidates}
        for name in [
            name
            for name, known in self._decoders_by_name.items()
            if name not in present and not known.writing_answers | known.computing_prompts
        ]:
            del self._decoders_by_name[name]
            self.decode_pace.forget_backend(name)
        for name in [name for name in self.decode_memory.kv_by_decoder if name not in present]:
            self.decode_memory.forget_decoder(name)
        if candidates:
            bounds = self._make_bounds(candidates)
            if bounds.knows_kv_capacity:
                names = [candidate.backend.name for candidate in candidates]
                filled = zip(names, bounds.kv_capacities, bounds.slot_reader.held_kv_by_place, strict=True)
                self._fill_by_decoder = self.decode_memory.measure_fill(
                    [name for name, most, held in filled if held > _MIN_FILL * most]
                )
                bounds = self._make_bounds(candidates)
            self._known_candidates, self._candidate_bounds = candidates, bounds

    def _log_dropped_saturation(self, most: float) -> None:
        held, self._has_held = self._has_held, False
        if held:
            why = (
                "throughput was not higher at this point"
                if self.decode_pace.is_saturation_doubted
                else "it is no longer certain"
            )
            logger.log(
                logging.WARNING if self.decode_pace.is_saturation_doubted else logging.INFO,
                "decode policy: learned saturation point dropped: %s",
                why,
                extra={"fields": {"most_running": int(most)}},
            )

    def _learn_pending(self) -> None:
        """Learn from the answers that ended, in their order, as far as it is known whether the event loop was late."""
        for ended, at, is_timely in self._pending_answers.take_settled():
            if is_timely:
                both = zip_longest(ended.seconds_before_by_bucket, ended.seconds_by_bucket, fillvalue=0.0)
                spent = [(place, after - before) for place, (before, after) in enumerate(both) if after > before]
                self.decode_pace.learn_from_answer(ended.decoder_name, spent, ended.answer_tokens - 1, at)
                if ended.timed_gaps:
                    self.append_harm.learn_from_answer(
                        ended.timed_gaps,
                        sum([seconds for _, seconds in spent]),
                        gaps_computing=ended.gaps_computing,
                        seconds_computing=ended.seconds_computing,
                    )

    def _make_bounds(self, candidates: Sequence[Candidate]) -> _CandidateBounds:
        pace = self.decode_pace
        most = [pace.saturation_answers] * len(candidates)
        # Each decoder is the one that finds out in turn.
        scout = int(self._next_look_at / TRUSTED_SECONDS) % len(most)
        most[scout] = pace.scout_max_answers
        preferred = most.copy()
        if pace.scout_preferred_answers < _ANY and len(most) > 1:
            preferred = [min(each, pace.max_answers_seen) for each in most]
            preferred[scout] = pace.scout_preferred_answers
        backends = [candidate.backend for candidate in candidates]
        facts = [self.context.facts_of_engine(backend) for backend in backends]
        limits = [_ANY if candidate.max_running is None else float(candidate.max_running) for candidate in candidates]
        slots = [backend.slot for backend in backends]
        reader = candidates[0].scoreboard.reader_of(slots, *WEIGHTS[Role.DECODE])
        prompts = kv = [
            _ANY if each is None or each.kv_memory_tokens is None else float(each.kv_memory_tokens) for each in facts
        ]
        if min(kv) < _ANY:
            fills = [self._fill_by_decoder.get(backend.name, _AS_CHARGED) for backend in backends]
            prompts = [_OVERFULL * most / fill.prompts_share for most, fill in zip(kv, fills, strict=True)]
            kv = [_FULL * most / fill.needed_share for most, fill in zip(kv, fills, strict=True)]
        return _CandidateBounds(
            slot_reader=reader,
            running_limits=limits,
            saturation_points=list(map(min, most, limits)),
            preferred_answers=list(map(min, preferred, limits)),
            kv_capacities=kv,
            kv_for_prompts=prompts,
            slowness_factors=[pace.slowness_of(backend.name) for backend in backends],
        )
