"""Panels as SVG, drawn from Prometheus' answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite
from typing import Final

from lab.common.output import COLOURS, svg
from lab.dashboards.grafana import Panel
from lab.test_observability.alerts import Point, Series, Shown

STATS: Final = ("Requests", "Failed", "First token, p95", "Waiting", "Prefillers up", "Decoders up")
DRAWN: Final = (
    "overview: Answers by status",
    "stages: Mean time by stage",
    "overview: First token",
    "stages: Hand-overs",
    "instances: In flight",
    "faults: Answers continued, by cause",
    "instances: State",
)
_STATES: Final = {"green": "#2da44e", "yellow": "#d4a72c", "orange": "#e8590c", "red": "#cf222e", "blue": "#54aeff"}
_WIDTH: Final = 960
_GAP: Final = 8
_STAT_HEIGHT: Final = 64
_HEIGHT: Final = 200
_AXIS: Final = 52
_STATE_NAMES: Final = 140
_MOST_POINTS: Final = 120
_PAUSE_SECONDS: Final = 10.0
_MOST_SERIES: Final = 6


class _Time:
    """The period of the pictures."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        lines = (series for one in shown if one.title in DRAWN for given in one.series for series in given)
        self.all = sorted({at for series in lines for at, _ in series.points})
        self._began, self._ended = self.all[0], self.all[-1]

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    def place(self, at: float, left: float, right: float) -> float:
        return left + (right - left) * (at - self._began) / max(1.0, self.seconds)


def picture(shown: Sequence[Shown]) -> str:
    """Return an SVG document."""
    by_title = {one.title: one for one in shown}
    drawn: list[str] = []
    width = (_WIDTH - _GAP * (len(STATS) + 1)) / len(STATS)
    for index, title in enumerate(STATS):
        drawn += _stat(by_title[f"overview: {title}"], _GAP + index * (width + _GAP), _GAP, width)
    top, time = 2 * _GAP + _STAT_HEIGHT, _Time(shown)
    half = (_WIDTH - 3 * _GAP) / 2
    for index, title in enumerate(DRAWN):
        is_wide = index == len(DRAWN) - 1 and index % 2 == 0
        left, y = _GAP + index % 2 * (half + _GAP), top + index // 2 * (_HEIGHT + _GAP)
        drawn += _graph(by_title[title], time, left, y, _WIDTH - 2 * _GAP if is_wide else half)
    foot = top + (len(DRAWN) + 1) // 2 * (_HEIGHT + _GAP)
    caption = f"{time.seconds:.0f} seconds of scripts/test-observability with faults; the top row has the last values"
    drawn.append(f'<text class="small" x="{_GAP + 10}" y="{foot + 8}">{caption}</text>')
    return svg(_WIDTH, foot + 18, drawn)


def _box(title: str, left: float, top: float, width: float, height: float) -> list[str]:
    return [
        f'<rect class="panel" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="4"/>',
        f'<text class="name" x="{left + 10:.1f}" y="{top + 18}">{escape(title)}</text>',
    ]


def _stat(one: Shown, left: float, top: float, width: float) -> list[str]:
    value = one.series[0][0].points[0][1]
    text = escape(_formatted(value, one.panel.unit))
    box = _box(one.panel.title, left, top, width, _STAT_HEIGHT)
    return [*box, f'<text class="number" x="{left + 10:.1f}" y="{top + 48}">{text}</text>']


def _graph(one: Shown, time: _Time, left: float, top: float, width: float) -> list[str]:
    named = [
        (_name(query.legend, series), series.points)
        for query, given in zip(one.panel.queries, one.series, strict=True)
        for series in given
        if any(isfinite(value) for _, value in series.points)
    ]
    lines = _box(one.panel.title, left, top, width, _HEIGHT)
    bottom, end = top + _HEIGHT - 34, left + width - 12
    if one.panel.kind == "state-timeline":
        return [*lines, *_states(one.panel, named, time, left, end, top + 28, top + _HEIGHT - 10)]
    named = sorted(named, key=lambda item: -sum(value for _, value in item[1] if isfinite(value)))[:_MOST_SERIES]
    drawn = _stacked(named, time.all) if one.panel.stacked else [(name, _thinned(points)) for name, points in named]
    lines += _lines(one.panel, drawn, time, (left + _AXIS, end), (bottom, top + 30))
    return [*lines, *_legend([name for name, _ in drawn], left + 10, top + _HEIGHT - 12, width - 20)]


