"""Worlds for the controller of elastic instances: fleets, hardware, lengths and courses of load, drawn by a seed.

The settings of the controller were chosen with the loads of `lab.replay.drawn`. Worlds are other loads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from lab.replay.fleet import Fleet
from lab.replay.sweep import HARDWARE
from lab.replay.trace import BLOCK_TOKENS, Request

_MAX_PROMPT_TOKENS: Final = 100_000
_MAX_ANSWER_TOKENS: Final = 20_000
_MAX_REQUESTS: Final = 6000
_DRAWS: Final = 400
_TOKEN_SECONDS: Final = 0.1
# Shorter phases end before a move could pay, so a clairvoyant has one split for all of them.
_SHORT_SECONDS: Final = 600.0
# The 99th percentile of a normal distribution, in standard deviations.
_P99: Final = 2.326


@dataclass(frozen=True, slots=True)
class Mix:
    """Log-normal lengths of prompts and answers, in tokens."""

    prompt: float
    """Median of the prompts."""
    prompt_spread: float
    """99th percentile of the prompts, relative to their median."""
    answer: float
    answer_spread: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return the tokens of a prompt and of its answer."""
        prompt = self.prompt * math.exp(rng.gauss(0.0, math.log(self.prompt_spread) / _P99))
        answer = self.answer * math.exp(rng.gauss(0.0, math.log(self.answer_spread) / _P99))
        return min(_MAX_PROMPT_TOKENS, max(16, round(prompt))), min(_MAX_ANSWER_TOKENS, max(2, round(answer)))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time with one load."""

    seconds: float
    share: float
    """Share of the requests that are of the second mix."""
    load: float
    """Rate of the requests, relative to the most that the best split for them can serve."""
    phase: int
    """Number of the phase that it belongs to. -1: it is not judged."""


@dataclass(frozen=True, slots=True)
class World:
    """One drawn world."""

    seed: int
    shape: str
    fleet: Fleet
    """The fleet, in the split with which the run begins."""
    mixes: tuple[Mix, Mix]
    stretches: tuple[Stretch, ...]

    @property
    def name(self) -> str:
        return f"{self.seed} {self.shape}"

    @property
    def instances(self) -> int:
        return self.fleet.prefillers + self.fleet.decoders

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.stretches)

    def with_split(self, prefillers: int) -> Fleet:
        """Return the fleet in another split."""
        return replace(self.fleet, prefillers=prefillers, decoders=self.instances - prefillers)

    def requests(self) -> list[tuple[int, Request]]:
        """Return the requests, each with the number of its phase."""
        rng = random.Random(f"{self.seed} requests")
        requests, began, at, block = list[tuple[int, Request]](), 0.0, 0.0, 0
        for stretch in self.stretches:
            rate, at = self.rate(stretch), began
            while (at := at + rng.expovariate(rate)) < began + stretch.seconds:
                prompt, answer = self.mixes[rng.random() < stretch.share].draw(rng)
                blocks = -(-prompt // BLOCK_TOKENS)
                requests.append((stretch.phase, Request(at, prompt, answer, tuple(range(block, block + blocks)))))
                block += blocks
            began += stretch.seconds
        return requests

    def rate(self, stretch: Stretch) -> float:
        """Return the requests per second of a stretch.

        The load of a short one is relative to the best split for the whole phase, because no move pays within it.
        """
        phase = [each for each in self.stretches if each.phase == stretch.phase]
        share = stretch.share if stretch.phase < 0 else _mean_share(phase)
        best = min(self.instances - 1, max(1, round(ideal_prefillers(self.fleet, self.mixes, share))))
        return stretch.load * max(self._most(share, best + step) for step in (-1, 0, 1))

    def _most(self, share: float, prefillers: int) -> float:
        """Return the most requests per second that a split can serve."""
        if not 0 < prefillers < self.instances:
            return 0.0
        prefill, decode = work(self.fleet, self.mixes, share)
        return min(prefillers / prefill, (self.instances - prefillers) / decode)

    def candidates(self) -> list[int]:
        """Return the numbers of prefillers among which the best fixed split and the clairvoyant's splits are."""
        ideal = [ideal_prefillers(self.fleet, self.mixes, each.share) for each in self.stretches]
        least, most = math.floor(min(ideal)) - 1, math.ceil(max(ideal)) + 1
        return [count for count in range(least, most + 1) if 1 <= count < self.instances]


