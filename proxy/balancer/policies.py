"""Ways to choose one backend among eligible ones.

A policy gets the candidates in slot order, never none, and the weight of each: its load as one integer, lower is freer.
It keeps at most a memory of its own last choice. To add one: a class with `weighs_load` and `__call__`, and a line in
POLICIES.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from proxy.backend import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.backend import Backend

# (per compute token, per kv token). A prefiller is busy with the prompts it computes; KV that waits to be pulled, or
# that nobody pulls any more, only takes memory: 1 to 0.3 as in vllm-ascend's example proxy, times ten to stay in
# integers, whose total order has no residue. A decoder works on every token it holds.
WEIGHTS: Mapping[Role, tuple[int, int]] = {Role.PREFILL: (10, 3), Role.DECODE: (1, 1), Role.ENCODE: (1, 1)}


class Policy(Protocol):
    """Choose one of `candidates`; `weights[i]` belongs to `candidates[i]`. `worker`: the number of who asks, for what
    takes turns; see _Turns.
    """

    weighs_load: bool
    """Whether a larger weight means fewer requests: it decides how a backend that came back is spared."""

    def __call__(self, candidates: Sequence[Backend], weights: Sequence[int], worker: int = 0) -> Backend: ...


class _Turns:
    """Whose turn it is among equals. Turns go by slot and not by position, which changes as backends come and go.

    Workers that pick at the same moment see the same loads. Were all of them to take whose turn it is, a burst would
    fall on one backend after the other; so each takes the one that comes as many places later as its own number says.
    """

    def __init__(self) -> None:
        self._last_slot = -1

    def take(self, backends: Sequence[Backend], worker: int) -> Backend:
        behind = (place for place, backend in enumerate(backends) if backend.slot > self._last_slot)
        place = next(behind, 0)
        self._last_slot = backends[place].slot
        return backends[(place + worker) % len(backends)]


class LeastLoad:
    """The least loaded; equal ones take turns, so that an idle pool does not send everything to its first member."""

    weighs_load = True

    def __init__(self) -> None:
        self._turns = _Turns()

    def __call__(self, candidates: Sequence[Backend], weights: Sequence[int], worker: int = 0) -> Backend:
        lowest = min(weights)
        ties = [backend for backend, weight in zip(candidates, weights, strict=True) if weight == lowest]
        return self._turns.take(ties, worker)


class RoundRobin:
    """One after the other, whatever their load."""

    weighs_load = False

    def __init__(self) -> None:
        self._turns = _Turns()

    def __call__(self, candidates: Sequence[Backend], weights: Sequence[int], worker: int = 0) -> Backend:
        return self._turns.take(candidates, worker)


class PowerOfTwo:
    """The less loaded of two drawn at random: does not herd when several gateways see the same stale loads."""

    weighs_load = True

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def __call__(self, candidates: Sequence[Backend], weights: Sequence[int], worker: int = 0) -> Backend:
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = self._rng.randrange(count)
        second = (first + self._rng.randrange(1, count)) % count
        return candidates[second if weights[second] < weights[first] else first]


class Random:
    """Any, each with the same probability."""

    weighs_load = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def __call__(self, candidates: Sequence[Backend], weights: Sequence[int], worker: int = 0) -> Backend:
        return self._rng.choice(candidates)


# Build them after forking: a random generator that workers inherit makes all of them choose alike.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "random": Random,
}
