"""What this gateway has to reach, and whether it does. The list is the only place where a bound stands."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from lab.bench.figures import FIGURES
from lab.bench.scenarios import PACED, SATURATED_ANSWER, SATURATED_STREAM, SHORT_ANSWER, SHORT_STREAM, SLOW_5000
from lab.common.peers import OURS, REFERENCE

if TYPE_CHECKING:
    from lab.bench.figures import Measurements

ROUTER = "better router"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound, as a multiple of a peer's figure or, without a peer, as it is."""

    scenario: str
    figure: str
    bound: float
    peer: str | None


TARGETS = (
    Target(SHORT_STREAM, "cpu_per_request", 0.75, ROUTER),
    Target(SHORT_STREAM, "cpu_per_request", 0.08, REFERENCE),
    Target(SHORT_ANSWER, "cpu_per_request", 0.75, ROUTER),
    Target(SHORT_ANSWER, "cpu_per_request", 0.08, REFERENCE),
    Target(PACED, "cpu_per_token", 0.9, ROUTER),
    Target(PACED, "cpu_per_token", 0.08, REFERENCE),
    Target(PACED, "added_p50", 1.0, ROUTER),
    Target(PACED, "added_p99", 1.0, ROUTER),
    Target(SATURATED_STREAM, "requests_per_second", 1.0, ROUTER),
    Target(SATURATED_ANSWER, "requests_per_second", 1.0, ROUTER),
    Target(SLOW_5000, "memory_per_stream", 60.0, None),
    Target(SLOW_5000, "errors", 0.0, None),
)


def judged(measurements: Measurements) -> str:
    """A line for each target that was measured: met or missed, and by how much."""
    return "\n".join(line for target in TARGETS if (line := _line(target, measurements)) is not None)


def _line(target: Target, measurements: Measurements) -> str | None:
    figure = FIGURES[target.figure]
    ours = measurements.figure(OURS, target.scenario, target.figure)
    theirs = _unit(target, measurements)
    if isnan(ours) or isnan(theirs):
        return None
    limit = target.bound * theirs
    met = ours >= limit if figure.more_is_better else ours <= limit
    away = f" by {abs(ours / limit - 1):.0%}" if limit > 0 else ""
    sign = "≥" if figure.more_is_better else "≤"
    bound = f"{target.bound:g}" if target.peer is None else f"{target.bound:g} × {theirs:.1f} ({target.peer})"
    return f"target {'met' if met else 'missed'}{away}: {target.scenario}, {figure.label}: {ours:.1f} {sign} {bound}"


def _unit(target: Target, measurements: Measurements) -> float:
    """What the bound is a multiple of."""
    if target.peer is None:
        return 1.0
    if target.peer == ROUTER:
        return measurements.better_router(target.scenario, target.figure)
    return measurements.figure(target.peer, target.scenario, target.figure)
