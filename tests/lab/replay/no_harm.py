"""Worlds in virtual time in which a learning policy must not be worse than `least_tokens`.

A world defines engines, lengths of answers and arrivals. `compared` runs it with the policies under test, and with
`least_tokens`, which learns nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lab.replay.fleet import Fleet, MakePolicy, Replay
from lab.replay.trace import BLOCK_TOKENS, Request
from proxy.balancer.pick import Policy, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.process.loop_lag import LoopLag
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Machine
from proxy.sim.hardware.work import Shape
from tests.lab.replay import late_loop

LEARNS_NOTHING: Final = "least_tokens"

# Seconds of a decoding step, and the relative growth per further answer.
_STEP_SECONDS: Final = 0.02
_LINEAR_SHARE: Final = 0.02
_KNEED: Final = MACHINES["kimi-k2-thinking-a3"]
_KV_TOKENS: Final = 10_000_000

# Mean number of concurrent answers per decoder, if the engines have no saturation point.
_ANSWERS: Final = 48

LENGTHS: Final[Mapping[str, tuple[int, int]]] = {"equal": (128, 128), "similar": (115, 140), "mixed": (10, 500)}
"""Minimum and maximum tokens of an answer, drawn evenly."""
ARRIVALS: Final = ("poisson", "closed loop", "bursts", "at once")
STEPS: Final = ("constant", "linear", "kneed")
_BURST: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One kind of engines under one kind of load. Every field has the value of an ordinary benchmark."""

    step: str = "constant"
    """Growth of a decoding step with the number of answers: one of STEPS."""
    lengths: str = "equal"
    """Lengths of answers: one of LENGTHS."""
    arrivals: str = "poisson"
    """Arrivals: one of ARRIVALS. In a closed loop each client sends its next request after its answer."""
    prefillers: int = 2
    decoders: int = 2
    is_late: bool = False
    """The gateway's event loop stalls at times."""
    load: float = 0.7
    """Requested tokens per second relative to the saturation point, if there is one."""
    max_answers: int = 512
    """Maximum number of concurrent answers of an engine."""
    prompt_tokens: int = 500
    block_tokens: int = BLOCK_TOKENS
    """Tokens in one block of the engines' KV cache."""
    requests: int = 2000
    seed: int = 1

    @property
    def machine(self) -> Machine:
        """Hardware of all engines. Prompts take almost no time."""
        kneed = _KNEED.cost
        slope = _STEP_SECONDS * _LINEAR_SHARE if self.step == "linear" else 0.0
        cost = Cost(prompt=0.002, prompt_token=1e-6, step=_STEP_SECONDS, step_sequence=slope)
        if self.step == "kneed":
            cost = replace(kneed, prompt=cost.prompt, prompt_token=cost.prompt_token, attention=0.0)
        return Machine(
            self.step,
            cost,
            prefill=Shape(64, 16_384, _KV_TOKENS, self.block_tokens),
            decode=Shape(self.max_answers, 8192, _KV_TOKENS, self.block_tokens),
        )

    @property
    def fleet(self) -> Fleet:
        """The engines."""
        return Fleet(self.prefillers, self.decoders, prefill_machine=self.machine, decode_machine=self.machine)

    @property
    def answers(self) -> int:
        """Mean number of concurrent answers of all decoders."""
        knee = self.machine.cost.knee
        return self.decoders * _ANSWERS if knee is None else max(1, round(self.decoders * knee * self.load))

    @property
    def rate(self) -> float:
        """Requests per second."""
        cost, tokens = self.machine.cost, sum(LENGTHS[self.lengths]) / 2
        if cost.knee is not None:
            return self.load * self.decoders * cost.knee_rate(cost.knee, 0) / tokens
        return self.answers / (tokens * cost.decode(_ANSWERS, 0))

    def requests_in_order(self) -> list[Request]:
        """All requests in the order of their times."""
        rng = random.Random(self.seed)
        at = 0.0
        made = []
        for number in range(self.requests):
            if self.arrivals == "poisson":
                at += rng.expovariate(self.rate)
            elif self.arrivals == "bursts" and number and number % _BURST == 0:
                at += _BURST / self.rate
            blocks = -(-self.prompt_tokens // BLOCK_TOKENS)
            names = tuple(range(number * blocks + 1, (number + 1) * blocks + 1))
            made.append(Request(at, self.prompt_tokens, rng.randint(*LENGTHS[self.lengths]), names))
        return made


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run. Times are means in seconds after arrival, over served requests."""

    served: float
    """Share of requests that were not rejected."""
    first_token_seconds: float
    answer_seconds: float
    """Time to the last token."""


def outcome(world: World, prefill_policy: str, decode_policy: str) -> tuple[Outcome, Replay]:
    """Run a world to its end."""
    made: list[Replay] = []

    async def course(loop_lag: LoopLag | None) -> None:
        policies = _named(prefill_policy), _named(decode_policy)
        replay = Replay(world.fleet, *policies, seed=world.seed, loop_lag=loop_lag)
        made.append(replay)
        requests = world.requests_in_order()
        if world.arrivals == "closed loop":
            await replay.run_closed(requests, clients=world.answers)
        else:
            await replay.run(requests)

    late_loop.run(course, is_late=world.is_late, seed=world.seed)
    return _outcome_of(made[0]), made[0]


def compared(world: World, *, prefill: str = LEARNS_NOTHING, decode: str = LEARNS_NOTHING) -> tuple[Outcome, Outcome]:
    """Run a world with these policies, and with `least_tokens` for both roles."""
    return outcome(world, prefill, decode)[0], outcome(world, LEARNS_NOTHING, LEARNS_NOTHING)[0]


def _named(name: str) -> MakePolicy:
    make: Callable[[PolicyContext], Policy] = partial(make_policy, name)
    return lambda context, _engines: make(context)


def _outcome_of(replay: Replay) -> Outcome:
    served = [course for course in replay.courses if course.ended_at is not None]
    firsts = [seconds for course in served if (seconds := course.first_token_seconds) is not None]
    wholes = [course.ended_at - course.request.at for course in served if course.ended_at is not None]
    count = max(1, len(served))
    return Outcome(len(served) / len(replay.courses), sum(firsts) / count, sum(wholes) / count)
