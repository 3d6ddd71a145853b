"""Figures of runs: served shares, times to the first token, paces and prediction errors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import isnan, nan
from typing import Any, Final, Protocol

from lab.common.output import aligned, line_chart
from lab.replay.engines import Engine
from lab.replay.fleet import Course, Fleet
from lab.replay.policies import CLAIRVOYANT, TODAY, peer_names
from proxy.common.backend import Backend
from proxy.sim.hardware.machines import Figure

# The first tenth of a run fills queues and caches, and is not counted.
_WARM_UP: Final = 0.1
# Number of requests before predictions are judged.
_LEARNED: Final = 200
_SHORT_TOKENS: Final = 32 * 1024
SUSTAINED: Final = 0.95
"""Share of answers in time at which a load counts as sustained."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives for a good answer. A rejected request is not good."""

    first_token_seconds: float = 10.0
    base_seconds: float = 2.0
    """A first token is in time within `base_seconds` plus `factor` times the prompt's uncached prefill time."""
    factor: float = 3.0
    token_seconds: float = 0.1
    """Maximum mean time between tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, or means of several.

    Times are in seconds, shares from 0 to 1, and NaN marks a figure without data.
    """

    requests: float
    served: float
    """Share of requests that were not rejected."""
    in_time: float
    """Share of first tokens in time; see Slo."""
    within: float
    """Share of first tokens within `Slo.first_token_seconds`."""
    good: float
    """Share of answers in time with `Slo.token_seconds` per token or less."""
    hits: float
    """Share of prompt tokens that were cached."""
    mean: float
    """Mean time to the first token. The next five figures are of that time, too."""
    p50: float
    p90: float
    p99: float
    p99_short: float
    """99th percentile for prompts up to 32K tokens."""
    p99_slowdown: float
    """99th percentile as a multiple of the prompt's uncached prefill time."""
    token_p99: float
    end_mean: float
    """Mean time to the last token."""
    imbalance: float
    """Busy time of the busiest prefiller over the mean."""
    off_p50: float
    """Relative error of predicted prefill seconds, from the 200th request on."""
    off_p95: float
    recomputed: float
    """Tokens that preempted sequences computed again, relative to all decoded tokens."""


class Ended(Protocol):
    """A run that has ended, in virtual time or over sockets."""

    courses: list[Course]
    engines: dict[Backend, Engine]


def figures(replay: Ended, fleet: Fleet, slo: Slo) -> Figures:
    """Compute the figures of one run. Times are converted to speed 1."""
    courses = replay.courses[int(_WARM_UP * len(replay.courses)) :]
    speed = fleet.speed
    waits = [(course, speed * wait) for course in courses if (wait := course.first_token_seconds) is not None]
    work = {id(course): fleet.work_seconds(course.request) for course in courses}
    in_time = {id(course) for course, wait in waits if wait <= slo.base_seconds + slo.factor * work[id(course)]}
    paces = {id(course): speed * pace for course in courses if (pace := course.token_seconds) is not None}
    seconds = [wait for _, wait in waits]
    busy: list[float] = []
    recomputed = 0
    for backend, engine in replay.engines.items():
        if backend.role.value == "prefill":
            busy.append(engine.batch.busy_seconds)
        else:
            recomputed += engine.batch.recomputed_tokens
    off = [error for course in replay.courses[_LEARNED:] if (error := _prediction_error(course)) is not None]
    made = sum(course.request.output_tokens for course in replay.courses if course.ended_at is not None)
    return Figures(
        requests=len(courses),
        served=len(waits) / len(courses),
        in_time=len(in_time) / len(courses),
        within=sum(wait <= slo.first_token_seconds for wait in seconds) / len(courses),
        good=sum(paces.get(each, 0.0) <= slo.token_seconds for each in in_time) / len(courses),
        hits=sum(course.cached_tokens for course in courses) / sum(course.request.input_tokens for course in courses),
        mean=average(seconds),
        p50=percentile(seconds, 0.5),
        p90=percentile(seconds, 0.9),
        p99=percentile(seconds, 0.99),
        p99_short=percentile([wait for course, wait in waits if course.request.input_tokens <= _SHORT_TOKENS], 0.99),
        p99_slowdown=percentile([wait / work[id(course)] for course, wait in waits], 0.99),
        token_p99=percentile(list(paces.values()), 0.99),
        end_mean=average([speed * (course.ended_at - course.request.at) for course in courses if course.ended_at]),
        imbalance=max(busy) * len(busy) / sum(busy) if any(busy) else nan,
        off_p50=percentile(off, 0.5),
        off_p95=percentile(off, 0.95),
        recomputed=recomputed / made if made else nan,
    )


