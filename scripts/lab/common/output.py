"""Output of scripts: tables of text and SVG documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

# The background is part of the drawing, for light and for dark pages.
_STYLE: Final = """
  .ground { fill: #ffffff; stroke: #d0d7de } .panel { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d0d7de }
  text { fill: #1f2328; font: 12px system-ui, sans-serif } .title { font-size: 15px; font-weight: 600 }
  .name { font-weight: 600 } .small { fill: #59636e; font-size: 11px } .number { font-size: 22px; font-weight: 600 }
  .line { fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d } .panel { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
    text { fill: #f0f6fc } .small { fill: #9198a1 }
  }"""
# Okabe and Ito's colours, which colour-blind readers can distinguish, and greys.
COLOURS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#8c6d31", "#5e4fa2", "#3d444d"),
)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a line for each row; every column is as wide as the widest of its cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def svg(width: float, height: float, drawn: Iterable[str]) -> str:
    """Return an SVG document. Classes: title, name, small, number, grid, line, panel."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}\n</style>'
    return "\n".join([head, ground, *drawn, "</svg>\n"])


_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 60, 50, 520, 300, 220


def line_chart(
    heading: tuple[str, str],
    lines: Mapping[str, Mapping[float, float]],
    levels: Mapping[float, str],
    marked: float | None = None,
) -> str:
    """Return an SVG chart with a line for each name.

    Args:
      heading: Title and subtitle.
      lines: Points of each line, y by x. There is at least one.
      levels: Texts beside the horizontal lines of the grid, by y. The axis is from 0 to the highest point or level.
      marked: A value of x to mark, if it is between the points. None: nothing is marked.
    """
    numbers = sorted({number for points in lines.values() for number in points})
    low, span = numbers[0], numbers[-1] - numbers[0] or 1
    high = max(*levels, *(value for points in lines.values() for value in points.values()))

    def x(number: float) -> float:
        return _LEFT + _WIDTH * (number - low) / span

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / high)

    drawn = [
        f'<text class="title" x="{_LEFT}" y="24">{escape(heading[0])}</text>',
        f'<text x="{_LEFT}" y="41">{escape(heading[1])}</text>',
    ]
    for level, text in levels.items():
        drawn.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}h{_WIDTH}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{text}</text>')
    below = _TOP + _HEIGHT + 18
    drawn += [f'<text x="{x(number):.1f}" y="{below}" text-anchor="middle">{number:g}</text>' for number in numbers]
    if marked is not None and numbers[0] <= marked <= numbers[-1]:
        drawn.append(f'<path class="grid" d="M{x(marked):.1f} {_TOP}v{_HEIGHT}"/>')
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        corners = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in sorted(points.items()))
        drawn.append(f'<polyline class="line" stroke="{colour}" points="{corners}"/>')
        below = _TOP + 12 + 20 * index
        drawn.append(f'<path class="line" stroke="{colour}" d="M{_LEFT + _WIDTH + 16} {below - 4}h18"/>')
        drawn.append(f'<text x="{_LEFT + _WIDTH + 40}" y="{below}">{escape(name)}</text>')
    return svg(_LEFT + _WIDTH + _LEGEND, max(_TOP + _HEIGHT + 36, _TOP + 20 * len(lines) + 16), drawn)
