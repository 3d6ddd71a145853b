"""Policies without predictions: least tokens, round robin, power of two, random and length groups.

They know the load and the length of prompts, and remember at most their own last choice. `make_policy` creates every
policy. Their names and descriptions are in proxy/settings/kinds.py.
"""

from __future__ import annotations

import math
import pkgutil
from bisect import bisect_right
from statistics import fmean
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import Policy
from proxy.common.backend import Role
from proxy.settings import DECODE_POLICIES, POLICIES, Balance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pick import Candidate, PickRequest, PolicyContext


# Weights of a compute token and a KV token. A prefiller is busy with the prompts that it computes. KV that waits for a
# decoder only takes memory: 1 to 0.3 as in vllm-ascend's example proxy, times ten for exact integers. A decoder works
# on every token that it holds.
WEIGHTS: Mapping[Role, tuple[int, int]] = {Role.PREFILL: (10, 3), Role.DECODE: (1, 1), Role.ENCODE: (1, 1)}


def make_policy(policy_name: str, policy_context: PolicyContext | None = None) -> Policy:
    """Create the policy with this name for the role of its context.

    Call it after forking: with an inherited random generator all workers would choose alike.
    """
    is_decode = policy_context is not None and policy_context.role is Role.DECODE
    table = DECODE_POLICIES if is_decode else POLICIES
    kind: Callable[[PolicyContext | None], Policy] = pkgutil.resolve_name(table[policy_name])
    return kind(policy_context)


class _TurnTakingPolicy(Policy):
    """Base of policies that let equal backends take turns, by slot, because positions change with the candidates.

    Workers that pick at the same time see equal loads. If all chose the same backend, a burst would hit one backend
    after the other. So each worker adds its index to the turn.
    """

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._last_slot = -1

    def _choose_in_turn(self, candidates: Sequence[Candidate]) -> Candidate:
        slots = [candidate.backend.slot for candidate in candidates]
        return candidates[self._next_equal_place(slots, range(len(slots)))]

    def _next_equal_place(self, slots: Sequence[int], equal: Sequence[int]) -> int:
        """Return the place of the next one of equal backends.

        `slots`: those of all backends, in ascending order. `equal`: places of the equal ones in it, in ascending order.
        """
        last, index = self._last_slot, 0
        if slots[equal[-1]] > last:
            while slots[equal[index]] <= last:
                index += 1
        self._last_slot = slots[equal[index]]
        return equal[(index + self.context.worker_number) % len(equal)]

    def _next_flagged_place(self, slots: Sequence[int], is_equal: Callable[[int], bool]) -> int:
        """Return the place of the next one of equal backends, of which there is at least one.

        `is_equal` returns whether a place is that of an equal one, so that many of them need no list.
        """
        turns, is_first = self.context.worker_number, True
        place = bisect_right(slots, self._last_slot)
        while True:
            if place >= len(slots):
                place = 0
            if is_equal(place):
                if is_first:
                    self._last_slot, is_first = slots[place], False
                if not turns:
                    return place
                turns -= 1
            place += 1


class LeastTokens(_TurnTakingPolicy):
    """Chooses the least loaded backend. Equal ones take turns, so that an idle pool shares its requests."""

    policy_name = "least_tokens"

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose the candidate with the least load."""
        lowest = min(weights)
        equal = [candidate for place, candidate in enumerate(candidates) if weights[place] == lowest]
        if len(equal) > 1:
            return self._choose_in_turn(equal)
        self._last_slot = equal[0].backend.slot
        return equal[0]


class RoundRobin(_TurnTakingPolicy):
    """Chooses the backends in turn, whatever their load."""

    policy_name = "round_robin"
    uses_load_weights = False

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose the next candidate in turn."""
        return self._choose_in_turn(candidates)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random backends. This prevents herding on stale loads of several gateways."""

    policy_name = "power_of_two"

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose between two random candidates by load."""
        count, draw = len(candidates), self.context.random_source.randrange
        if count == 1:
            return candidates[0]
        place = draw(count)
        other = (place + draw(1, count)) % count
        return candidates[other if weights[other] < weights[place] else place]


class RandomChoice(Policy):
    """The policy that chooses any backend with equal probability."""

    policy_name = "random"
    uses_load_weights = False

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose a candidate at random."""
        return self.context.random_source.choice(candidates)


_AFFINITY_STRENGTH: Final = 0.1
_OVERFLOW_SCORE: Final = 0.12
_DEFAULTS: Final = Balance()


class LengthGroups(LeastTokens):
    """Chooses within the group for prompts of this length, or in the other group if that is much freer.

    Long prompts do not delay short ones. The overflow formula is that of vLLM-Ascend's hybrid proxy
    (examples/dynamic_bucket_load_balancer). The first half of the candidates, by slot, is for short prompts. A single
    candidate is for all.
    """

    policy_name = "length_groups"

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose a candidate by load and by the length of the prompt."""
        if len(candidates) == 1:
            return candidates[0]
        settings = _DEFAULTS if self.context.get_balance_options is None else self.context.get_balance_options()
        long_tokens, longest_tokens = settings.long_prompt_tokens, settings.longest_prompt_tokens
        half = (len(candidates) + 1) // 2
        own, other = slice(half), slice(half, None)
        if is_long := request.prompt_tokens >= long_tokens:
            own, other = other, own
        first, last = (0, long_tokens) if is_long else (long_tokens, longest_tokens)
        # The example adds the loads up, which is the same for halves of one size.
        freer = 1.0 - fmean(weights[other]) / mine if (mine := fmean(weights[own])) > 0 else 0.0
        if freer * nearness_to_range(request.prompt_tokens, first, last) > _OVERFLOW_SCORE:
            own = other
        return super().choose_candidate(candidates[own], weights[own], request)


def nearness_to_range(prompt_length: int, shortest_length: int, longest_length: int) -> float:
    """Return how near a length is to a range outside of which it lies.

    The result is 1 at the edge of the range and falls exponentially with the distance in halves of the range.
    """
    half = (longest_length - shortest_length) / 2
    beyond = (abs(prompt_length - (shortest_length + longest_length) / 2) - half) / half
    return min(1.0, math.exp(-_AFFINITY_STRENGTH * beyond))
