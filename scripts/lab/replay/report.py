"""The report of all runs: tables for people, one policy beside others, and a chart of goodput over load."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isnan, nan
from typing import Final

from lab.common.output import COLOURS, aligned, svg
from lab.replay.figures import SUSTAINED, Figures, Run, by_policy, sustained_load
from lab.replay.policies import CLAIRVOYANT, TODAY, peer_names
from proxy.sim.hardware.machines import Figure

_HEADS: Final = (
    *("policy", "load", "in time", "≤ 10 s", "good", "hits", "mean", "p50", "p99", "p99 ≤32K", "p99 slow"),
    *("token p99", "off p50 / p95", "busiest", "again", "refused"),
)


def table(runs: Sequence[Run]) -> str:
    """A line for each policy and load, and one for each policy that says which load it sustains."""
    rows: list[Sequence[str]] = [_HEADS]
    grouped = by_policy(runs)
    for policy, loads in grouped.items():
        rows += [_row(policy, load, each) for load, each in loads.items()]
    text = aligned(rows)
    if any(len(loads) > 1 for loads in grouped.values()):
        text += f"\n\nlargest load with {SUSTAINED:.0%} in time\n" + aligned(
            [(policy, _sustained(loads)) for policy, loads in grouped.items()]
        )
    return text


def _sustained(loads: dict[float, Figures]) -> str:
    load = sustained_load(loads)
    if load is None:
        return f"below {min(loads):g}"
    return f"at least {load:g}" if load == max(loads) else f"{load:.2f}"


def _row(policy: str, load: float, each: Figures) -> Sequence[str]:
    shares = (each.in_time, each.within, each.good, each.hits)
    seconds = (each.mean, each.p50, each.p99, each.p99_short)
    return (
        *(policy, f"{load:g}", *(f"{100 * share:.1f} %" for share in shares)),
        *(_number(value, "{:.2f} s") for value in seconds),
        *(_number(each.p99_slowdown, "{:.1f}×"), _number(1000 * each.token_p99, "{:.0f} ms")),
        _number(100 * each.off_p50, "{:.0f} %") + " / " + _number(100 * each.off_p95, "{:.0f} %"),
        *(_number(each.imbalance, "{:.2f}×"), _number(100 * each.recomputed, "{:.2f} %")),
        f"{100 * (1 - each.served):.1f} %",
    )


def _number(value: float, form: str) -> str:
    return "-" if isnan(value) else form.format(value)


def fits(figures: Sequence[Figure]) -> str:
    """What was published of machines, and what their fits make of it."""
    rows: list[Sequence[str]] = [("machine", "what", "published", "fitted", "off by", "source")]
    for each in figures:
        most = "at most " if each.is_bound else ""
        numbers = (f"{most}{each.published:.6g}", f"{each.fitted:.4g}", f"{100 * each.error:+.1f} %")
        rows.append((each.machine, each.what, *numbers, each.source))
    return aligned(rows)


_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 60, 50, 520, 300, 220


def chart(runs: Sequence[Run], title: str) -> str:
    """Answers in time over load, a line for each policy. An SVG document."""
    grouped = by_policy(runs)
    loads = sorted({run.load for run in runs})
    low, high = loads[0], loads[-1] if loads[-1] > loads[0] else loads[0] + 1.0

    def x(load: float) -> float:
        return _LEFT + _WIDTH * (load - low) / (high - low)

    def y(share: float) -> float:
        return _TOP + _HEIGHT * (1 - share)

    drawn = [
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="41">answers in time, over the work of the prompts without a cache / capacity</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, SUSTAINED, 1.0):
        drawn.append(f'<path class="grid" d="M{_LEFT} {y(share):.1f}h{_WIDTH}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    below = _TOP + _HEIGHT + 18
    drawn += [f'<text x="{x(load):.1f}" y="{below}" text-anchor="middle">{load:g}</text>' for load in loads]
    for index, (policy, figures) in enumerate(grouped.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{x(load):.1f},{y(each.in_time):.1f}" for load, each in sorted(figures.items()))
        drawn.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
        below = _TOP + 12 + 20 * index
        drawn.append(f'<path class="line" stroke="{colour}" d="M{_LEFT + _WIDTH + 16} {below - 4}h18"/>')
        drawn.append(f'<text x="{_LEFT + _WIDTH + 40}" y="{below}">{escape(policy)}</text>')
    width, height = _LEFT + _WIDTH + _LEGEND, max(_TOP + _HEIGHT + 36, _TOP + 20 * len(grouped) + 16)
    return svg(width, height, drawn)


SLACK: Final = 0.003
"""Runs that differ by less are equal: as much as seeds make of the same policy."""

_MARGIN_HEADS: Final = (
    *("trace", "fleet", "load", "in time", "today", "best peer", "which", "all-knowing"),
    *("good", "today", "best peer", "hits/all-knowing", "mean/peer", "p99/peer", "p99 ≤32K/peer", "below"),
)


def margins(runs: Sequence[Run], ours: str) -> str:
    """A line for each trace, fleet and load, means over the seeds; what is below is told at its end. The best of the
    peers is another one for each figure, and ratios of times are to the least time of any peer.
    """
    rows: list[Sequence[str]] = [_MARGIN_HEADS]
    below = 0
    cases = dict.fromkeys(run.case for run in runs)
    for case in cases:
        grouped = by_policy([run for run in runs if run.case == case])
        for load in grouped[ours]:
            at = {policy: loads[load] for policy, loads in grouped.items() if load in loads}
            row, lost = _margin_row(at, ours)
            rows.append((case.trace, case.fleet, f"{load:g}", *row))
            below += lost
    told = f"{below} of {len(rows) - 1} lines are below today's or a peer's by more than {100 * SLACK:g} points."
    return f"{aligned(rows)}\n\n{told}"


def _margin_row(at: dict[str, Figures], ours: str) -> tuple[Sequence[str], bool]:
    mine = at[ours]
    peers = {name: at[name] for name in peer_names() if name in at}
    today, knowing = at.get(TODAY), at.get(CLAIRVOYANT)
    others = [*peers.values(), *([] if today is None else [today])]
    best = max(peers, key=lambda name: peers[name].in_time, default="-")
    lost = [
        what
        for what in ("in_time", "good")
        if any(getattr(mine, what) < getattr(other, what) - SLACK for other in others)
    ]
    ratios = [_ratio(getattr(mine, what), [getattr(peer, what) for peer in peers.values()]) for what in _TIMES]
    return (
        *_shares("in_time", mine, today, peers),
        *(best, _percent(nan if knowing is None else knowing.in_time)),
        *_shares("good", mine, today, peers),
        f"{mine.hits / knowing.hits:.2f}" if knowing is not None and knowing.hits else "-",
        *ratios,
        " ".join(lost).replace("_", " ") or "-",
    ), bool(lost)


_TIMES: Final = ("mean", "p99", "p99_short")


def _ratio(mine: float, theirs: Sequence[float]) -> str:
    known = [value for value in theirs if not isnan(value)]
    return "-" if isnan(mine) or not known else f"{mine / min(known):.2f}"


def _shares(what: str, mine: Figures, today: Figures | None, peers: dict[str, Figures]) -> Sequence[str]:
    theirs = max((getattr(peer, what) for peer in peers.values()), default=nan)
    return [_percent(share) for share in (getattr(mine, what), getattr(today, what, nan), theirs)]


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{100 * share:.1f}"
