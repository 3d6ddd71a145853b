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


def make_policy(name: str, context: PolicyContext | None = None) -> Policy:
    """Create the policy with this name for the role of its context.

    Call it after forking: with an inherited random generator all workers would choose alike.
    """
    is_decode = context is not None and context.role is Role.DECODE
    table = DECODE_POLICIES if is_decode else POLICIES
    kind: Callable[[PolicyContext | None], Policy] = pkgutil.resolve_name(table[name])
    return kind(context)


class _Turns(Policy):
    """Base of policies that let equal backends take turns, by slot, because positions change with the candidates.

    Workers that pick at the same time see equal loads. If all chose the same backend, a burst would hit one backend
    after the other. So each worker adds its index to the turn.
    """

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._last_slot = -1

    def _take_turn(self, candidates: Sequence[Candidate]) -> Candidate:
        slots = [candidate.backend.slot for candidate in candidates]
        return candidates[self._next_place(slots, range(len(slots)))]

    def _next_place(self, slots: Sequence[int], equal: Sequence[int]) -> int:
        """Return the place of the next one of equal backends.

        `slots`: those of all backends, in ascending order. `equal`: places of the equal ones in it, in ascending order.
        """
        last, index = self._last_slot, 0
        if slots[equal[-1]] > last:
            while slots[equal[index]] <= last:
                index += 1
        self._last_slot = slots[equal[index]]
        return equal[(index + self.context.worker) % len(equal)]

    def _next_place_of(self, slots: Sequence[int], is_equal: Callable[[int], bool]) -> int:
        """Return the place of the next one of equal backends, of which there is at least one.

        `is_equal` returns whether a place is that of an equal one, so that many of them need no list.
        """
        turns, is_first = self.context.worker, True
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


class LeastTokens(_Turns):
    """Chooses the least loaded backend. Equal ones take turns, so that an idle pool shares its requests."""

    label = "least_tokens"

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Choose the candidate with the least load."""
        lowest = min(weights)
        equal = [candidate for place, candidate in enumerate(candidates) if weights[place] == lowest]
        if len(equal) > 1:
            return self._take_turn(equal)
        self._last_slot = equal[0].backend.slot
        return equal[0]


class RoundRobin(_Turns):
    """Chooses the backends in turn, whatever their load."""

    label = "round_robin"
    weighs_load = False

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Choose the next candidate in turn."""
        return self._take_turn(candidates)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random backends. This prevents herding on stale loads of several gateways."""

    label = "power_of_two"

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Choose between two random candidates by load."""
        count, draw = len(candidates), self.context.rng.randrange
        if count == 1:
            return candidates[0]
        place = draw(count)
        other = (place + draw(1, count)) % count
        return candidates[other if weights[other] < weights[place] else place]


class Random(Policy):
    """The policy that chooses any backend with equal probability."""

    label = "random"
    weighs_load = False

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Choose a candidate at random."""
        return self.context.rng.choice(candidates)


_AFFINITY_STRENGTH: Final = 0.1
_OVERFLOW_SCORE: Final = 0.12
_DEFAULTS: Final = Balance()


class LengthGroups(LeastTokens):
    """Chooses within the group for prompts of this length, or in the other group if that is much freer.

    Long prompts do not delay short ones. The overflow formula is that of vLLM-Ascend's hybrid proxy
    (examples/dynamic_bucket_load_balancer). The first half of the candidates, by slot, is for short prompts. A single
    candidate is for all.
    """

    label = "length_groups"

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Choose a candidate by load and by the length of the prompt."""
        if len(candidates) == 1:
            return candidates[0]
        settings = _DEFAULTS if self.context.balance is None else self.context.balance()
        long_tokens, longest_tokens = settings.long_prompt_tokens, settings.longest_prompt_tokens
        half = (len(candidates) + 1) // 2
        own, other = slice(half), slice(half, None)
        if is_long := request.prompt_tokens >= long_tokens:
            own, other = other, own
        first, last = (0, long_tokens) if is_long else (long_tokens, longest_tokens)
        # The example adds the loads up, which is the same for halves of one size.
        freer = 1.0 - fmean(weights[other]) / mine if (mine := fmean(weights[own])) > 0 else 0.0
        if freer * nearness(request.prompt_tokens, first, last) > _OVERFLOW_SCORE:
            own = other
        return super().choose(candidates[own], weights[own], request)


def nearness(length: int, first: int, last: int) -> float:
    """Return how near a length is to a range outside of which it lies.

    The result is 1 at the edge of the range and falls exponentially with the distance in halves of the range.
    """
    half = (last - first) / 2
    beyond = (abs(length - (first + last) / 2) - half) / half
    return min(1.0, math.exp(-_AFFINITY_STRENGTH * beyond))
