"""Policy `least_load` for prefillers: a prompt goes to the backend whose prefill will probably end first.

The score of a backend is the time until it is free plus the prefill time of this prompt, both in seconds and learned
from answers. Tokens that are probably in its prefix cache cost nothing. This is Mooncake's Algorithm 1 (FAST'25) with
two differences. Nothing is fitted offline. And the prefill time counts more the busier all prefillers are, because it
delays later prompts.
"""

from __future__ import annotations

from math import inf
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from proxy.balancer.pick import CACHED_PREFIX, EQUAL, LEAST_SECONDS, WORKING_SET, PickPrediction
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.policies.prefill_cost import (
    MIN_CACHED_PROMPT_TOKENS,
    SECONDS_PER_LOAD,
    PromptCosts,
    make_prompt_costs,
)
from proxy.balancer.policies.prefiller import Prefiller, Prefillers
from proxy.balancer.shared.memory import AGEING
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext, RoutingSubject
    from proxy.balancer.policies.prefill_cost import SentPrompt
    from proxy.common.backend import Backend

# Scores are equal if they differ by less than this share and this time, which is the precision of predictions.
_TIE_SHARE: Final = 0.05
_TIE_SECONDS: Final = 0.02
# Number of leading pieces of a first turn that identify its kind, such as a common system prompt.
_KIND_PIECES: Final = 8
# Upper bound of the ratio of busy to idle backends, and the share of busy ones at this bound.
_MAX_CROWDING: Final = 6.0
_MAX_BUSY: Final = _MAX_CROWDING / (1 + _MAX_CROWDING)
# Weight of a new value in the mean share of busy backends.
_BUSY_STEP: Final = 0.02
# The lag of the event loop is updated at this interval. It is the maximum over the time below.
_LAG_LOOK_SECONDS: Final = 1.0
_LAG_SECONDS: Final = 15.0
# Maximum time that a request waits for a busy prefiller, as a multiple of its predicted wait.
_HOLD_WAITS: Final = 2.0
# Weights of a token of compute, and of a token of KV that no decoder has pulled yet, which takes memory and no time.
_WEIGHTS: Final = 100, 3
_SECONDS_PER_WEIGHT: Final = SECONDS_PER_LOAD / _WEIGHTS[0]
# Number of idle prefillers in the figures of a choice.
_SHOWN_IDLE: Final = 8
# Request, chosen prefiller, costs of the prompt, number of cached pieces, and prefill time in seconds.
_PrefillChoice = tuple["PickRequest", Prefiller, PromptCosts, int, float]


class _PrefillScores:
    """Scores of prefillers for one prompt. The lists have the same order.

    The prefillers that have work or may have the prefix are scored one by one. All others differ only in their speed,
    so the fastest of them stand for these at the end of the lists.
    """

    def __init__(
        self, scored_places: list[int], wait_seconds: list[float], plain_seconds: float, work_weight: float
    ) -> None:
        self.scored_places = scored_places
        """Places of the prefillers."""
        self.wait_seconds = wait_seconds
        """Seconds until each of them is free."""
        self.work_seconds: list[float] = []
        """Prefill times in seconds."""
        self.total_scores: list[float] = []
        self.score_count = len(scored_places)
        """Number of prefillers that are scored one by one."""
        self.plain_seconds = plain_seconds
        """Prefill time without the prefix on a prefiller of normal speed."""
        self.work_weight = work_weight
        """Weight of the prefill time in a score."""
        self.near_score = 0.0
        """The highest score that counts as equal to the lowest."""
        self.admitted_scores: _PrefillScores | None = None
        """Scores by which the request has left the queue: only the prefillers that were near may be chosen. None: it
        was not in the queue."""

    @property
    def has_unscored_idle(self) -> bool:
        """Whether a prefiller that is not scored one by one is as good as the best one."""
        return len(self.total_scores) > self.score_count and self.total_scores[self.score_count] <= self.near_score

    def is_unscored_as_good(self, slowness: float) -> bool:
        """Return whether a prefiller of this slowness that is not scored one by one is as good as the best one."""
        is_near = self.work_weight * (self.plain_seconds * slowness) <= self.near_score
        return is_near and (self.admitted_scores is None or self.admitted_scores.is_unscored_as_good(slowness))

    def index_of_lowest_score(self) -> int:
        """Return the index of the lowest score; of equal ones, that of the first place."""
        least = min(self.total_scores)
        found = self.total_scores.index(least)
        for index in range(found + 1, len(self.total_scores)):
            if self.total_scores[index] == least and self.scored_places[index] < self.scored_places[found]:
                found = index
        return found


