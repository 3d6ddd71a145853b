"""Policy `length_groups`: short prompts to one half of the instances and long ones to the other.

So that a long prompt does not hold up short ones, as the hybrid proxy of vLLM-Ascend has it
(examples/dynamic_bucket_load_balancer), whose formula for going over to the other half this is.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.settings import Balance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import Candidate, PickRequest

_AFFINITY_STRENGTH: Final = 0.1
_GOES_OVER_ABOVE: Final = 0.12
_DEFAULTS: Final = Balance()


class LengthGroups(LeastTokens):
    """The least loaded of the half that is meant for prompts of this length, or of the other one if that is much freer.

    The first half of the candidates, in the order of their slots, is for the short ones; a single one is for all.
    """

    label = "length_groups"

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Only how long its prompt is matters."""
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
        if freer * nearness(request.prompt_tokens, first, last) > _GOES_OVER_ABOVE:
            own = other
        return super().choose(candidates[own], weights[own], request)


def nearness(length: int, first: int, last: int) -> float:
    """How near a length is to a range that it is not in: 1 at its edge, and exponentially less with the distance, which
    is counted in halves of the range.
    """
    half = (last - first) / 2
    beyond = (abs(length - (first + last) / 2) - half) / half
    return min(1.0, math.exp(-_AFFINITY_STRENGTH * beyond))
