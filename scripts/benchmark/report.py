"""Medians of the rounds, and the ratio to the peer, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmark.scenarios import PACED, SHORT_STREAM, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from benchmark.load import Result

    ByScenario: TypeAlias = Mapping[str, Sequence["Measurement"]]
    Figure: TypeAlias = Callable[[ByScenario], float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one scenario: what came of it, and the CPU time of the program meanwhile."""

    result: Result
    cpu_seconds: float

    @property
    def per_request(self) -> float:
        """CPU, µs per completed request."""
        return 1e6 * self.cpu_seconds / max(1, self.result.completed)

    @property
    def per_token(self) -> float:
        """CPU, µs per streamed token: everything included, also what the requests cost."""
        return 1e6 * self.cpu_seconds / max(1, self.result.tokens)

    @property
    def requests_per_second(self) -> float:
        return self.result.completed / self.result.seconds

    def first_token_ms(self, share: float) -> float:
        """The time below which this share of the first tokens came."""
        times = sorted(self.result.first_token_ms)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def table(scenarios: Sequence[Scenario], rounds: Mapping[str, ByScenario]) -> str:
    """The figures of every peer, by its name, side by side; the ratios are the first peer's to each other one's."""
    first, *others = rounds
    lines = [("", *rounds, *(f"{first} / {other}" for other in others))]
    for scenario in scenarios:
        lines.append((scenario.title, *[""] * (len(rounds) + len(others))))
        for label, figure in _figures(scenario):
            values = [figure(by_scenario) for by_scenario in rounds.values()]
            ratios = [f"{values[0] / value:.3f}" if value > 0 else "-" for value in values[1:]]
            lines.append((f"  {label}", *(f"{value:,.1f}" for value in values), *ratios))
        errors = [sum(sum(m.result.errors.values()) for m in peer[scenario.name]) for peer in rounds.values()]
        lines.append(("  errors", *map(str, errors), *[""] * len(others)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in enumerate(cells))
        for cells in (zip(line, widths, strict=True) for line in lines)
    )


def _figures(scenario: Scenario) -> list[tuple[str, Figure]]:
    """Labels of a scenario's figures, and how each is got from one peer's measurements."""

    def of(figure: Callable[[Measurement], float]) -> Figure:
        return lambda peer: median(figure(measurement) for measurement in peer[scenario.name])

    if scenario.name == PACED:
        return [
            ("CPU, µs per token, all included", of(lambda m: m.per_token)),
            ("CPU, µs per further token", _per_further_token),
            ("first token, ms, p50", of(lambda m: m.first_token_ms(0.5))),
            ("first token, ms, p99", of(lambda m: m.first_token_ms(0.99))),
        ]
    return [
        ("CPU, µs per request", of(lambda m: m.per_request)),
        ("requests/s", of(lambda m: m.requests_per_second)),
    ]


def _per_further_token(peer: ByScenario) -> float:
    """Without what as many 1-token streams cost: their CPU taken off, and their tokens."""
    if SHORT_STREAM not in peer:
        return float("nan")
    first = median(m.per_request for m in peer[SHORT_STREAM]) / 1e6
    return median(
        1e6 * (m.cpu_seconds - first * m.result.completed) / max(1, m.result.tokens - m.result.completed)
        for m in peer[PACED]
    )