def _lines(
    panel: Panel,
    drawn: Sequence[tuple[str, Sequence[Point]]],
    time: _Time,
    x: tuple[float, float],
    y: tuple[float, float],
) -> Iterator[str]:
    """Yield the axes and lines. `x` and `y`: begin and end of each axis."""
    most = max(value for _, points in drawn for _, value in points if isfinite(value)) or 1.0

    def height(value: float) -> float:
        return y[0] + (y[1] - y[0]) * value / most

    for value in (0.0, most / 2, most):
        at = height(value)
        yield f'<line class="grid" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        label = escape(_formatted(value, panel.unit))
        yield f'<text class="small" x="{x[0] - 6:.1f}" y="{at + 3:.1f}" text-anchor="end">{label}</text>'
    for index, (_, points) in reversed(list(enumerate(drawn))):
        colour = COLOURS[index % len(COLOURS)]
        for piece in _pieces(points):
            places = [f"{time.place(at, *x):.1f},{height(value):.1f}" for at, value in piece]
            if panel.stacked:
                first, last = (f"{time.place(at, *x):.1f},{y[0]:.1f}" for at in (piece[0][0], piece[-1][0]))
                yield f'<polygon points="{" ".join([first, *places, last])}" fill="{colour}"/>'
            else:
                yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _states(
    panel: Panel,
    named: Sequence[tuple[str, Sequence[Point]]],
    time: _Time,
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> Iterator[str]:
    pitch = (bottom - top) / max(1, len(named))
    for index, (name, points) in enumerate(sorted(named)):
        y = top + index * pitch
        yield f'<text class="small" x="{left + 10:.1f}" y="{y + pitch / 2 + 2:.1f}">{escape(name)}</text>'
        for began, ended, value in _spans(points):
            begin, end = (time.place(at, left + _STATE_NAMES, right) for at in (began, ended))
            colour = _STATES[panel.states[int(value)][1]]
            size = f'width="{end - begin:.1f}" height="{pitch - 4:.1f}"'
            yield f'<rect x="{begin:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _name(legend: str, series: Series) -> str:
    for label, value in series.items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    return legend


def _formatted(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
    if unit == "percentunit":
        return f"{value * 100:.1f} %"
    number = f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    return f"{number}/s" if unit in ("reqps", "ops") else number


def _thinned(points: Sequence[Point]) -> list[Point]:
    return list(points[:: max(1, len(points) // _MOST_POINTS)])


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield runs of finite points, cut at long pauses."""
    piece: list[Point] = []
    for point in points:
        if piece and (not isfinite(point[1]) or point[0] - piece[-1][0] > _PAUSE_SECONDS):
            yield piece
            piece = []
        if isfinite(point[1]):
            piece.append(point)
    if piece:
        yield piece


def _stacked(named: Sequence[tuple[str, Sequence[Point]]], times: Sequence[float]) -> list[tuple[str, list[Point]]]:
    """Stack the series. A missing value is 0."""
    some = times[:: max(1, len(times) // _MOST_POINTS)]
    made: list[tuple[str, list[Point]]] = []
    below = dict.fromkeys(some, 0.0)
    for name, points in named:
        values = {at: value for at, value in points if isfinite(value)}
        below = {at: below[at] + values.get(at, 0.0) for at in some}
        made.append((name, [(at, below[at]) for at in some]))
    return made


def _spans(points: Sequence[Point]) -> Iterator[tuple[float, float, float]]:
    """Yield begin, end and value of each span with a constant value."""
    numbers = [point for point in points if isfinite(point[1])]
    began, last = numbers[0]
    for at, value in numbers[1:]:
        if value != last:
            yield began, at, last
            began, last = at, value
    yield began, numbers[-1][0], last


def _legend(names: Sequence[str], left: float, top: float, width: float) -> Iterator[str]:
    each = width / max(1, len(names))
    for index, name in enumerate(names):
        x = left + index * each
        text = escape(name if len(name) * 5.5 < each - 16 else f"{name[:3]}…{name[-5:]}")
        yield f'<rect x="{x:.1f}" y="{top - 8}" width="9" height="9" rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
        yield f'<text class="small" x="{x + 13:.1f}" y="{top}">{text}</text>'
