"""Output of scripts: tables of text and SVG documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
