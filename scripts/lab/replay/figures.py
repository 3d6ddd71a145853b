"""What a run was like, in numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import isnan, nan
from typing import Any, Final, Protocol

from lab.replay.engines import Engine
from lab.replay.fleet import Course, Fleet
from proxy.common.backend import Backend

# The first tenth of a run fills queues and caches, and does not count.
_WARM_UP: Final = 0.1
# Predictions are judged from this request on.
_LEARNED: Final = 200
_SHORT_TOKENS: Final = 32 * 1024
SUSTAINED: Final = 0.95
"""A fleet sustains a load at which so many answers are in time."""


@dataclass(frozen=True, slots=True)
class Slo:
    """When an answer is good. One that is refused is not."""

    first_token_seconds: float = 10.0
    base_seconds: float = 2.0
    """In time is a first token within this and so many times what its prompt takes without a cache."""
    factor: float = 3.0
    token_seconds: float = 0.1
    """Of good answers the tokens come at this pace or faster."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or the means of several. Times in seconds; shares from 0 to 1; not a number where there is nothing to
    tell.
    """

    requests: float
    served: float
    """The share that was not refused."""
    in_time: float
    """First tokens within `Slo.base_seconds` and `factor` times the prompt's own work."""
    within: float
    """First tokens within `Slo.first_token_seconds`."""
    good: float
    """In time, and every token at `Slo.token_seconds` or faster."""
    hits: float
    """Of the prompts' tokens, those that prefillers found in their caches."""
    mean: float
    """Of the seconds to the first token, as the next five."""
    p50: float
    p90: float
    p99: float
    p99_short: float
    """Of prompts up to 32K tokens."""
    p99_slowdown: float
    """Of the seconds to the first token, as multiples of what the prompt takes without a cache."""
    token_p99: float
    imbalance: float
    """The busiest prefiller's time at work over the mean's."""
    off_p50: float
    """By how much what prefills took was off what had been predicted, as a part of what they took, from the 200th
    request on."""
    off_p95: float
    recomputed: float
    """Tokens that preempted sequences computed again, as a part of all that decoders made."""


class Ended(Protocol):
    """A run, in virtual time or over sockets."""

    courses: list[Course]
    engines: dict[Backend, Engine]


def figures(replay: Ended, fleet: Fleet, slo: Slo) -> Figures:
    """Of one run that has ended. Times are told as they would be at speed 1."""
    courses = replay.courses[int(_WARM_UP * len(replay.courses)) :]
    speed = fleet.speed
    waits = [(course, speed * wait) for course in courses if (wait := course.first_token_seconds) is not None]
    work = {id(course): fleet.work_seconds(course.request) for course in courses}
    in_time = {id(course) for course, wait in waits if wait <= slo.base_seconds + slo.factor * work[id(course)]}
    paces = {id(course): speed * pace for course in courses if (pace := course.token_seconds) is not None}
    seconds = [wait for _, wait in waits]
    busy: list[float] = []
    recomputed = 0
    for backend, engine in replay.engines.items():
        if backend.role.value == "prefill":
            busy.append(engine.batch.busy_seconds)
        else:
            recomputed += engine.batch.recomputed_tokens
    off = [error for course in replay.courses[_LEARNED:] if (error := _prediction_error(course)) is not None]
    made = sum(course.request.output_tokens for course in replay.courses if course.ended_at is not None)
    return Figures(
        requests=len(courses),
        served=len(waits) / len(courses),
        in_time=len(in_time) / len(courses),
        within=sum(wait <= slo.first_token_seconds for wait in seconds) / len(courses),
        good=sum(paces.get(each, 0.0) <= slo.token_seconds for each in in_time) / len(courses),
        hits=sum(course.cached_tokens for course in courses) / sum(course.request.input_tokens for course in courses),
        mean=sum(seconds) / len(seconds) if seconds else nan,
        p50=_percentile(seconds, 0.5),
        p90=_percentile(seconds, 0.9),
        p99=_percentile(seconds, 0.99),
        p99_short=_percentile([wait for course, wait in waits if course.request.input_tokens <= _SHORT_TOKENS], 0.99),
        p99_slowdown=_percentile([wait / work[id(course)] for course, wait in waits], 0.99),
        token_p99=_percentile(list(paces.values()), 0.99),
        imbalance=max(busy) * len(busy) / sum(busy) if any(busy) else nan,
        off_p50=_percentile(off, 0.5),
        off_p95=_percentile(off, 0.95),
        recomputed=recomputed / made if made else nan,
    )


def _prediction_error(course: Course) -> float | None:
    if course.predicted_seconds is None or not course.prefill_seconds:
        return None
    return abs(course.predicted_seconds / course.prefill_seconds - 1)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else nan


def mean(runs: Sequence[Figures]) -> Figures:
    """Of several runs, each figure by itself, over those that have it."""
    means = {}
    for each in fields(Figures):
        values = [value for run in runs if not isnan(value := getattr(run, each.name))]
        means[each.name] = sum(values) / len(values) if values else nan
    return Figures(**means)


@dataclass(frozen=True, slots=True)
class Case:
    """What is replayed, and on what."""

    trace: str
    fleet: str

    def __str__(self) -> str:
        return f"{self.trace}, {self.fleet}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: which policy under which load, and what came of it."""

    case: Case
    policy: str
    load: float
    seed: int
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """For a report that programs read."""
        told = {name: None if isnan(value) else value for name, value in asdict(self.figures).items()}
        return {**asdict(self.case), "policy": self.policy, "load": self.load, "seed": self.seed, **told}


def by_policy(runs: Sequence[Run]) -> dict[str, dict[float, Figures]]:
    """The means over the seeds, by policy and load, both in the order in which they came."""
    grouped: dict[str, dict[float, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[run.policy][run.load].append(run.figures)
    return {policy: {load: mean(each) for load, each in loads.items()} for policy, loads in grouped.items()}


def sustained_load(loads: dict[float, Figures]) -> float | None:
    """The largest load with 95 % of answers in time, between the loads that were run by a straight line. None: already
    the lowest one is too much; a fleet may sustain more than the highest that was run.
    """
    points = sorted((load, each.in_time) for load, each in loads.items())
    if points[0][1] < SUSTAINED:
        return None
    for (low, before), (high, after) in itertools.pairwise(points):
        if after < SUSTAINED:
            return low + (high - low) * (before - SUSTAINED) / (before - after)
    return points[-1][0]
