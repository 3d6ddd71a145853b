"""The CPU time of every scenario as bars, in an SVG that brings its own ground for light pages and for dark ones."""

from __future__ import annotations

from html import escape
from math import isnan
from typing import TYPE_CHECKING

from lab.bench.figures import FIGURES
from lab.bench.rivals import DIRECT, NOT_RESUMING
from lab.common.peers import OURS, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.figures import Measurements
    from lab.bench.scenarios import Scenario

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = {
    OURS: "#0072b2",
    NOT_RESUMING: "#56b4e9",
    "vllm-router": "#e69f00",
    "sglang-router": "#009e73",
    REFERENCE: "#999999",
}
_STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 12px system-ui, sans-serif }
  .title { font-size: 15px; font-weight: 600 } .scenario { font-weight: 600 } .small { fill: #59636e; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .small { fill: #9198a1 }
  }"""
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
    width, height = 2 * _MARGIN + _COLUMNS * _COLUMN, lowest + _MARGIN // 2
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{_STYLE}\n</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
            f'<text class="title" x="{_MARGIN}" y="28">CPU time of the proxy: shorter is better</text>',
            f'<text class="small" x="{_MARGIN}" y="46">{_SUBTITLE}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


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
        f'<text class="scenario" x="{left}" y="{top + 12}">{escape(title)}</text>',
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
