"""The report: a table of all figures and ratios, the targets, and a chart of CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isnan

from lab.bench.course import DIRECT, FIGURES, NOT_RESUMING, Measurements
from lab.bench.scenarios import (
    PACED,
    SATURATED_ANSWER,
    SATURATED_STREAM,
    SHORT_ANSWER,
    SHORT_STREAM,
    SLOW_5000,
    Scenario,
)
from lab.common.engines import FIRST_TOKEN_SECONDS
from lab.common.output import svg
from lab.common.peers import OURS, REFERENCE, RUST_ROUTERS

_NOTHING = "-"
NOTES = f"""\
CPU: user and system time of the program and its children. Further token: without the cost of as many 1-token streams
and their tokens. First token: from the request to the first content at the client, on an open connection; engines take
{1000 * FIRST_TOKEN_SECONDS:g} ms of it. Added: difference to "direct", which is without a program, in the same run.
Between tokens: between two arrivals of content at the client. Memory: the maximum that was resident; per stream: the
growth, by streams open at once, in a new program. The load generator and the engines share the cores with the program.
pdproxy uses both cores only in "both cores" (--workers 2); the routers may always.

vllm-router speaks the same pull protocol as pdproxy. sglang-router speaks SGLang's: it sends both engines the same
request at once, so its first token does not wait for a prefiller's answer. It leaves Nagle's algorithm on for clients,
so streams on a used connection wait 40 ms for an acknowledgement, which limits requests/s at 32 at a time. Both run
with --policy round_robin and --log-level error. Neither requests token ids, which make pdproxy's events larger; "not
resuming" is pdproxy without them (resume.mode: restart-only). 1K in, 1K out and so on are loads of SGLang's published
figures. At a realistic pace an answer takes 20 s, so answers are shortened to the time of the run.
"""


def table(scenarios: Sequence[Scenario], measurements: Measurements) -> str:
    """Return the figures side by side, with pdproxy's ratios to each peer and to the better router."""
    programs = measurements.programs
    peers = [name for name in programs if name in (*RUST_ROUTERS, REFERENCE)]
    compares_routers = any(name in programs for name in RUST_ROUTERS)
    head = ["", *programs, *(f"/ {peer}" for peer in peers), *(["/ better router"] if compares_routers else [])]
    lines = [head]
    for scenario in scenarios:
        lines.append([scenario.title])
        for name in (*scenario.figures, "errors"):
            values = {program: measurements.figure(program, scenario.name, name) for program in programs}
            ratios = [_ratio(values[OURS], values[peer]) for peer in peers]
            if compares_routers:
                ratios.append(_ratio(values[OURS], measurements.better_router(scenario.name, name)))
            figure = FIGURES[name]
            lines.append(
                [f"  {figure.label}", *(_number(value, figure.decimals) for value in values.values()), *ratios]
            )
    return _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    """Align columns. Lines with one cell are titles of any length."""
    widths = [max(map(len, column)) for column in zip(*(line for line in lines if len(line) > 1), strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells)
        ).rstrip()
        for cells in (list(zip(line, widths, strict=False)) for line in lines)
    )


def _number(value: float, decimals: int) -> str:
    if isnan(value):
        return _NOTHING
    return f"{value:,.{0 if value >= 1000 else decimals}f}"


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs > 0 and not isnan(ours) else _NOTHING


# Targets of pdproxy

ROUTER = "better router"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound: a multiple of a peer's figure, or an absolute value without a peer."""

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
    """Return a line for each measured target: met or missed, and by how much."""
    return "\n".join(line for target in TARGETS if (line := _line(target, measurements)) is not None)