def _prediction_error(course: Course) -> float | None:
    if course.predicted_seconds is None or not course.prefill_seconds:
        return None
    return abs(course.predicted_seconds / course.prefill_seconds - 1)


def average(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN without any."""
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else nan


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values is below, or NaN without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else nan


def mean(runs: Sequence[Figures]) -> Figures:
    """Return the mean of each figure over the runs that have it."""
    return Figures(**{each.name: average(getattr(run, each.name) for run in runs) for each in fields(Figures)})


@dataclass(frozen=True, slots=True)
class Case:
    """A trace and a fleet."""

    trace: str
    fleet: str

    def __str__(self) -> str:
        return f"{self.trace}, {self.fleet}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its policy, load, seed and figures."""

    case: Case
    policy: str
    load: float
    seed: int
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """Return the run as JSON."""
        values = {name: None if isnan(value) else value for name, value in asdict(self.figures).items()}
        return {**asdict(self.case), "policy": self.policy, "load": self.load, "seed": self.seed, **values}


def by_policy(runs: Sequence[Run]) -> dict[str, dict[float, Figures]]:
    """Return means over the seeds by policy and load, in the order of the runs."""
    grouped: dict[str, dict[float, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[run.policy][run.load].append(run.figures)
    return {policy: {load: mean(each) for load, each in loads.items()} for policy, loads in grouped.items()}


def sustained_load(loads: dict[float, Figures]) -> float | None:
    """Return the largest load with 95 % of answers in time, interpolated between the loads that were run.

    None if the lowest load is too high. A fleet may sustain more than the highest load that was run.
    """
    points = sorted((load, each.in_time) for load, each in loads.items())
    if points[0][1] < SUSTAINED:
        return None
    for (low, before), (high, after) in itertools.pairwise(points):
        if after < SUSTAINED:
            return low + (high - low) * (before - SUSTAINED) / (before - after)
    return points[-1][0]


_HEADS: Final = (
    *("policy", "load", "in time", "≤ 10 s", "good", "hits", "mean", "p50", "p99", "p99 ≤32K", "p99 slow"),
    *("token p99", "end", "off p50 / p95", "busiest", "again", "refused"),
)


def table(runs: Sequence[Run]) -> str:
    """Return a line for each policy and load, and the load that each policy sustains."""
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
        _number(each.end_mean, "{:.1f} s"),
        _number(100 * each.off_p50, "{:.0f} %") + " / " + _number(100 * each.off_p95, "{:.0f} %"),
        *(_number(each.imbalance, "{:.2f}×"), _number(100 * each.recomputed, "{:.2f} %")),
        f"{100 * (1 - each.served):.1f} %",
    )


def _number(value: float, form: str) -> str:
    return "-" if isnan(value) else form.format(value)


def fits(figures: Sequence[Figure]) -> str:
    """Return published figures of machines beside those of the fitted model."""
    rows: list[Sequence[str]] = [("machine", "what", "published", "fitted", "off by", "source")]
    for each in figures:
        most = "at most " if each.is_bound else ""
        numbers = (f"{most}{each.published:.6g}", f"{each.fitted:.4g}", f"{100 * each.error:+.1f} %")
        rows.append((each.machine, each.what, *numbers, each.source))
    return aligned(rows)


def chart(runs: Sequence[Run], title: str) -> str:
    """Return an SVG chart of answers in time over load, with a line for each policy."""
    return line_chart(
        (title, "answers in time, over the work of the prompts without a cache / capacity"),
        {policy: {load: each.in_time for load, each in loads.items()} for policy, loads in by_policy(runs).items()},
        {share: f"{share:.0%}" for share in (0.0, 0.25, 0.5, 0.75, SUSTAINED, 1.0)},
    )


SLACK: Final = 0.003
"""Runs that differ by less are equal. Seeds of one policy differ by as much."""

_MARGIN_HEADS: Final = (
    *("trace", "fleet", "load", "in time", "today", "best peer", "which", "all-knowing"),
    *("good", "today", "best peer", "hits/all-knowing", "mean/peer", "p99/peer", "p99 ≤32K/peer", "below"),
)


def margins(runs: Sequence[Run], ours: str) -> str:
    """Return a line for each trace, fleet and load, as means over the seeds.

    The best peer may differ between figures. Ratios of times are to the least time of any peer. The last column lists
    the figures that are below another policy's.
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
    summary = f"{below} of {len(rows) - 1} lines are below today's or a peer's by more than {100 * SLACK:g} points."
    return f"{aligned(rows)}\n\n{summary}"


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