class _AdmittedRequest(NamedTuple):
    """A request that left the queue for its best prefillers."""

    request_subject: object
    prefillers: Sequence[Prefiller]
    """The prefillers by place."""
    best_places: Set[int]
    """Places of the best ones of those that were scored one by one."""
    scores: _PrefillScores


# The scores, the index of the chosen prefiller in them, whether several were equal, the probably cached tokens of each
# (None: the cache was not looked up), and whether the request has waited for its session.
_ChoiceSnapshot = tuple[_PrefillScores, int, bool, "Sequence[float] | None", bool]


class LeastSeconds(LeastTokens):
    """The policy `least_load` for prefillers.

    It scores those that have work or may have the prefix, and the fastest idle ones. So a choice does not cost more in
    a larger fleet, except between equal prefillers for a long prompt without a hit.
    """

    policy_name = "least_load"
    keeps_weights = False
    load_weights = _WEIGHTS
    crowding_factor = 1.0
    """Weight of the delay of later prompts. 0: it does not count."""
    send_ahead_seconds = 0.05
    """Send the next prompt once less than this, plus the recent lag of the event loop, is left to compute. That hides
    the round trip."""
    max_batch_tokens = 16_384
    """Maximum uncached tokens on a backend while pdproxy tests whether it computes several prompts at a time."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._prefillers = Prefillers(self.context, _WEIGHTS)
        self.working_sets = self._session_limits = self._prefillers.working_sets
        self._busy_share = 0.0
        self._loop_lag_seconds = 0.0  # maximum recent lag of the event loop, in seconds
        self._next_lag_look_at = -inf  # time of the next update of `_loop_lag_seconds`
        self._waiting_costs: dict[int, PromptCosts] = {}  # costs of waiting prompts, by the ID of the subject
        self._waiting_work_seconds: dict[int, float] = {}  # prefill times of waiting prompts, by the same ID
        self._admitted: _AdmittedRequest | None = None  # the request that was admitted last, until it is sent
        self._chosen: _PrefillChoice | None = None
        self._waited: RoutingSubject | None = None  # subject that left the queue last

    # Choice

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Return the candidate that completes the prompt first.

        Among equal candidates, a hash of the session or of the beginning of the prompt selects one. So gateways choose
        alike without sharing state, also if keys differ, for example because the URL of an image changes. Short prompts
        and prompts without a session and keys go to the least loaded candidate.
        """
        known = self._prefillers
        prefillers = known.prefillers_of(candidates)
        prompt = self._waiting_costs.get(id(request.request_subject or request)) if self._waiting_costs else None
        if prompt is None:
            prompt = make_prompt_costs(request)
        # Raised weights are those of all candidates, so all are scored one by one.
        places, reader = known.slot_reader.all_places, known.slot_reader
        if weights is reader.weights_by_place and not reader.are_slots_few:
            places = reader.places_to_score()
        now, unit = self.context.clock(), _SECONDS_PER_WEIGHT
        waits = [
            prefillers[each].remaining_seconds(weights[each] * unit, now) if weights[each] else 0.0 for each in places
        ]
        scores = self._score_candidates(prompt, places, waits)
        place, is_equal, has_waited = 0, False, False
        home = self._home_of_session(prompt, request) if self._session_limits.are_limits_active else None
        if home is not None:
            place, has_waited = home
        elif len(candidates) > 1:
            if self._admitted is not None and self._admitted.request_subject is (request.request_subject or request):
                scores = self._restrict_scores(scores, self._admitted)
            place, is_equal = self._place_of_soonest(candidates, weights, request, prompt, scores)
        self._admitted = None
        if place not in scores.scored_places:
            scores.scored_places.append(place)
            scores.wait_seconds.append(0.0)
            scores.work_seconds.append(scores.plain_seconds * prefillers[place].slowness)
        index, hit = scores.scored_places.index(place), 0
        cached: list[float] | None = None
        if prompt.prefix_keys:
            hits = [
                known.predict_cost_on(prefillers[each], prompt)[0]
                for each in scores.scored_places[: scores.score_count]
            ]
            hits += [0] * (len(scores.scored_places) - scores.score_count)
            hit, cached = hits[index], [prompt.piece_ends[each - 1] if each else 0.0 for each in hits]
        self._chosen = request, prefillers[place], prompt, hit, scores.work_seconds[index]
        self.choice_snapshot = scores, index, is_equal, cached, has_waited
        return candidates[place]

    def _place_of_soonest(
        self,
        candidates: Sequence[Candidate],
        weights: Sequence[int],
        request: PickRequest,
        prompt: PromptCosts,
        scores: _PrefillScores,
    ) -> tuple[int, bool]:
        """Return the place of the chosen prefiller, and whether others are equal."""
        known, near = self._prefillers, scores.near_score
        prefillers, places, count = known.prefillers, scores.scored_places, scores.score_count
        equal = [place for place, score in zip(places, scores.total_scores, strict=True) if score <= near]
        if len(equal) == 1:
            return equal[0], False
        has_idle = scores.has_unscored_idle
        if not prompt.prefix_keys and (prompt.prompt_tokens < MIN_CACHED_PROMPT_TOKENS or request.session is None):
            tied: list[int] = []
            lowest = 0 if has_idle else weights[equal[0]]
            for place in equal:
                if weights[place] < lowest:
                    lowest, tied = weights[place], []
                if weights[place] == lowest:
                    tied.append(place)
            if not has_idle:
                tied.sort()
                return self._next_equal_place(known.slot_reader.slots, tied), True
            scored = set(places[:count])
            return self._next_flagged_place(
                known.slot_reader.slots,
                lambda place: (
                    place in tied if place in scored else scores.is_unscored_as_good(prefillers[place].slowness)
                ),
            ), True
        if prompt.prefix_keys and any(known.predict_cost_on(prefillers[place], prompt)[0] for place in equal):
            return places[scores.index_of_lowest_score()], True
        session = request.session
        if session is not None:
            kind = crc32(session.encode(errors="surrogatepass"))
        else:
            kind = prompt.prefix_keys[min(len(prompt.prefix_keys), _KIND_PIECES) - 1] & 0xFFFFFFFF
        if has_idle:
            scored = set(places[:count])
            equal = [place for place in equal if place in scored]
            for place in known.fastest_idle_places(scored, len(candidates)):
                if not scores.is_unscored_as_good(prefillers[place].slowness):
                    break
                equal.append(place)
        equal.sort()
        return max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind)), True

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return the predicted prefill time, converted to tokens, and the KV of the prompt."""
        return Load(
            round(self._last_choice_for(backend, request)[4] / SECONDS_PER_LOAD), request.prefill_load.kv_tokens
        )

    def _last_choice_for(self, backend: Backend, request: PickRequest) -> _PrefillChoice:
        """Return the last choice, or compute it if the pool has chosen this backend without the policy."""
        chosen = self._chosen
        if chosen is None or chosen[0] is not request or chosen[1].backend is not backend:
            prefiller, prompt = self._prefillers.prefiller_of(backend), make_prompt_costs(request)
            chosen = self._chosen = request, prefiller, prompt, *self._prefillers.predict_cost_on(prefiller, prompt)
        return chosen

    # Outcome

    def start_tracker(self, backend: Backend, request: PickRequest) -> SentPrompt:
        """Note that the prompt was sent. It counts as cached at once, or a burst of equal prompts would scatter."""
        _, prefiller, prompt, hit, seconds = self._last_choice_for(backend, request)
        self._chosen = None
        compute = round(seconds / SECONDS_PER_LOAD)
        now = self.context.clock()
        sent = prefiller.add_prompt(prompt, hit, seconds, compute, request.prefill_load.kv_tokens, now)
        if prompt.prefix_keys:
            has_waited, self._waited = self._waited is not None and self._waited is request.request_subject, None
            sent.resident_tokens = self._session_limits.record_sent_prompt(
                prefiller.cached_prefixes, prompt, request.session, sent, has_waited
            )
        # The charge allows for expected cache hits that fail. The reported prediction does not.
        cached = sent.predicted_cached_tokens
        expected = (
            self._prefillers.prefill_cost.predict_seconds(
                prompt.prompt_tokens - cached, cached, sent.predicted_loaded_tokens
            )
            * prefiller.slowness
        )
        sent.policy_prediction = PickPrediction(sent.predicted_wait_seconds + expected, round(cached))
        return sent

    def choice_reason(self, snapshot: _ChoiceSnapshot, backend: Backend) -> str:
        scores, index, is_equal, cached, has_waited = snapshot
        if has_waited:
            return WORKING_SET
        if cached is not None:
            soon, hit = scores.wait_seconds[index] + _TIE_SECONDS, cached[index]
            if any(wait <= soon and tokens < hit for wait, tokens in zip(scores.wait_seconds, cached, strict=True)):
                return CACHED_PREFIX
        return EQUAL if is_equal else LEAST_SECONDS

    def examined_candidates(self, snapshot: _ChoiceSnapshot, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates with work or with the prefix, and the fastest idle ones."""
        return [candidates[place] for place in snapshot[0].scored_places]

    def choice_figures(self, snapshot: _ChoiceSnapshot, weights: Sequence[int]) -> Columns:
        scores, _, _, cached, _ = snapshot
        columns: dict[str, Sequence[float]] = {"wait_seconds": scores.wait_seconds, "work_seconds": scores.work_seconds}
        if cached is not None:
            columns["cached_tokens"] = cached
        return columns, [*map(add, scores.wait_seconds, scores.work_seconds)]

    def forget_cache(self, backend: Backend) -> None:
        prefiller = self._prefillers.prefiller_of(backend)
        prefiller.forget_cache()
        self._session_limits.forget_cache(prefiller.cached_prefixes)

    def soonest_completion_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """Return the least sum of a prefiller's wait and its prefill time for the prompt."""
        known = self._prefillers
        known.prefillers_of(candidates)
        prompt = make_prompt_costs(request)
        known.slot_reader.update_loads()
        places = known.slot_reader.places_to_score()
        waits = self._wait_seconds_of(places, known.slot_reader.compute_by_place, self.context.clock())
        scores = self._score_candidates(prompt, places, waits)
        return min(map(float.__add__, scores.wait_seconds, scores.work_seconds))

    def queue_relief_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        if not self._waiting_costs:
            return 0.0
        self._prefillers.prefillers_of(candidates)
        return len(self._waiting_costs) * self._shortest_prefill_seconds(make_prompt_costs(request)) / len(candidates)

    def queue_wait_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        return sum(self._waiting_work_seconds.values()) / len(candidates)

    def record_local_turn(self, request: PickRequest) -> None:
        """Count the turn for its session, so that the session gives way to others as if prefillers computed it."""
        keys = make_prompt_costs(request).prefix_keys
        if keys:
            self._session_limits.record_local_turn(keys, request.session, self.context.clock())

    def predicted_prefill_seconds(self, uncached_tokens: float, cached_tokens: float) -> float:
        return self._prefillers.prefill_cost.predict_seconds(uncached_tokens, cached_tokens)

    def working_set_tokens(self, backend: Backend) -> Mapping[str, float]:
        home = self._session_limits.sets_by_cache.get(self._prefillers.prefiller_of(backend).cached_prefixes)
        if home is None:
            return {}
        return {"used": home.used_tokens} | ({"limit": home.limit_tokens} if home.limit_tokens < inf else {})

    @property
    def remembered_prefixes(self) -> int:
        return sum(len(prefiller.cached_prefixes) for prefiller in self._prefillers.prefillers_by_key.values())

    # Queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate would begin with a prompt almost at once."""
        return self._have_all_room(candidates) is not False

    def should_admit_first(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Return whether the first request of the queue should go now, and not wait for a better backend.

        If all candidates have room, there is nothing to wait for.
        """
        has_room = self._have_all_room(candidates)
        if has_room is None:
            return self.index_to_admit(candidates, [request()]) is not None
        return has_room

    def shortest_work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        subject = id(request.request_subject or request)
        prompt = self._waiting_costs[subject] = make_prompt_costs(request)
        self._session_limits.record_arrival(prompt.prefix_keys, request.session, self.context.clock())
        self._prefillers.prefillers_of(candidates)
        seconds = self._waiting_work_seconds[subject] = self._shortest_prefill_seconds(prompt)
        return seconds

    def on_left_queue(self, request: PickRequest) -> None:
        """Drop the predicted costs of a prompt that has left the queue."""
        self._waited = request.request_subject
        prompt = self._waiting_costs.pop(id(request.request_subject or request), None)
        if prompt is not None:
            self._session_limits.record_left_queue(prompt.prefix_keys, request.session, self.context.clock())
        self._waiting_work_seconds.pop(id(request.request_subject or request), None)

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        """Return twice the predicted wait, if engines were learned to compute prompts in order.

        The wait is the time until a prefiller is free, plus the work of all waiting prompts and of later, shorter ones.
        """
        known = self._prefillers
        prefillers = known.prefillers
        if request is None or not prefillers:
            return inf
        known.slot_reader.update_loads()
        if known.slot_reader.computing_count < len(prefillers):
            return inf  # the request waits for decoders
        places, loads = known.slot_reader.all_places, known.slot_reader.compute_by_place
        waits = self._wait_seconds_of(places, loads, self.context.clock())
        if any(map(self._may_get_next_prompt, known.candidates, prefillers, waits, loads)):
            return inf
        work = self._shortest_prefill_seconds(make_prompt_costs(request))
        return _HOLD_WAITS * (min(waits) + sum(self._waiting_work_seconds.values()) / len(prefillers) + work / AGEING)

    def _shortest_prefill_seconds(self, prompt: PromptCosts) -> float:
        """Return the shortest prefill time of a prompt."""
        return min(self._score_candidates(prompt, [], []).work_seconds)

    def index_to_admit(self, candidates: Sequence[Candidate], waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the index of the first request whose best prefiller has room.

        The requests before it wait for other prefillers. The work of each counts for those that wait behind it.
        """
        known = self._prefillers
        prefillers = known.prefillers_of(candidates)
        known.slot_reader.update_loads()
        now, loads, places = (
            self.context.clock(),
            known.slot_reader.compute_by_place,
            known.slot_reader.places_to_score().copy(),
        )
        waits = self._wait_seconds_of(places, loads, now)
        held_back = {
            place
            for place, wait in zip(places, waits, strict=True)
            if not self._may_get_next_prompt(candidates[place], prefillers[place], wait, loads[place])
        }
        for number, request in enumerate(waiting_requests):
            prompt = self._waiting_costs.get(id(request.request_subject or request)) or make_prompt_costs(request)
            scores = self._score_candidates(prompt, places, waits)
            home = self._home_of_session(prompt, request) if self._session_limits.are_limits_active else None
            best: set[int] = set()
            for index in range(scores.score_count):
                place = scores.scored_places[index]
                if (scores.total_scores[index] <= scores.near_score if home is None else place == home[0]) and (
                    place not in held_back or self._should_join_step(index, scores, prompt, now)
                ):
                    best.add(place)
            if best or (
                scores.has_unscored_idle if home is None else home[0] not in scores.scored_places[: scores.score_count]
            ):
                self._admitted = _AdmittedRequest(request.request_subject or request, prefillers, best, scores)
                return number
            soonest = scores.index_of_lowest_score()
            if soonest < len(places):
                waits[soonest] += scores.work_seconds[soonest]
            else:
                places.append(scores.scored_places[soonest])
                waits.append(scores.work_seconds[soonest])
        return None

    def _should_join_step(self, index: int, scores: _PrefillScores, prompt: PromptCosts, now: float) -> bool:
        """Return whether a prompt should join the next step of a prefiller, if it has room in it."""
        prefiller = self._prefillers.prefillers[scores.scored_places[index]]
        if not self._has_room_in_step(prefiller):
            return False
        # If the prompt takes equally long everywhere, waiting for another prefiller gains nothing.
        if prefiller.fits_in_step(prompt.prompt_tokens) and self._are_times_equal(scores):
            return True
        return prefiller.is_step_ending(now) and self._should_join_next_step(prefiller, scores.work_seconds[index])

    def _are_times_equal(self, scores: _PrefillScores) -> bool:
        """Return whether a prompt takes equally long on all prefillers."""
        seconds, prefillers = scores.work_seconds.copy(), self._prefillers.prefillers
        if len(scores.scored_places) > scores.score_count:
            for place in self._prefillers.fastest_idle_places(
                set(scores.scored_places[: scores.score_count]), len(prefillers)
            ):
                seconds.append(scores.plain_seconds * prefillers[place].slowness)
        return max(seconds) <= min(seconds) * (1 + _TIE_SHARE)

    def _home_of_session(self, prompt: PromptCosts, request: PickRequest) -> tuple[int, bool] | None:
        """Return the place of the prefiller where the session of a prompt is a resident, or None if there is none.

        The second value is whether the request has waited for that place.
        """
        session = self._session_limits.find_session(prompt.prefix_keys, request.session, self.context.clock())
        if session is None or not session.is_resident or session.prefiller_cache is None:
            return None
        place = self._prefillers.place_of.get(session.prefiller_cache)
        return None if place is None else (place, session.is_placed)

    def _may_get_next_prompt(self, candidate: Candidate, prefiller: Prefiller, wait: float, load: int) -> bool:
        """Return whether a prefiller may get the next prompt.

        It may if its work is nearly done, if its order of prompts is unknown, so that nothing is held back from it, or
        to test whether it computes several prompts at a time.
        """
        if not load:
            return True
        limit = candidate.max_running
        if limit is not None and not candidate.has_room:
            return False
        if wait < self.send_ahead_seconds + self._loop_lag_seconds:
            return True
        if limit == 1:
            return False
        concurrency = prefiller.concurrency_estimate
        if not concurrency.computes_in_order:
            return True
        # The test would be expensive behind long prompts. The tokens of passed-through requests are unknown.
        return prefiller.uncached_tokens < self.max_batch_tokens * concurrency.lane_count and (
            prefiller.in_flight_count < concurrency.target_in_flight
            or (prefiller.has_prompts_in_flight and not prefiller.uncached_tokens)
        )

    def _has_room_in_step(self, prefiller: Prefiller) -> bool:
        """Return whether a prefiller computes in steps of several prompts, in order, and the next one has room."""
        concurrency = prefiller.concurrency_estimate
        return (
            prefiller.shared_step_seconds > 0
            and bool(concurrency.computes_in_order)
            and prefiller.tokens_behind_step < prefiller.step_capacity_tokens * concurrency.target_in_flight
            and concurrency.lane_count == 1
        )

    def _should_join_next_step(self, prefiller: Prefiller, seconds: float) -> bool:
        """Return whether a prompt should join the next step rather than the one after it.

        The cost: the prompts of the next step wait for this prompt's own time. The gain: one step less, whose shared
        time is saved for this prompt, for its share of waiting prompts, and for the prompts that arrive meanwhile.
        """
        shared, share = prefiller.shared_step_seconds, len(self._waiting_costs) / len(self._prefillers.prefillers)
        return prefiller.prompts_behind_step * (seconds - shared) < shared * (1 + share + self._expected_arrivals)

    # Scores

    def _have_all_room(self, candidates: Sequence[Candidate]) -> bool | None:
        """Return whether all candidates have room. None: some of them have."""
        known = self._prefillers
        prefillers = known.prefillers_of(candidates)
        reader, count = known.slot_reader, len(prefillers)
        reader.update_loads()
        idle = (count - reader.computing_count) / count
        self._busy_share += _BUSY_STEP * (1 - idle - self._busy_share)
        if idle == 1:
            return True
        now = self.context.clock()
        if now >= self._next_lag_look_at:
            self._next_lag_look_at = now + _LAG_LOOK_SECONDS
            lag = self.context.loop_lag_within(now - _LAG_SECONDS, now - _LAG_LOOK_SECONDS)
            self._loop_lag_seconds = self._loop_lag_seconds if lag is None else lag
        is_any_free, are_all_free, places = idle > 0, True, reader.places_to_score()
        for place in places:
            prefiller, candidate, load = prefillers[place], candidates[place], reader.compute_by_place[place]
            # Without a limit and a known order the wait does not count.
            is_unlimited = candidate.max_running is None and not prefiller.concurrency_estimate.computes_in_order
            wait = 0.0 if is_unlimited or not load else prefiller.remaining_seconds(load * SECONDS_PER_LOAD, now)
            if is_unlimited or self._may_get_next_prompt(candidate, prefiller, wait, load):
                is_any_free = True
            else:
                are_all_free = False
            if is_any_free and not are_all_free:
                return None
        if are_all_free:
            return True
        return None if any(self._has_room_in_step(prefillers[place]) for place in places) else False

    @property
    def _expected_arrivals(self) -> float:
        """Expected number of prompts that arrive before a busy prefiller is idle again."""
        return self._busy_share / (1 - self._busy_share) if self._busy_share < _MAX_BUSY else _MAX_CROWDING

    def _score_candidates(self, prompt: PromptCosts, places: Sequence[int], waits: Sequence[float]) -> _PrefillScores:
        """Return the scores of the candidates for a prompt.

        Args:
            prompt: The prompt.
            places: Places of the prefillers that may not be idle.
            waits: Seconds until each of them is free.
        """
        known, work_weight = self._prefillers, 1 + self.crowding_factor * self._expected_arrivals
        prefillers, is_unknown = known.prefillers, prompt.pick_request.request_subject is None
        if is_unknown:
            plain = prompt.pick_request.prefill_load.compute_tokens * SECONDS_PER_LOAD
        else:
            plain = known.prefill_cost.predict_seconds(prompt.prompt_tokens, 0.0)
        found, handoffs = _PrefillScores([*places], [*waits], plain, work_weight), self.context.handoff_predictions
        places, waits = found.scored_places, found.wait_seconds
        far: Sequence[int] = ()
        if handoffs is not None and handoffs.far_prefillers:
            far = [known.place_of[key] for key in handoffs.far_prefillers if key in known.place_of]
        if len(places) < len(prefillers):
            scored = set(places)
            # A passed-through request takes the same time everywhere, whatever the speed.
            for place in range(len(prefillers)) if is_unknown else (*known.places_with_prefix(prompt), *far):
                if place not in scored:
                    scored.add(place)
                    places.append(place)
                    waits.append(0.0)
            found.score_count = len(places)
            places += known.fastest_idle_places(scored, _SHOWN_IDLE)
            waits += [0.0] * (len(places) - found.score_count)
        work = [plain] * len(places) if is_unknown else [plain * prefillers[place].slowness for place in places]
        if prompt.prefix_keys:
            for index in range(found.score_count):
                work[index] = known.predict_cost_on(prefillers[places[index]], prompt)[1]
        found.work_seconds = work
        found.total_scores = scores = [wait + work_weight * seconds for wait, seconds in zip(waits, work, strict=True)]
        if far and handoffs is not None:
            backends = [known.candidates[place].backend for place in far]
            for place, seconds in zip(
                far, handoffs.least_extra_handoff_seconds(backends, round(prompt.prompt_tokens)), strict=True
            ):
                index = places.index(place)
                scores[index] = waits[index] + seconds + work_weight * work[index]
        least = min(scores)
        found.near_score = least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))
        return found

    def _restrict_scores(self, scores: _PrefillScores, admitted: _AdmittedRequest) -> _PrefillScores:
        """Return the scores of only the prefillers for which the request has left the queue, if there are any."""
        prefillers, before = self._prefillers.prefillers, admitted.scores
        was_scored, best = set(before.scored_places[: before.score_count]), admitted.best_places
        if admitted.prefillers is not prefillers:  # the candidates have changed
            places = {prefiller: place for place, prefiller in enumerate(prefillers)}
            now = {place: places.get(prefiller, -1) for place, prefiller in enumerate(admitted.prefillers)}
            was_scored, best = {now[place] for place in was_scored} - {-1}, {now[place] for place in best}
        left = _PrefillScores(
            scores.scored_places[: scores.score_count],
            scores.wait_seconds[: scores.score_count],
            scores.plain_seconds,
            scores.work_weight,
        )
        left.work_seconds, left.total_scores, left.admitted_scores = (
            scores.work_seconds[: scores.score_count],
            scores.total_scores[: scores.score_count],
            before,
        )
        for place in was_scored.difference(left.scored_places):  # these are idle now
            left.scored_places.append(place)
            left.wait_seconds.append(0.0)
            left.work_seconds.append(scores.plain_seconds * prefillers[place].slowness)
            left.total_scores.append(scores.work_weight * left.work_seconds[-1])
        left.score_count = len(left.scored_places)
        for index, place in enumerate(left.scored_places):
            if not (place in best if place in was_scored else before.is_unscored_as_good(prefillers[place].slowness)):
                left.total_scores[index] = inf
        for index in range(scores.score_count, len(scores.scored_places)):
            place = scores.scored_places[index]
            if place not in was_scored:
                left.scored_places.append(place)
                left.wait_seconds.append(0.0)
                left.work_seconds.append(scores.work_seconds[index])
                left.total_scores.append(
                    scores.total_scores[index] if before.is_unscored_as_good(prefillers[place].slowness) else inf
                )
        if not left.total_scores or min(left.total_scores) == inf:
            return scores
        least = min(left.total_scores)
        left.near_score = least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))
        return left

    def _wait_seconds_of(self, places: Sequence[int], loads: Sequence[int], now: float) -> list[float]:
        """Return the time until each of some prefillers is free, in seconds. `loads`: compute load by place."""
        prefillers, unit = self._prefillers.prefillers, SECONDS_PER_LOAD
        return [
            prefillers[place].remaining_seconds(loads[place] * unit, now) if loads[place] else 0.0 for place in places
        ]
