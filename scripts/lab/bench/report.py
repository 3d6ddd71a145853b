"""Every figure of every program in one table, and the ratios."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from lab.bench.figures import FIGURES
from lab.bench.scenarios import FIRST_TOKEN_SECONDS
from lab.common.peers import OURS, REFERENCE, RUST_ROUTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.figures import Measurements
    from lab.bench.scenarios import Scenario

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
