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
    """Chooses backends of one role in one worker. `consider` sets the candidates."""

    def __init__(
        self,
        role: Role,
        scoreboard: Scoreboard,
        share_percent: Callable[[Backend], int],
        back_offs: BackOffs,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Create a chooser, which needs `use` and `consider` before it chooses.

        `share_percent` returns the share of its requests that a backend gets now, by its weight and its slow start.
        """
        self.back_offs = back_offs
        self.changes = back_offs.changes
        self._role = role
        self.seen_changes = -1
        """Value of `changes` at the last refresh. If it differs, call `refresh` first."""
        self.policy: Policy
        """Current policy."""
        self.holds_queue: bool
        """Whether the policy decides which requests should wait."""
        self._per_compute: int
        self._per_kv: int
        self.queues_refused = True
        """Whether requests wait while all candidates refuse. Otherwise one of them gets the request and refuses it."""
        self.candidates: tuple[Candidate, ...] = ()
        self.basis: ChoiceBasis | str = ""
        """Basis of the last choice, or its reason if no policy was asked."""
        self._reader: SlotReader | None = None  # reads the slots of the candidates; None: it is not made yet
        self.may_pass_over = False
        """Whether candidates may have to be passed over because they refuse requests or lack KV memory."""
        self.has_limits = False
        """Whether a candidate has a limit of running requests."""
        self._scoreboard = scoreboard
        self._share_percent = share_percent
        self._clock = clock
        self._rng = rng
        self._open: tuple[Candidate, ...] = ()  # those that are not passed over, until `_open_until`
        self._open_until = math.inf
        self._refusing: frozenset[Backend] = frozenset()
        self._closed_until = 0.0
        self._is_any_slow = False

    def consider(self, backends: Sequence[Backend], limits: Sequence[int | None]) -> None:
        """Set the candidates of the next choice.

        `limits[i]`: maximum number of running requests of `backends[i]`. None: there is no limit.
        """
        both = zip(backends, limits, strict=True)
        self.candidates = tuple(Candidate(backend, limit, self._scoreboard) for backend, limit in both)
        self._reader = None
        self.has_limits = any(limit is not None for limit in limits)
        self._is_any_slow = any(self._share_percent(backend) < FULL_PERCENT for backend in backends)
        self.refresh()

    def refresh(self) -> None:
        """Update which candidates are passed over now."""
        self.seen_changes = self.changes[0]
        now, of = self._clock(), self.back_offs.of
        standings = [(candidate, of(candidate.backend)) for candidate in self.candidates]
        self._refusing = frozenset(candidate.backend for candidate, standing in standings if standing.refuses(now))
        self._closed_until = min(
            (standing.closed_until for candidate, standing in standings if candidate.backend in self._refusing),
            default=0.0,
        )
        self._open = tuple(
            candidate
            for candidate, standing in standings
            if candidate.backend not in self._refusing and standing.pressed_until <= now
        )
        self.may_pass_over = any(standing.pressed_until > now or standing.takes_turns(now) for _, standing in standings)
        times = (time for _, standing in standings for time in (standing.until, standing.pressed_until))
        self._open_until = min((time for time in times if time > now), default=math.inf)

    def note_refusal(self, backend: Backend, retry_after_seconds: float | None) -> int:
        """Pass over a backend that refused a request. Return its number of refusals since it last served one."""
        now = self._clock()
        doubles = any(candidate.backend != backend for candidate in self._candidates_not_passed_over)
        return self.back_offs.refuse(backend, now, retry_after_seconds, doubles=doubles)

    @property
    def refuse_all(self) -> bool:
        """Whether all candidates would probably refuse a request now. False without candidates."""
        return (
            not self._candidates_not_passed_over
            and bool(self.candidates)
            and len(self._refusing) == len(self.candidates)
        )

    def refused_until(self) -> float:
        """Return the time until which all candidates refuse by their Retry-After. 0: one may accept sooner."""
        return self._closed_until if self.refuse_all else 0.0

    def would_accept(self, avoid: Collection[Backend]) -> bool:
        """Return whether a candidate outside `avoid` would probably take a request now."""
        if self._candidates_not_passed_over and not avoid:
            return True
        return any(
            candidate.backend not in avoid and candidate.backend not in self._refusing for candidate in self.candidates
        )

    @property
    def _candidates_not_passed_over(self) -> tuple[Candidate, ...]:
        """Candidates that are not passed over."""
        if self.changes[0] != self.seen_changes or self._clock() >= self._open_until:
            self.refresh()
        return self._open

    def use(self, policy: Policy) -> None:
        """Set the routing policy for later choices."""
        self.policy = policy
        self._per_compute, self._per_kv = policy.weights or WEIGHTS[self._role]
        self._reader = None
        self.holds_queue = type(policy).has_room is not Policy.has_room

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Return whether a request need not wait. True without candidates.

        `request` makes the first request of the queue. None: return whether there is room for any request.
        """
        candidates: Sequence[Candidate] = self.candidates
        if (self.may_pass_over or self.changes[0] != self.seen_changes) and candidates:
            if self.queues_refused and self.refuse_all:
                return False
            candidates = self._not_passed_over(candidates)
        if self.holds_queue and candidates:
            policy = self.policy
            return policy.has_room(candidates) if request is None else policy.admits(candidates, request)
        return not self.has_limits or any(candidate.has_room for candidate in candidates)

    def would_take(self) -> bool:
        """Return whether a candidate that is not passed over would take a request now, ignoring learned limits."""
        candidates: Sequence[Candidate] = self.candidates
        if not candidates:
            return True
        if self.may_pass_over or self.changes[0] != self.seen_changes:
            if self.queues_refused and self.refuse_all:
                return False
            candidates = self._not_passed_over(candidates)
        return self.policy.would_take(candidates)

    def first_to_admit(self, waiting: Sequence[PickRequest]) -> int | None:
        """Return the index of the first waiting request that should go now; its backend is then chosen at once.

        Without candidates, return the first request, which then fails at once.
        """
        candidates: Sequence[Candidate] = self.candidates
        if self.may_pass_over and candidates:
            candidates = self._not_passed_over(candidates)
        return self.policy.first_to_admit(candidates, waiting) if self.holds_queue and candidates else 0

    def choose(self, request: PickRequest) -> Backend:
        """Return the backend for a request. Raises NoBackendAvailable."""
        if self.changes[0] != self.seen_changes:
            self.refresh()
        candidates: Sequence[Candidate] = self.candidates
        if avoid := request.avoid:
            candidates = [candidate for candidate in candidates if candidate.backend not in avoid]
        if self.may_pass_over and candidates:
            candidates = self._not_passed_over(candidates)
        if not candidates:
            raise NoBackendAvailable(self._role)
        prefer = request.prefer
        if prefer is not None and prefer.role is self._role:
            for candidate in candidates:
                if candidate.backend == prefer and candidate.has_room:
                    self.basis = PREFERRED
                    return candidate.backend
        return self.choose_among(candidates, request).backend

    def choose_among(self, candidates: Sequence[Candidate], request: PickRequest) -> Candidate:
        """Return the policy's choice among one or more candidates, with room if one has any.

        It equals `choose` for a request without `avoid` and `prefer` while no backend is passed over.
        """
        policy, reader = self.policy, self._reader
        considered = self._with_shares(candidates) if self._is_any_slow else candidates
        if reader is None or considered is not self.candidates:
            slots = [candidate.backend.slot for candidate in considered]
            reader = self._scoreboard.reader(slots, self._per_compute, self._per_kv)
            if considered is self.candidates:
                self._reader = reader
        reader.refresh()
        weights = reader.weights
        if self._is_any_slow and policy.weighs_load:  # `_with_shares` may have changed it
            load = policy.cost_of(considered[0].backend, request)
            cost = max(1, self._per_compute * load.compute_tokens + self._per_kv * load.kv_tokens)
            weights = weights_by_share(weights, [candidate.share_percent for candidate in considered], cost)
        chosen = policy.choose(considered, weights, request)
        self.basis = policy, considered, weights[:] if policy.keeps_weights else (), policy.snapshot
        if self.has_limits and not chosen.has_room:
            roomy = [candidate for candidate in candidates if candidate.has_room]
            if roomy:
                return self.choose_among(roomy, request)
        return chosen

    def _with_shares(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Update the shares of the candidates. For policies that ignore weights, return a sample drawn by shares."""
        percents = [self._share_percent(candidate.backend) for candidate in candidates]
        for candidate, percent in zip(candidates, percents, strict=True):
            candidate.share_percent = percent
        if candidates is self.candidates and min(percents) >= FULL_PERCENT:
            self._is_any_slow = False  # the last slow start is over, and the next one begins with `consider`
            return candidates
        if self.policy.weighs_load:
            return candidates
        return sample_by_share(candidates, percents, self._rng)

    def _not_passed_over(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that are not passed over.

        If all are passed over, return those that only lack KV memory, or else all.
        """
        open_now = self._candidates_not_passed_over
        if candidates is not self.candidates:
            open_now = tuple(candidate for candidate in candidates if candidate in open_now)
        refusing = self._refusing
        return open_now or [candidate for candidate in candidates if candidate.backend not in refusing] or candidates


Item = TypeVar("Item")


def weights_by_share(weights: Sequence[int], percents: Sequence[int], cost: int) -> list[int]:
    """Return the weights of backends, divided by their shares of the capacity.

    `cost` is the weight of the new request. Without it an idle backend would weigh nothing, whatever its share.
    """
    return [(weight + cost) * FULL_PERCENT // share for weight, share in zip(weights, percents, strict=True)]


def sample_by_share(candidates: Sequence[Item], percents: Sequence[int], rng: random.Random) -> Sequence[Item]:
    """Return candidates drawn by their shares, for policies that ignore weights.

    The probability of each is its share relative to the largest one. So at least one is drawn, and all are if their
    shares are equal.
    """
    largest = max(percents)
    return [candidate for candidate, share in zip(candidates, percents, strict=True) if rng.randrange(largest) < share]
