"""Worlds in virtual time in which a prefill policy must not be worse than one that learns nothing.

A world defines prefillers, lengths of prompts and arrivals. Answers are short and decoders have room for all, so the
time to the first token depends on prefillers. No prompts share prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lab.replay.fleet import Course, Fleet, Replay
from lab.replay.policies import policies
from lab.replay.trace import BLOCK_TOKENS, Request
from proxy.process.loop_lag import LoopLag
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Machine
from proxy.sim.hardware.work import Shape
from tests.lab.replay import late_loop
from tests.lab.replay.ranks import RANKS, FleetOfRanks

_H200: Final = MACHINES["kimi-k2.5-h200"]
_A3: Final = MACHINES["kimi-k2-thinking-a3"]
_KV_TOKENS: Final = 5_000_000
_DECODER: Final = (Cost(step=0.005), Shape(2000, 8192, 50_000_000))


def _machine(machine: Machine, sequences: int, step_tokens: int, prompt: float | None = None) -> Machine:
    cost = machine.cost if prompt is None else replace(machine.cost, prompt=prompt)
    return Machine(machine.name, cost, Shape(sequences, step_tokens, _KV_TOKENS), _DECODER[1])


PREFILLERS: Final[Mapping[str, Machine]] = {
    "batching": _machine(_H200, 8, 16_384),
    "small steps": _machine(_H200, 64, 8192),
    "slow and batching": _machine(_A3, 8, 16_384),
    "in turn": _machine(_A3, 1, 16_384),
    "cheap steps": _machine(_H200, 64, 16_384, prompt=0.005),
    "dear steps": _machine(_H200, 64, 16_384, prompt=0.3),
}
"""Return a machine: prompts and tokens per step, and the constant time of a step."""

LENGTHS: Final[Mapping[str, tuple[int, int]]] = {
    "short": (300, 300),
    "1,000": (1000, 1000),
    "4,000": (4000, 4000),
    "long": (15_000, 15_000),
    "mixed": (500, 8000),
}
"""Minimum and maximum tokens of a prompt, drawn evenly."""

ARRIVALS: Final = ("poisson", "evenly", "bursts", "closed loop of few", "closed loop of many")
_BURST: Final = 24
RANKS_OF: Final = ("none", "told", "untold", "blind")
"""Engines behind each address: one; several that report their number or do not; or several with random distribution."""
_CLIENTS: Final[Mapping[str, int]] = {"closed loop of few": 2, "closed loop of many": 8}
"""Clients per engine. Each sends its next request after its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorld:
    """One kind of prefillers under one kind of load. Every field has the value of an ordinary benchmark."""

    prefillers: str = "batching"
    """One of PREFILLERS."""
    lengths: str = "4,000"
    """One of LENGTHS."""
    arrivals: str = "poisson"
    """One of ARRIVALS."""
    count: int = 4
    """Number of prefillers."""
    load: float = 0.8
    """Requested load relative to full steps of the prefillers. Unused in closed loops."""
    requests: int = 1000
    ranks: str = "none"
    """One of RANKS_OF."""
    workers: int = 1
    """Workers of the gateway."""
    is_late: bool = False
    """The gateway's event loop stalls at times."""
    seed: int = 1

    @property
    def machine(self) -> Machine:
        """Hardware of each prefiller."""
        return PREFILLERS[self.prefillers]

    @property
    def fleet(self) -> Fleet:
        """The engines."""
        decoder = Machine("fast", _DECODER[0], _DECODER[1], _DECODER[1])
        if self.ranks == "none":
            return Fleet(self.count, 2, prefill_machine=self.machine, decode_machine=decoder)
        return FleetOfRanks(
            self.count,
            2,
            prefill_machine=self.machine,
            decode_machine=decoder,
            tells_ranks=self.ranks == "told",
            is_blind=self.ranks == "blind",
        )

    @property
    def engines(self) -> int:
        """Number of engines behind all addresses."""
        return self.count if self.ranks == "none" else self.count * RANKS

    @property
    def rate(self) -> float:
        """Requests per second for this load."""
        cost, shape = self.machine.cost, self.machine.prefill
        tokens = sum(LENGTHS[self.lengths]) / 2
        together = max(1.0, min(shape.max_num_seqs, shape.max_num_batched_tokens / tokens))
        return self.load * self.engines / (cost.chunk(round(tokens), 0) + cost.prompt / together)

    def requests_in_order(self) -> list[Request]:
        """All requests in the order of their times."""
        rng = random.Random(self.seed)
        at = 0.0
        made = []
        for number in range(self.requests):
            if self.arrivals == "poisson":
                at += rng.expovariate(self.rate)
            elif self.arrivals == "evenly":
                at += 1 / self.rate
            elif number % _BURST == 0:
                at += rng.expovariate(self.rate / _BURST)
            tokens = rng.randint(*LENGTHS[self.lengths])
            first = 100_000 * (number + 1)
            made.append(Request(at, tokens, 2, tuple(range(first, first + -(-tokens // BLOCK_TOKENS)))))
        return made


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Result of a run. Times are seconds from arrival to first token."""

    served: float
    """Share of requests that were not rejected."""
    mean: float
    p99: float


def prefilled(world: PrefillWorld, policy: str) -> Prefilled:
    """Run a world with this policy for prefillers, and one for decoders that learns nothing."""
    both = policies(world.fleet, "least_tokens")[policy]
    clients = _CLIENTS.get(world.arrivals)
    courses: list[Course] = []

    async def course(loop_lag: LoopLag | None) -> None:
        replay = Replay(world.fleet, *both, seed=world.seed, workers=world.workers, loop_lag=loop_lag)
        if clients is None:
            await replay.run(world.requests_in_order())
        else:
            await replay.run_closed(world.requests_in_order(), clients * world.engines)
        courses.extend(replay.courses)

    late_loop.run(course, is_late=world.is_late, seed=world.seed)
    times = sorted(seconds for course in courses if (seconds := course.first_token_seconds) is not None)
    return Prefilled(len(times) / len(courses), sum(times) / len(times), times[int(0.99 * (len(times) - 1))])
