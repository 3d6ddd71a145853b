"""Choice of a backend among the eligible ones of a role: the rules for all policies around the policy's own choice.

Backends that refused requests, lack KV memory or are at their limit are passed over as long as there are others.
Backends that came back start slowly, and backends with a weight get a smaller share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.pick import PREFERRED, Candidate, Policy
from proxy.balancer.policies.least_tokens import WEIGHTS
from proxy.common.errors import NoBackendAvailable

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from proxy.balancer.pick import ChoiceBasis, PickRequest
    from proxy.balancer.shared.back_offs import BackOffs
    from proxy.balancer.shared.scoreboard import Scoreboard, SlotReader
    from proxy.common.backend import Backend, Role


class Chooser:
    """Chooses backends of one role in one worker. `set_candidates` sets the candidates."""

    def __init__(
        self,
        role: Role,
        scoreboard: Scoreboard,
        share_percent: Callable[[Backend], int],
        back_offs: BackOffs,
        *,
        clock: Callable[[], float],
        random_source: random.Random,
    ) -> None:
        """Create a chooser, which needs `use_policy` and `set_candidates` before it chooses.

        `share_percent` returns the share of its requests that a backend gets now, by its weight and its slow start.
        """
        self.back_offs = back_offs
        self.back_off_changes = back_offs.change_cells
        self._role = role
        self.seen_back_off_changes = -1
        """Value of `back_off_changes` at the last refresh. If it differs, call `update_passed_over` first."""
        self.policy: Policy
        """Current policy."""
        self.policy_holds_queue: bool
        """Whether the policy decides which requests should wait."""
        self._weight_per_compute: int
        self._weight_per_kv: int
        self.queues_refused_requests = True
        """Whether requests wait while all candidates refuse. Otherwise one of them gets the request and refuses it."""
        self.candidates: tuple[Candidate, ...] = ()
        self.choice_basis: ChoiceBasis | str = ""
        """Basis of the last choice, or its reason if no policy was asked."""
        self._slot_reader: SlotReader | None = None  # reads the slots of the candidates; None: it is not made yet
        self.may_pass_over = False
        """Whether candidates may have to be passed over because they refuse requests or lack KV memory."""
        self.has_limits = False
        """Whether a candidate has a limit of running requests."""
        self._scoreboard = scoreboard
        self._share_percent = share_percent
        self._clock = clock
        self._random_source = random_source
        self._not_passed_over: tuple[Candidate, ...] = ()  # those that are not passed over, until `_passed_over_until`
        self._passed_over_until = math.inf
        self._refusing_backends: frozenset[Backend] = frozenset()
        self._all_refuse_until = 0.0
        self._has_reduced_shares = False

    def set_candidates(self, backends: Sequence[Backend], pool_limits: Sequence[int | None]) -> None:
        """Set the candidates of the next choice.

        `limits[i]`: maximum number of running requests of `backends[i]`. None: there is no limit.
        """
        both = zip(backends, pool_limits, strict=True)
        self.candidates = tuple(Candidate(backend, limit, self._scoreboard) for backend, limit in both)
        self._slot_reader = None
        self.has_limits = any(limit is not None for limit in pool_limits)
        self._has_reduced_shares = any(self._share_percent(backend) < FULL_PERCENT for backend in backends)
        self.update_passed_over()

    def update_passed_over(self) -> None:
        """Update which candidates are passed over now."""
        self.seen_back_off_changes = self.back_off_changes[0]
        now, of = self._clock(), self.back_offs.standing_of
        standings = [(candidate, of(candidate.backend)) for candidate in self.candidates]
        refusing = frozenset(candidate.backend for candidate, standing in standings if standing.would_refuse(now))
        self._refusing_backends = refusing
        self._all_refuse_until = min(
            (standing.retry_after_until for candidate, standing in standings if candidate.backend in refusing),
            default=0.0,
        )
        self._not_passed_over = tuple(
            candidate
            for candidate, standing in standings
            if candidate.backend not in refusing and standing.lacks_kv_until <= now
        )
        self.may_pass_over = any(
            standing.lacks_kv_until > now or standing.takes_one_at_a_time(now) for _, standing in standings
        )
        times = (time for _, standing in standings for time in (standing.refuses_until, standing.lacks_kv_until))
        self._passed_over_until = min((time for time in times if time > now), default=math.inf)

    def record_refusal(self, backend: Backend, retry_after_seconds: float | None) -> int:
        """Pass over a backend that refused a request. Return its number of refusals since it last served one."""
        now = self._clock()
        doubles = any(candidate.backend != backend for candidate in self._candidates_not_passed_over)
        return self.back_offs.record_refusal(backend, now, retry_after_seconds, doubles=doubles)

    @property
    def do_all_refuse(self) -> bool:
        """Whether all candidates would probably refuse a request now. False without candidates."""
        return (
            not self._candidates_not_passed_over
            and bool(self.candidates)
            and len(self._refusing_backends) == len(self.candidates)
        )

    def refused_until(self) -> float:
        """Return the time until which all candidates refuse by their Retry-After. 0: one may accept sooner."""
        return self._all_refuse_until if self.do_all_refuse else 0.0

    def would_accept(self, avoided_backends: Collection[Backend]) -> bool:
        """Return whether a candidate outside `avoided_backends` would probably take a request now."""
        if self._candidates_not_passed_over and not avoided_backends:
            return True
        return any(
            candidate.backend not in avoided_backends and candidate.backend not in self._refusing_backends
            for candidate in self.candidates
        )

    @property
    def _candidates_not_passed_over(self) -> tuple[Candidate, ...]:
        """Candidates that are not passed over."""
        if self.back_off_changes[0] != self.seen_back_off_changes or self._clock() >= self._passed_over_until:
            self.update_passed_over()
        return self._not_passed_over

    def use_policy(self, policy: Policy) -> None:
        """Set the routing policy for later choices."""
        self.policy = policy
        self._weight_per_compute, self._weight_per_kv = policy.load_weights or WEIGHTS[self._role]
        self._slot_reader = None
        self.policy_holds_queue = type(policy).has_room is not Policy.has_room

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Return whether a request need not wait. True without candidates.

        `request` makes the first request of the queue. None: return whether there is room for any request.
        """
        candidates: Sequence[Candidate] = self.candidates
        if (self.may_pass_over or self.back_off_changes[0] != self.seen_back_off_changes) and candidates:
            if self.queues_refused_requests and self.do_all_refuse:
                return False
            candidates = self._without_passed_over(candidates)
        if self.policy_holds_queue and candidates:
            policy = self.policy
            return policy.has_room(candidates) if request is None else policy.should_admit_first(candidates, request)
        return not self.has_limits or any(candidate.has_room for candidate in candidates)

    def would_take_now(self) -> bool:
        """Return whether a candidate that is not passed over would take a request now, ignoring learned limits."""
        candidates: Sequence[Candidate] = self.candidates
        if not candidates:
            return True
        if self.may_pass_over or self.back_off_changes[0] != self.seen_back_off_changes:
            if self.queues_refused_requests and self.do_all_refuse:
                return False
            candidates = self._without_passed_over(candidates)
        return self.policy.would_take_ignoring_learned(candidates)

    def index_to_admit(self, waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the index of the first waiting request that should go now; its backend is then chosen at once.

        Without candidates, return the first request, which then fails at once.
        """
        candidates: Sequence[Candidate] = self.candidates
        if self.may_pass_over and candidates:
            candidates = self._without_passed_over(candidates)
        return self.policy.index_to_admit(candidates, waiting_requests) if self.policy_holds_queue and candidates else 0

    def choose_backend(self, request: PickRequest) -> Backend:
        """Return the backend for a request. Raises NoBackendAvailable."""
        if self.back_off_changes[0] != self.seen_back_off_changes:
            self.update_passed_over()
        candidates: Sequence[Candidate] = self.candidates
        if avoid := request.avoided_backends:
            candidates = [candidate for candidate in candidates if candidate.backend not in avoid]
        if self.may_pass_over and candidates:
            candidates = self._without_passed_over(candidates)
        if not candidates:
            raise NoBackendAvailable(self._role)
        prefer = request.preferred_backend
        if prefer is not None and prefer.role is self._role:
            for candidate in candidates:
                if candidate.backend == prefer and candidate.has_room:
                    self.choice_basis = PREFERRED
                    return candidate.backend
        return self.choose_among(candidates, request).backend

    def choose_among(self, candidates: Sequence[Candidate], request: PickRequest) -> Candidate:
        """Return the policy's choice among one or more candidates, with room if one has any.

        It equals `choose_backend` for a request without `avoid` and `prefer` while no backend is passed over.
        """
        policy, reader = self.policy, self._slot_reader
        considered = self._with_updated_shares(candidates) if self._has_reduced_shares else candidates
        if reader is None or considered is not self.candidates:
            slots = [candidate.backend.slot for candidate in considered]
            reader = self._scoreboard.reader_of(slots, self._weight_per_compute, self._weight_per_kv)
            if considered is self.candidates:
                self._slot_reader = reader
        reader.update_loads()
        weights = reader.weights_by_place
        if self._has_reduced_shares and policy.uses_load_weights:  # `_with_updated_shares` may have changed it
            load = policy.load_of_request(considered[0].backend, request)
            cost = max(1, self._weight_per_compute * load.compute_tokens + self._weight_per_kv * load.kv_tokens)
            weights = weights_by_share(weights, [candidate.request_share_percent for candidate in considered], cost)
        chosen = policy.choose_candidate(considered, weights, request)
        self.choice_basis = policy, considered, weights[:] if policy.keeps_weights else (), policy.choice_snapshot
        if self.has_limits and not chosen.has_room:
            roomy = [candidate for candidate in candidates if candidate.has_room]
            if roomy:
                return self.choose_among(roomy, request)
        return chosen

    def _with_updated_shares(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Update the shares of the candidates. For policies that ignore weights, return a sample drawn by shares."""
        percents = [self._share_percent(candidate.backend) for candidate in candidates]
        for candidate, percent in zip(candidates, percents, strict=True):
            candidate.request_share_percent = percent
        if candidates is self.candidates and min(percents) >= FULL_PERCENT:
            # The last slow start is over, and the next one begins with `set_candidates`.
            self._has_reduced_shares = False
            return candidates
        if self.policy.uses_load_weights:
            return candidates
        return sample_by_share(candidates, percents, self._random_source)

    def _without_passed_over(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that are not passed over.

        If all are passed over, return those that only lack KV memory, or else all.
        """
        open_now = self._candidates_not_passed_over
        if candidates is not self.candidates:
            open_now = tuple(candidate for candidate in candidates if candidate in open_now)
        refusing = self._refusing_backends
        return open_now or [candidate for candidate in candidates if candidate.backend not in refusing] or candidates


Item = TypeVar("Item")


def weights_by_share(weights: Sequence[int], share_percents: Sequence[int], added_weight: int) -> list[int]:
    """Return the weights of backends, divided by their shares of the capacity.

    `added_weight` is the weight of the new request. Without it an idle backend would weigh nothing, whatever its share.
    """
    return [
        (weight + added_weight) * FULL_PERCENT // share for weight, share in zip(weights, share_percents, strict=True)
    ]


def sample_by_share(
    candidates: Sequence[Item], share_percents: Sequence[int], random_source: random.Random
) -> Sequence[Item]:
    """Return candidates drawn by their shares, for policies that ignore weights.

    The probability of each is its share relative to the largest one. So at least one is drawn, and all are if their
    shares are equal.
    """
    largest = max(share_percents)
    return [
        candidate
        for candidate, share in zip(candidates, share_percents, strict=True)
        if random_source.randrange(largest) < share
    ]
