"""One policy beside today's choice, the best of the peers and the clairvoyant, over many traces, fleets and loads."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import Final

from lab.common.output import aligned
from lab.replay.figures import Figures, Run, by_policy
from lab.replay.policies import CLAIRVOYANT, TODAY, peer_names

SLACK: Final = 0.003
"""Runs that differ by less are equal: as much as seeds make of the same policy."""

_HEADS: Final = (
    *("trace", "fleet", "load", "in time", "today", "best peer", "which", "all-knowing"),
    *("good", "today", "best peer", "hits/all-knowing", "mean/peer", "p99/peer", "p99 ≤32K/peer", "below"),
)


def margins(runs: Sequence[Run], ours: str) -> str:
    """A line for each trace, fleet and load, means over the seeds; what is below is told at its end. The best of the
    peers is another one for each figure, and ratios of times are to the least time of any peer.
    """
    rows: list[Sequence[str]] = [_HEADS]
    below = 0
    cases = dict.fromkeys(run.case for run in runs)
    for case in cases:
        grouped = by_policy([run for run in runs if run.case == case])
        for load in grouped[ours]:
            at = {policy: loads[load] for policy, loads in grouped.items() if load in loads}
            row, lost = _row(at, ours)
            rows.append((case.trace, case.fleet, f"{load:g}", *row))
            below += lost
    told = f"{below} of {len(rows) - 1} lines are below today's or a peer's by more than {100 * SLACK:g} points."
    return f"{aligned(rows)}\n\n{told}"


def _row(at: dict[str, Figures], ours: str) -> tuple[Sequence[str], bool]:
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
