"""The policies `least_load` without shortcuts: each choice scores all candidates, from the scoreboard itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import add
from typing import Any
from zlib import crc32

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.pick import CACHED_PREFIX, EQUAL, LEAST_SECONDS, WORKING_SET, Candidate, PickRequest
from proxy.balancer.policies import least_decode_seconds, least_seconds
from proxy.balancer.policies.least_decode_seconds import LeastDecodeSeconds
from proxy.balancer.policies.least_seconds import LeastSeconds
from proxy.balancer.policies.prefill_cost import (
    MIN_CACHED_PROMPT_TOKENS,
    SECONDS_PER_LOAD,
    PromptCosts,
    make_prompt_costs,
)
from proxy.balancer.policies.prefiller import Prefiller
from proxy.balancer.policies.working_sets import CachedSession
from proxy.balancer.shared.memory import AGEING
from proxy.common.backend import Backend


def take_turn(policy: Any, candidates: Sequence[Candidate]) -> Candidate:
    later = [place for place, candidate in enumerate(candidates) if candidate.backend.slot > policy._last_slot]
    place = later[0] if later else 0
    policy._last_slot = candidates[place].backend.slot
    return candidates[(place + policy.context.worker_number) % len(candidates)]


class ScanningSeconds(LeastSeconds):
    """The policy for prefillers."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        prefillers = self._prefillers.prefillers_of(candidates)
        prompt = self._waiting_costs.get(id(request.request_subject or request)) or make_prompt_costs(request)
        waits = self.all_waits(prefillers, weights, least_seconds._SECONDS_PER_WEIGHT)
        work = self.all_work(prefillers, prompt)
        place, is_equal, has_waited = 0, False, False
        session = self.resident(prompt, request)
        if session is not None:
            has_waited = session.is_placed
        if len(candidates) > 1:
            decided, among = self._admitted, None
            if session is not None:
                among = [prefiller.cached_prefixes is session.prefiller_cache for prefiller in prefillers]
            elif decided is not None and decided[0] is (request.request_subject or request):
                among = [prefiller in decided[1] for prefiller in prefillers]
            scores, near = self.all_scores(self.with_handoffs(candidates, waits, prompt), work, among)
            place, is_equal = self.soonest(candidates, weights, request, prompt, scores, near)
        self._admitted = None
        hit, cached = 0, None
        if prompt.prefix_keys:
            hits = [self._prefillers.predict_cost_on(prefiller, prompt)[0] for prefiller in prefillers]
            hit, cached = hits[place], [prompt.piece_ends[each - 1] if each else 0.0 for each in hits]
        self._chosen = request, prefillers[place], prompt, hit, work[place]
        self.choice_snapshot = prefillers, waits, work, is_equal, cached, has_waited
        return candidates[place]

    def soonest(
        self,
        candidates: Sequence[Candidate],
        weights: Sequence[int],
        request: PickRequest,
        prompt: PromptCosts,
        scores: Sequence[float],
        near: float,
    ) -> tuple[int, bool]:
        equal = [place for place, score in enumerate(scores) if score <= near]
        if len(equal) == 1:
            return equal[0], False
        if not prompt.prefix_keys and (prompt.prompt_tokens < MIN_CACHED_PROMPT_TOKENS or request.session is None):
            lowest = min(weights[place] for place in equal)
            tied = [place for place in equal if weights[place] == lowest]
            if len(tied) > 1:
                return candidates.index(take_turn(self, [candidates[place] for place in tied])), True
            self._last_slot = candidates[tied[0]].backend.slot
            return tied[0], True
        known = self._prefillers
        if prompt.prefix_keys and any(known.predict_cost_on(known.prefillers[place], prompt)[0] for place in equal):
            return scores.index(min(scores)), True
        if request.session is not None:
            kind = crc32(request.session.encode())
        else:
            kind = prompt.prefix_keys[min(len(prompt.prefix_keys), least_seconds._KIND_PIECES) - 1] & 0xFFFFFFFF
        return max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind)), True

    def choice_reason(self, snapshot: Any, backend: Backend) -> str:
        prefillers, waits, _, is_equal, cached, has_waited = snapshot
        if has_waited:
            return WORKING_SET
        if cached is not None:
            place = [prefiller.backend.key for prefiller in prefillers].index(backend.key)
            soon = waits[place] + least_seconds._TIE_SECONDS
            if any(wait <= soon and hit < cached[place] for wait, hit in zip(waits, cached, strict=True)):
                return CACHED_PREFIX
        return EQUAL if is_equal else LEAST_SECONDS

    def soonest_completion_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        prefillers = self._prefillers.prefillers_of(candidates)
        waits = self.all_waits(prefillers, self.loads(candidates))
        return min(map(add, waits, self.all_work(prefillers, make_prompt_costs(request))))

    def _shortest_prefill_seconds(self, prompt: PromptCosts) -> float:
        return min(self.all_work(self._prefillers.prefillers, prompt))

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        candidates, prefillers = self._prefillers.candidates, self._prefillers.prefillers
        if request is None or not prefillers:
            return inf
        loads = self.loads(candidates)
        waits = self.all_waits(prefillers, loads)
        if any(map(self._may_get_next_prompt, candidates, prefillers, waits, loads)):
            return inf
        work = self._shortest_prefill_seconds(make_prompt_costs(request))
        ahead = min(waits) + sum(self._waiting_work_seconds.values()) / len(prefillers)
        return least_seconds._HOLD_WAITS * (ahead + work / AGEING)

    def index_to_admit(self, candidates: Sequence[Candidate], waiting_requests: Sequence[PickRequest]) -> int | None:
        prefillers = self._prefillers.prefillers_of(candidates)
        loads, now = self.loads(candidates), self.context.clock()
        waits = self.all_waits(prefillers, loads)
        free = list(map(self._may_get_next_prompt, candidates, prefillers, waits, loads))
        for number, request in enumerate(waiting_requests):
            prompt = self._waiting_costs.get(id(request.request_subject or request)) or make_prompt_costs(request)
            work = self.all_work(prefillers, prompt)
            scores, near = self.all_scores(self.with_handoffs(candidates, waits, prompt), work)
            is_same = max(work) <= min(work) * (1 + least_seconds._TIE_SHARE)
            session = self.resident(prompt, request)
            best = {
                prefiller
                for prefiller, score, seconds, is_free in zip(prefillers, scores, work, free, strict=True)
                if (score <= near if session is None else prefiller.cached_prefixes is session.prefiller_cache)
                and (
                    is_free
                    or (
                        self._has_room_in_step(prefiller)
                        and (
                            (is_same and prefiller.fits_in_step(prompt.prompt_tokens))
                            or (prefiller.is_step_ending(now) and self._should_join_next_step(prefiller, seconds))
                        )
                    )
                )
            }
            if best:
                self._admitted = request.request_subject or request, best  # type: ignore[assignment]
                return number
            soonest = scores.index(min(scores))
            waits[soonest] += work[soonest]
        return None

    def _have_all_room(self, candidates: Sequence[Candidate]) -> bool | None:
        prefillers = self._prefillers.prefillers_of(candidates)
        loads = self.loads(candidates)
        idle = loads.count(0) / len(loads)
        self._busy_share += least_seconds._BUSY_STEP * (1 - idle - self._busy_share)
        if idle == 1:
            return True
        waits = self.all_waits(prefillers, loads)
        free = list(map(self._may_get_next_prompt, candidates, prefillers, waits, loads))
        if False not in free:
            return True
        return None if True in free or any(map(self._has_room_in_step, prefillers)) else False

    def loads(self, candidates: Sequence[Candidate]) -> list[int]:
        return [candidate.charged_load.compute_tokens for candidate in candidates]

    def resident(self, prompt: PromptCosts, request: PickRequest) -> CachedSession | None:
        if not self._session_limits.are_limits_active:
            return None
        session = self._session_limits.find_session(prompt.prefix_keys, request.session, self.context.clock())
        if session is None or not session.is_resident:
            return None
        return (
            session
            if any(each.cached_prefixes is session.prefiller_cache for each in self._prefillers.prefillers)
            else None
        )

    def all_work(self, prefillers: Sequence[Prefiller], prompt: PromptCosts) -> list[float]:
        if prompt.prefix_keys or prompt.pick_request.request_subject is None:
            return [self._prefillers.predict_cost_on(prefiller, prompt)[1] for prefiller in prefillers]
        return [
            self._prefillers.prefill_cost.predict_seconds(prompt.prompt_tokens, 0.0) * prefiller.slowness
            for prefiller in prefillers
        ]

    def all_scores(
        self, waits: Sequence[float], work: Sequence[float], among: Sequence[bool] | None = None
    ) -> tuple[list[float], float]:
        counts = 1 + self.crowding_factor * self._expected_arrivals
        scores = [wait + counts * seconds for wait, seconds in zip(waits, work, strict=True)]
        if among is not None and True in among:
            scores = [score if is_among else inf for score, is_among in zip(scores, among, strict=True)]
        least, share = min(scores), least_seconds._TIE_SHARE
        return scores, least + max(share * least, min(least_seconds._TIE_SECONDS, 2 * share * least))

    def with_handoffs(
        self, candidates: Sequence[Candidate], waits: Sequence[float], prompt: PromptCosts
    ) -> Sequence[float]:
        handoffs = self.context.handoff_predictions
        if handoffs is None or not handoffs.far_prefillers:
            return waits
        backends = [candidate.backend for candidate in candidates]
        return list(map(add, waits, handoffs.least_extra_handoff_seconds(backends, round(prompt.prompt_tokens))))

    def all_waits(
        self, prefillers: Sequence[Prefiller], loads: Sequence[int], unit: float = SECONDS_PER_LOAD
    ) -> list[float]:
        now = self.context.clock()
        return [
            prefiller.remaining_seconds(load * unit, now) if load else 0.0
            for prefiller, load in zip(prefillers, loads, strict=True)
        ]


