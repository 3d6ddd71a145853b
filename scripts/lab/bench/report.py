"""Every figure of every program in one table, the ratios, the targets of this gateway, and CPU time as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isnan

from lab.bench.figures import DIRECT, FIGURES, NOT_RESUMING, Measurements
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
CPU: user and system time of the program and its children. Further token: without what as many 1-token streams cost, and
without their tokens. First token: from the request to the first content at the client, on an open connection;
{1000 * FIRST_TOKEN_SECONDS:g} ms are the engine's. Added: more than without a program ("direct", in the same run).
Between tokens: between two arrivals of content at the client. Memory: the most that was resident; per stream: what was
added, by streams open at once, in a program just started and measured once. The load generator and the engines share
the cores with the program; only under "both cores" does this gateway use more than one (--workers 2), the routers may
always.

vllm-router speaks the same pull protocol as this gateway. sglang-router speaks SGLang's: it sends both engines the
same request at once, so that its first token does not wait for a prefiller's answer. It leaves Nagle's algorithm on
towards clients, so that a stream on a connection in use waits 40 ms for an acknowledgement: hence few requests/s at
32 at a time. Both: --policy round_robin, --log-level error, everything else as it comes. Neither asks for token ids,
which make this gateway's events larger; "not resuming" is this gateway without them (resume.mode: restart-only). 1K
in, 1K out and so on are the loads that SGLang publishes figures for; at a realistic pace an answer takes 20 s, so
only as many tokens are asked for as come within the time.
"""


def table(scenarios: Sequence[Scenario], measurements: Measurements) -> str:
    """The figures side by side; the ratios are this gateway's to each peer, and to the better one of the routers."""
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
    """Lines with one cell are titles, as long as they like."""
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


# What this gateway has to reach: the only place where a bound stands

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


# The chart

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = {
    OURS: "#0072b2",
    NOT_RESUMING: "#56b4e9",
    "vllm-router": "#e69f00",
    "sglang-router": "#009e73",
    REFERENCE: "#999999",
}
_SUBTITLE = "user and system time, median of the rounds; every scenario has a scale of its own"
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
    """An SVG document. Within a scenario the longest bar is the program that takes most."""
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
    """Title, unit and value by program of what is drawn of a scenario; None: nothing."""
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
