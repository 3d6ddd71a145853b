"""A trace through one gateway, three that share nothing and three that share, in front of batching engines.

Good answers are counted over sockets, and in virtual time without interference of other programs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.common import peers
from lab.common.output import aligned
from lab.replay.figures import Figures, Slo, figures
from lab.replay.fleet import Fleet, Replay
from lab.replay.policies import OURS, policies
from lab.replay.sockets import Contender, over_sockets
from lab.replay.sweep import SHARED, arrivals, replayed
from lab.replay.trace import Request, bursty, read
from proxy.sim.hardware.machines import MACHINES

_GATEWAYS: Final = 3
_LOAD: Final = 0.8
_BURST: Final = 50
_SPEED: Final = 4.0
_PREFILLERS: Final = 8
_HEADS: Final = ("requests", "gateways", "where", "good", "first token, mean", "p99", "cached", "busiest", "shared")


@dataclass(frozen=True, slots=True)
class _Way:
    """A deployment of gateways."""

    name: str
    copies: int
    shares: str


_WAYS: Final = (
    _Way("1", 1, "nothing"),
    _Way(f"{_GATEWAYS}, not sharing", _GATEWAYS, "nothing"),
    _Way(f"{_GATEWAYS}, sharing", _GATEWAYS, "news"),
)


def compare(trace: Path, requests: int, seed: int) -> list[str]:
    """Print a table. Return the problems: failed requests, or sharing that is worse than not sharing."""
    machine, decode = MACHINES["kimi-k2-thinking-a3"], MACHINES["kimi-k2.5-h200"]
    fleet = Fleet(_PREFILLERS, _PREFILLERS, machine, decode, speed=_SPEED)
    evenly = arrivals(fleet, read(trace)[:requests], _LOAD, seed)
    rows: list[Sequence[str]] = [_HEADS]
    wrong: list[str] = []
    shares: list[str] = []
    for how, timed in (("evenly", evenly), (f"in bursts of {_BURST}", bursty(evenly, _BURST))):
        good: list[float] = []
        for way in _WAYS:
            real, shared_bytes = _over_sockets(fleet, way, timed)
            virtual = _virtually(fleet, way, timed, seed)
            rows += [
                (how, way.name, "sockets", *_columns(real), f"{shared_bytes:.0f} B"),
                ("", "", "virtual time", *_columns(virtual), ""),
            ]
            good.append(virtual.good)
            if real.served < 1:
                wrong.append(f"{1 - real.served:.1%} of the requests failed: {how}, {way.name}")
            print(f"{how}, {way.name}: done", file=sys.stderr, flush=True)
        if good[2] < good[1]:
            wrong.append(f"{how}: sharing is worse than not sharing, in virtual time")
        shares.append(f"{good[2] / good[0]:.1%} {how}")
    print(f"\n{aligned(rows)}\n\nBusiest: busy time of the busiest prefiller over the mean. Shared: bytes per request.")
    print(f"Good answers of {_GATEWAYS} sharing gateways relative to one, in virtual time: {', '.join(shares)}.")
    return wrong


def _over_sockets(fleet: Fleet, way: _Way, requests: Sequence[Request]) -> tuple[Figures, float]:
    """Return figures, and the bytes that gateways sent each other per request."""
    program = Contender(peers.OURS, peers.ours(), OURS, way.copies, way.shares)
    replay = over_sockets(fleet, program, requests, lambda: None)
    return figures(replay, fleet, Slo()), replay.news_bytes / len(requests)


def _virtually(fleet: Fleet, way: _Way, requests: Sequence[Request], seed: int) -> Figures:
    def make() -> Replay:
        both = policies(fleet, OURS)[OURS]
        return Replay(fleet, *both, seed=seed, gateways=way.copies, replicas=SHARED[way.shares])

    return figures(replayed(make, requests), fleet, Slo())


def _columns(each: Figures) -> Sequence[str]:
    return (
        *(f"{100 * each.good:.1f} %", f"{each.mean:.2f} s", f"{each.p99:.1f} s"),
        *(f"{100 * each.hits:.1f} %", f"{each.imbalance:.2f}×"),
    )