def _line(target: Target, measurements: Measurements) -> str | None:
    figure = FIGURES[target.figure]
    ours = measurements.figure(OURS, target.scenario, target.figure)
    theirs = _reference_value(target, measurements)
    if isnan(ours) or isnan(theirs):
        return None
    limit = target.bound * theirs
    met = ours >= limit if figure.more_is_better else ours <= limit
    away = f" by {abs(ours / limit - 1):.0%}" if limit > 0 else ""
    sign = "≥" if figure.more_is_better else "≤"
    bound = f"{target.bound:g}" if target.peer is None else f"{target.bound:g} × {theirs:.1f} ({target.peer})"
    return f"target {'met' if met else 'missed'}{away}: {target.scenario}, {figure.label}: {ours:.1f} {sign} {bound}"


def _reference_value(target: Target, measurements: Measurements) -> float:
    """Return the value that the bound is a multiple of."""
    if target.peer is None:
        return 1.0
    if target.peer == ROUTER:
        return measurements.better_router(target.scenario, target.figure)
    return measurements.figure(target.peer, target.scenario, target.figure)


# The chart

_COLOURS = {
    OURS: "#0072b2",
    NOT_RESUMING: "#56b4e9",
    "vllm-router": "#e69f00",
    "sglang-router": "#009e73",
    REFERENCE: "#999999",
}
_SUBTITLE = "user and system time, median of the rounds; each scenario has a separate scale"
_COLUMNS = 2
_COLUMN = 460
_MARGIN = 20
_HEAD = 62
_NAMES = 92
_LONGEST_BAR = 260
_BAR = 13
_PITCH = 17
_GROUP_HEAD = 34
_GROUP_GAP = 16


def chart(scenarios: Sequence[Scenario], measurements: Measurements) -> str:
    """Return an SVG chart. In each scenario the longest bar is the most expensive program."""
    groups = [group for scenario in scenarios if (group := _group(scenario, measurements))]
    height_of_all = sum(_height(bars) for _, _, bars in groups)
    drawn: list[str] = []
    column, top, lowest = 0, _HEAD, _HEAD
    for title, unit, bars in groups:
        if column < _COLUMNS - 1 and top > _HEAD and top - _HEAD + _height(bars) / 2 > height_of_all / _COLUMNS:
            column, top = column + 1, _HEAD
        drawn += _drawn(_MARGIN + column * _COLUMN, top, title, unit, bars)
        top += _height(bars)
        lowest = max(lowest, top)
    heading = [
        f'<text class="title" x="{_MARGIN}" y="28">CPU time of the proxy: shorter is better</text>',
        f'<text class="small" x="{_MARGIN}" y="46">{_SUBTITLE}</text>',
    ]
    return svg(2 * _MARGIN + _COLUMNS * _COLUMN, lowest + _MARGIN // 2, [*heading, *drawn])


def _group(scenario: Scenario, measurements: Measurements) -> tuple[str, str, dict[str, float]] | None:
    """Return the title, the unit and the value of each program in the chart, or None without values."""
    name = scenario.figures[0]
    if not name.startswith("cpu_"):
        return None
    programs = (program for program in measurements.programs if program != DIRECT)
    values = {program: measurements.figure(program, scenario.name, name) for program in programs}
    known = {program: value for program, value in values.items() if not isnan(value)}
    return (scenario.title, FIGURES[name].label, known) if known else None


def _height(bars: dict[str, float]) -> int:
    return _GROUP_HEAD + _PITCH * len(bars) + _GROUP_GAP


def _drawn(left: int, top: int, title: str, unit: str, bars: dict[str, float]) -> list[str]:
    lines = [
        f'<text class="name" x="{left}" y="{top + 12}">{escape(title)}</text>',
        f'<text class="small" x="{left}" y="{top + 27}">{escape(unit)}</text>',
    ]
    most = max(bars.values())
    for index, (program, value) in enumerate(bars.items()):
        y = top + _GROUP_HEAD + index * _PITCH
        length = max(1.0, _LONGEST_BAR * value / most) if most else 1.0
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        colour = _COLOURS.get(program, "#999999")
        x = left + _NAMES
        lines += [
            f'<text x="{x - 8}" y="{y + 11}" text-anchor="end">{escape(program)}</text>',
            f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{x + length + 6:.1f}" y="{y + 11}">{shown}</text>',
        ]
    return lines
