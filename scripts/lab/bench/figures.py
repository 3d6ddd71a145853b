"""What is told of a scenario, and how each figure is got from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import median
from typing import Final, TypeAlias

from lab.bench.load import Result
from lab.bench.scenarios import SHORT_STREAM
from lab.common.load import Histogram
from lab.common.peers import RUST_ROUTERS

Of: TypeAlias = Callable[["Measurements", str, str], float]


DIRECT: Final = "direct"
"""In place of a program: the engines themselves."""
NOT_RESUMING: Final = "not resuming"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one scenario: what came of it, and what the program took meanwhile. NaN: there was no program."""

    result: Result
    cpu_seconds: float = nan
    bytes_before: float = nan
    bytes_at_most: float = nan


@dataclass(frozen=True, slots=True)
class Measurements:
    """All measurements, by program and scenario."""

    programs: tuple[str, ...]
    _taken: dict[tuple[str, str], list[Measurement]] = field(default_factory=dict)

    def add(self, program: str, scenario: str, measurement: Measurement) -> None:
        self._taken.setdefault((program, scenario), []).append(measurement)

    def of(self, program: str, scenario: str) -> list[Measurement]:
        """None at all when the program was not measured there."""
        return self._taken.get((program, scenario), [])

    def figure(self, program: str, scenario: str, name: str) -> float:
        """The median of the rounds; NaN when there is nothing to tell."""
        return FIGURES[name].of(self, program, scenario)

    def has_errors(self) -> bool:
        return any(m.result.errors for taken in self._taken.values() for m in taken)

    def better_router(self, scenario: str, name: str) -> float:
        """The figure of the better router in Rust; NaN without any."""
        values = [self.figure(router, scenario, name) for router in RUST_ROUTERS]
        known = [value for value in values if not isnan(value)]
        better = max if FIGURES[name].more_is_better else min
        return better(known, default=nan)


@dataclass(frozen=True, slots=True)
class Figure:
    """`of` takes the measurements, a program and a scenario."""

    label: str
    of: Of
    more_is_better: bool = False
    decimals: int = 1


def _median(of: Callable[[Measurement], float]) -> Of:
    def figure(measurements: Measurements, program: str, scenario: str) -> float:
        return median([of(m) for m in measurements.of(program, scenario)] or [nan])

    return figure


def _cpu_per(count: Callable[[Result], int]) -> Of:
    return _median(lambda m: 1e6 * m.cpu_seconds / max(1, count(m.result)))


def _further_token(measurements: Measurements, program: str, scenario: str) -> float:
    """Without what as many 1-token streams cost: their CPU taken off, and their tokens."""
    request = measurements.figure(program, SHORT_STREAM, "cpu_per_request")
    further = _median(
        lambda m: (1e6 * m.cpu_seconds - request * m.result.completed) / max(1, m.result.tokens - m.result.completed)
    )
    return further(measurements, program, scenario)


def _first_token(share: float) -> Of:
    return _median(lambda m: Histogram(m.result.first_tokens).milliseconds(share))


def _gap(share: float) -> Of:
    return _median(lambda m: Histogram(m.result.gaps).milliseconds(share))


def _errors(measurements: Measurements, program: str, scenario: str) -> float:
    """Of all rounds."""
    taken = measurements.of(program, scenario)
    return sum(sum(m.result.errors.values()) for m in taken) if taken else nan


def _added(of: Of) -> Of:
    """More than without a program."""

    def figure(measurements: Measurements, program: str, scenario: str) -> float:
        return of(measurements, program, scenario) - of(measurements, DIRECT, scenario)

    return figure


FIGURES = {
    "cpu_per_request": Figure("CPU, µs per request", _cpu_per(lambda r: r.completed)),
    "cpu_per_token": Figure("CPU, µs per token, requests included", _cpu_per(lambda r: r.tokens)),
    "cpu_per_further_token": Figure("CPU, µs per further token", _further_token),
    "requests_per_second": Figure("requests/s", _median(lambda m: m.result.completed / m.result.seconds), True, 0),
    "first_token_p50": Figure("first token, ms, p50", _first_token(0.5)),
    "first_token_p99": Figure("first token, ms, p99", _first_token(0.99)),
    "added_p50": Figure("added to the first token, ms, p50", _added(_first_token(0.5))),
    "added_p99": Figure("added to the first token, ms, p99", _added(_first_token(0.99))),
    "gap_p99": Figure("between tokens, ms, p99", _gap(0.99)),
    "memory": Figure("memory, MiB", _median(lambda m: m.bytes_at_most / 2**20)),
    "memory_per_stream": Figure(
        "memory, KiB per stream",
        _median(lambda m: (m.bytes_at_most - m.bytes_before) / 1024 / max(1, m.result.open_at_once)),
    ),
    "beside": Figure("8 MiB images answered per second", _median(lambda m: m.result.beside / m.result.seconds), True),
    "errors": Figure("errors", _errors, decimals=0),
}