@cache
def work(fleet: Fleet, mixes: tuple[Mix, Mix], share: float) -> tuple[float, float]:
    """Return the mean seconds that a request takes of a prefiller and of a decoder at its best."""
    decode, rng, sums = fleet.decode_machine, random.Random("work"), [0.0, 0.0]
    sizes = range(1, decode.decode.max_num_seqs + 1)
    in_time = max((size for size in sizes if decode.cost.decode(size, 0) <= _TOKEN_SECONDS), default=1)
    for _ in range(_DRAWS):
        prompt, answer = mixes[rng.random() < share].draw(rng)
        tokens = prompt + answer // 2
        size = max(1, min(in_time, decode.decode.kv_tokens // tokens))
        sums[0] += fleet.prefill_machine.cost.prefill(prompt)
        sums[1] += answer * decode.cost.decode(size, size * tokens) / size
    return sums[0] / _DRAWS, sums[1] / _DRAWS


def ideal_prefillers(fleet: Fleet, mixes: tuple[Mix, Mix], share: float) -> float:
    """Return the number of prefillers, not rounded, with which both roles are equally busy."""
    prefill, decode = work(fleet, mixes, share)
    return (fleet.prefillers + fleet.decoders) * prefill / (prefill + decode)


# The courses of load


def _steady(rng: random.Random, load: float) -> list[Stretch]:
    return [Stretch(5400.0, rng.random(), load, 0)]


def _wrong_start(rng: random.Random, load: float) -> list[Stretch]:
    share = rng.random()
    return [Stretch(1800.0, share, load, -1), Stretch(3600.0, share, load, 0)]


def _day(rng: random.Random, load: float) -> list[Stretch]:
    shares = [0.0, rng.uniform(0.3, 0.7), 1.0, rng.uniform(0.0, 0.4)]
    return [Stretch(rng.uniform(1500.0, 3000.0), share, load, phase) for phase, share in enumerate(shares)]


def _drift(rng: random.Random, load: float) -> list[Stretch]:
    return [Stretch(300.0, step / 23, load, step // 4) for step in range(24)]


def _square(rng: random.Random, load: float) -> list[Stretch]:
    half = rng.choice((30.0, 60.0, 120.0, 150.0, 300.0, 450.0, 900.0, 1350.0))
    count = round(5400.0 / half)
    return [Stretch(half, float(turn % 2), load, turn if half >= _SHORT_SECONDS else 0) for turn in range(count)]


def _bursts(rng: random.Random, load: float) -> list[Stretch]:
    """Mostly the first mix, and seconds or minutes of three times as much of the second."""
    stretches = list[Stretch]()
    while sum(each.seconds for each in stretches) < 5400.0:
        stretches.append(Stretch(rng.uniform(200.0, 1000.0), 0.0, load * 0.8, 0))
        stretches.append(Stretch(rng.uniform(10.0, 90.0), 1.0, load * 2.0, 0))
    return stretches


def _noise(rng: random.Random, load: float) -> list[Stretch]:
    return [Stretch(60.0, rng.random(), load * rng.uniform(0.6, 1.3), 0) for _ in range(90)]


def _idle(rng: random.Random, load: float) -> list[Stretch]:
    """Draw a load that ends, and another one later."""
    return [Stretch(2400.0, 0.0, load, 0), Stretch(1200.0, 0.0, 0.02, -1), Stretch(2400.0, 1.0, load, 1)]


SHAPES: Final[dict[str, Callable[[random.Random, float], list[Stretch]]]] = {
    "steady": _steady,
    "wrong start": _wrong_start,
    "day": _day,
    "drift": _drift,
    "square": _square,
    "bursts": _bursts,
    "noise": _noise,
    "idle": _idle,
    "all prefill": _steady,
    "all decode": _steady,
}
"""Functions that draw a course of load, by the name of its shape."""


def _mix(rng: random.Random, *, is_long_prompt: bool) -> Mix:
    """Draw a mix. Half of the mixes have longer prompts than answers."""
    prompt = math.exp(rng.uniform(*map(math.log, (4000, 40_000) if is_long_prompt else (300, 6000))))
    answer = math.exp(rng.uniform(*map(math.log, (50, 1000) if is_long_prompt else (300, 5000))))
    return Mix(prompt, rng.uniform(1.5, 8.0), answer, rng.uniform(1.5, 6.0))


def draw_world(seed: int, shape: str) -> World:
    """Draw a world with a shape of load."""
    for attempt in range(1000):
        rng = random.Random(f"{seed} {shape} {attempt}")
        name = rng.choice([each for each in HARDWARE if each.startswith("kimi")])
        machine = HARDWARE[name]
        # Fewer requests keep fast hardware busy at a part of its speed.
        factor = rng.uniform(0.25, 0.5) if "h200" in name else rng.uniform(1.1, 1.8)
        machine = replace(machine, name=f"{name} at {factor:.2f}", cost=machine.cost.faster(factor))
        instances, is_long = rng.randint(4, 24), rng.random() < 0.5
        mixes = _mix(rng, is_long_prompt=is_long), _mix(rng, is_long_prompt=not is_long)
        if shape == "all prefill":
            mixes = (replace(_mix(rng, is_long_prompt=True), answer=2.0, answer_spread=1.01),) * 2
        if shape == "all decode":
            mixes = (replace(_mix(rng, is_long_prompt=False), prompt=64.0, prompt_spread=1.5),) * 2
        stretches = SHAPES[shape](rng, rng.uniform(0.5, 0.8))
        fleet = Fleet(1, instances - 1, prefill_machine=machine, decode_machine=machine)
        judged = [each for each in stretches if each.phase >= 0]
        # A load of one phase begins with its best split, and others with the best one of the first phase.
        share = _mean_share(judged if judged[-1].phase == 0 else judged[:1])
        best = min(instances - 1, max(1, round(ideal_prefillers(fleet, mixes, share))))
        if shape == "wrong start":
            best = rng.choice([count for count in range(1, instances) if count != best])
        world = World(seed, shape, replace(fleet, prefillers=best, decoders=instances - best), mixes, tuple(stretches))
        if _expected_requests(world) <= _MAX_REQUESTS:
            return world
    raise ValueError(f"no world of shape {shape} has at most {_MAX_REQUESTS} requests")


def _mean_share(stretches: Sequence[Stretch]) -> float:
    weights = [each.seconds * each.load for each in stretches]
    return sum(weight * each.share for weight, each in zip(weights, stretches, strict=True)) / sum(weights)


def _expected_requests(world: World) -> float:
    return sum(each.seconds * world.rate(each) for each in world.stretches)