class ScanningDecodeSeconds(LeastDecodeSeconds):
    """The policy for decoders."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        bounds = self._candidate_bounds if candidates is self._known_candidates else self._make_bounds(candidates)
        running = [candidate.running_requests for candidate in candidates]
        pace = self.decode_pace
        share = least_decode_seconds._KV_SHARE / (sum(weights) / (sum(running) or 1) or 1.0)
        slope, step = 2 * pace.slope, pace.step + pace.slope
        handoffs = self._slow_handoff_scores(candidates, request) if request.handoff_partner is not None else None
        charge = self.decode_memory.predict_kv_tokens(request) if bounds.knows_kv_capacity else 0.0
        # Scores that differ by less than a thousandth are equal, to the first of them. So the order counts.
        least, best_tier = inf, least_decode_seconds._LACKS_KV
        equal: list[int] = []
        for place in sorted(range(len(candidates)), key=lambda place: not (running[place] or weights[place])):
            percent = candidates[place].request_share_percent
            load = running[place] + share * weights[place]
            if percent != FULL_PERCENT:
                load = (load + 1) * FULL_PERCENT / percent - 1
            score = (step + slope * load) * bounds.slowness_factors[place]
            if handoffs is not None:
                score += handoffs[place]
            tier = (
                0
                if bounds.has_no_limits
                else self._exclusion_tier(bounds, place, running[place], weights[place], charge)
            )
            if tier > best_tier:
                continue
            if tier < best_tier:
                best_tier, least = tier, inf
            if score < least * least_decode_seconds._BELOW:
                least, equal = score, [place]
            elif score <= least * least_decode_seconds._AS_GOOD:
                equal.append(place)
        is_equal = len(equal) > 1
        self.choice_snapshot = (), (), (), is_equal, None
        return take_turn(self, [candidates[place] for place in sorted(equal)]) if is_equal else candidates[equal[0]]

    def should_admit_first(self, candidates: Sequence[Candidate], request: Any) -> bool:
        if not self.has_room(candidates):
            return False
        bounds = self._candidate_bounds
        if not bounds.knows_kv_capacity:
            return True
        charge = self.decode_memory.predict_kv_tokens(request())
        return any(
            answers < bounds.saturation_points[place] and (not answers or held + charge <= bounds.kv_capacities[place])
            for place, (answers, held) in enumerate(self.answers_and_held(candidates))
        )

    def _has_free_candidate(self, bounds: Any) -> bool:
        return any(
            answers < bounds.saturation_points[place] and not self._lacks_kv(bounds, place, answers, held)
            for place, (answers, held) in enumerate(self.answers_and_held(self._known_candidates))
        )

    def answers_and_held(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        board = candidates[0].scoreboard
        slots = [candidate.backend.slot for candidate in candidates]
        return [
            (board.running_requests(slot), board.load_of(slot).kv_tokens + board.pinned_kv(slot).pinned_tokens)
            for slot in slots
        ]
