"""Closed loops of agents: each of N sessions sends its next turn after its answer and a pause.

Open loops cannot show thrashing, because their arrivals do not depend on answers. Here more conversations may be open
than the prefix caches hold. All policies and the rules of other gateways run on the product's balancer and queue.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import Any, Final, Literal

from lab.common.output import aligned, line_chart
from lab.common.processes import called_from
from lab.replay import virtual_time
from lab.replay.conversations import Conversation, Conversations, Gaps, Turn, Workload, read_sessions
from lab.replay.figures import average, percentile
from lab.replay.fleet import Course, Fleet, Replay
from lab.replay.policies import AFFINITY, policies
from lab.replay.sweep import fleets, replay_options, write_json
from lab.replay.trace import Request
from proxy.tools.flag_numbers import positive_number, positive_whole_number, whole_number

# The first part of a run fills caches, and is not counted.
_WARM_UP: Final = 1 / 3
# Sessions that are open at the end count if they have been for this share of the run.
_OLD_ENOUGH: Final = 1 / 6
# Sessions start within this time.
_START_SECONDS: Final = 20.0
FITS: Final = 0.95
"""Sessions fit while the hit rate is at least this share of that of one session."""
_MOST_SESSIONS: Final = 100_000
_SKIP_PREFILL: Final[Mapping[str, Literal["auto"] | bool | None]] = {
    "-": None,
    "off": False,
    "on": True,
    "auto": "auto",
}
_SMALL: Final = "beside"
_LARGE: Final = "main"


@dataclass(slots=True)
class Life:
    """One session: its times and the number of its answered turns."""

    key: str
    began: float
    turns: int = 0
    waited: float = 0.0
    """Seconds from each turn to the end of its answer, in total."""
    pending_since: float | None = None
    """Time of the turn that waits for its answer. None: no turn does."""
    ended: float | None = None


class ClosedLoop(Replay):
    """One run of sessions until a time. Sessions that end are replaced by new ones."""

    lives: list[Life]

    async def run_sessions(
        self, conversations: Conversations, numbers: Mapping[str, int], seconds: float, rng: random.Random
    ) -> None:
        """Run a number of sessions of each client key."""
        self.lives = []
        self._conversations = conversations
        tasks = [
            asyncio.create_task(self._one_place(key, rng.uniform(0.0, _START_SECONDS)))
            for key, number in numbers.items()
            for _ in range(number)
        ]
        async with self._sharing_state():
            await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _one_place(self, key: str, start: float) -> None:
        """Run one conversation after the other."""
        await asyncio.sleep(start)
        while True:
            await self._converse(self._conversations.new(), key)

    async def _converse(self, conversation: Conversation, key: str) -> None:
        life = Life(key, self._loop.time())
        self.lives.append(life)
        before: Course | None = None
        for turn in conversation.turns():
            await asyncio.sleep(turn.pause_seconds)
            life.pending_since = sent = self._loop.time()
            # An answer is read once, so another copy of the turn does not read it.
            requests = [self._send(turn, key, before, reads=not copy) for copy in range(turn.copies)]
            before = (await asyncio.gather(*requests))[0]
            life.turns += 1
            life.waited += self._loop.time() - sent
            life.pending_since = None
            if turn.subagents:
                await asyncio.gather(*(self._converse(agent, key) for agent in turn.subagents))
        life.ended = self._loop.time()

    async def _send(self, turn: Turn, key: str, before: Course | None, *, reads: bool) -> Course:
        request = Request(self._loop.time(), turn.input_tokens, turn.output_tokens, turn.blocks)
        course = Course(request, before=before, repeats_answer=turn.repeats_answer, is_later=before is not None)
        if before is not None:
            before.before = None  # otherwise a conversation would be kept as long as its last turn
            if reads and turn.repeats_answer:
                course.reads = before.kept
        return await self._serve_turn(course, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one policy with one number of sessions. Times are in seconds; NaN marks a figure without data."""

    policy: str
    read_back: str
    """`on` if prefillers read the KV cache of answers from decoders, otherwise `off`."""
    skip_prefill: str
    """Whether decoders compute prompts; see `kv.skip_prefill`. `-`: they have no prefix caches."""
    sessions: int
    seed: int
    fleet: str
    fits: int
    """Number of sessions that fit into the caches."""
    turns_per_second: float
    tokens_per_second: float
    """Tokens of prompts and answers of served turns."""
    hit_rate: float
    """Share of prompt tokens that were cached, including those that were read from decoders."""
    read_share: float
    """Share of prompt tokens whose KV cache was read from decoders."""
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    later_ttft_p50: float
    """Median TTFT of all turns but the first one of each session."""
    local_share: float
    """Share of the served turns whose prompts decoders computed."""
    seconds_per_turn_p50: float
    """Time of a session, with its pauses, divided by its turns."""
    seconds_per_turn_p99: float
    slowest_tenth_slowdown: float
    """Seconds of waiting for answers per turn, of the slowest tenth of sessions, relative to the mean."""
    rejected: int
    """Number of turns without an answer."""
    beside_seconds_per_turn: float
    """Mean seconds per turn of the sessions of the second client key."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            name: None if isinstance(value, float) and isnan(value) else value for name, value in asdict(self).items()
        }


def row(run: ClosedLoop, label: Mapping[str, Any], seconds: float) -> Row:
    """Compute the figures of a run after its warm-up.

    `label`: policy, read_back, skip_prefill, sessions, seed, fleet and fits.
    """
    warm = _WARM_UP * seconds
    counted = [course for course in run.courses if course.request.at >= warm]
    served = [course for course in run.courses if course.ended_at is not None and warm <= course.ended_at < seconds]
    first = [_first_token_seconds(course, seconds) for course in counted if not course.is_rejected]
    later = [_first_token_seconds(course, seconds) for course in counted if course.is_later and not course.is_rejected]
    lives = [life for life in run.lives if _counts(life, warm, seconds)]
    paces = [_pace(life, seconds) for life in lives]
    waits = sorted(_wait(life, seconds) for life in lives)
    slowest = waits[-max(1, len(waits) // 10) :]
    prompts = sum(course.request.input_tokens for course in served)
    beside = [_pace(life, seconds) for life in lives if life.key == _SMALL]
    return Row(
        **label,
        turns_per_second=len(served) / (seconds - warm),
        tokens_per_second=(prompts + sum(course.request.output_tokens for course in served)) / (seconds - warm),
        hit_rate=sum(course.cached_tokens for course in served) / prompts if prompts else nan,
        read_share=sum(course.read_tokens for course in served) / prompts if prompts else nan,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        ttft_max=percentile(first, 1.0),
        later_ttft_p50=percentile(later, 0.5),
        local_share=sum(course.is_local for course in served) / len(served) if served else nan,
        seconds_per_turn_p50=percentile(paces, 0.5),
        seconds_per_turn_p99=percentile(paces, 0.99),
        slowest_tenth_slowdown=average(slowest) / mean if (mean := average(waits)) else nan,
        rejected=sum(course.is_rejected for course in counted),
        beside_seconds_per_turn=average(beside),
    )


def _first_token_seconds(course: Course, end: float) -> float:
    """Return the time to the first token. A turn that still waits at the end counts with its wait until then."""
    seconds = course.first_token_seconds
    return end - course.request.at if seconds is None else seconds


def _counts(life: Life, warm: float, end: float) -> bool:
    if life.ended is not None:
        return life.ended >= warm
    return end - life.began >= _OLD_ENOUGH * end


def _pace(life: Life, end: float) -> float:
    return ((end if life.ended is None else life.ended) - life.began) / max(1, life.turns)


def _wait(life: Life, end: float) -> float:
    pending = 0.0 if life.pending_since is None or life.ended is not None else end - life.pending_since
    return (life.waited + pending) / max(1, life.turns)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of closed loops."""
    load = Workload()
    add = parser.add_argument_group("closed loops of sessions").add_argument
    add(
        "--sessions",
        type=_number_of_sessions,
        nargs="+",
        metavar="N",
        help="run this number of concurrent sessions instead of a trace; 2x: twice the number that fits",
    )
    add("--seconds", type=positive_number, default=900.0, help="virtual time of a run (default: %(default)s)")
    add("--recorded", type=Path, metavar="FILE", help="sessions in JSON lines, instead of drawn ones")
    add("--beside", type=whole_number, default=0, metavar="N", help="sessions of a second client key")
    add("--shared-tokens", type=whole_number, default=load.shared_tokens, help="system prompt (default: %(default)s)")
    add(
        "--systems",
        type=positive_whole_number,
        default=load.systems,
        help="number of system prompts (default: %(default)s)",
    )
    add("--first-tokens", type=positive_number, default=load.first_tokens, help="median (default: %(default)s)")
    add(
        "--growth-tokens",
        type=positive_number,
        default=load.growth_tokens,
        help="median per turn (default: %(default)s)",
    )
    add("--answer-tokens", type=positive_number, default=load.answer_tokens, help="median (default: %(default)s)")
    add("--turns", type=positive_number, default=load.turns, help="mean per session (default: %(default)s)")
    add("--short-gaps", type=_share, default=load.gaps.short_share, help="share up to 1 s (default: %(default)s)")
    add("--medium-gaps", type=_share, default=load.gaps.medium_share, help="share of 1 to 10 s (default: %(default)s)")
    add("--longest-gap", type=positive_number, default=load.gaps.longest, help="seconds (default: %(default)s)")
    add("--subagents", type=_share, default=0.0, help="probability per turn of 1 to 4 sub-agents (default: 0)")
    add("--forks", type=_share, default=0.0, help="probability that a turn is sent twice (default: 0)")
    add(
        "--compaction-tokens",
        type=positive_whole_number,
        metavar="N",
        help="replace longer histories by a summary (default: never)",
    )
    add("--single-turns", type=_share, default=0.0, help="share of sessions with one turn (default: 0)")
    add(
        "--reasoning-tokens",
        type=positive_number,
        default=0.0,
        metavar="N",
        help="median of an answer's reasoning (none)",
    )
    add("--drop-reasoning", action="store_true", help="the next prompt has answers without their reasoning")
    add("--read-back", choices=("off", "on"), nargs="+", default=["off"], help="prefillers read answers from decoders")
    add(
        "--skip-prefill",
        choices=("off", "on", "auto"),
        nargs="+",
        default=["-"],
        help="decoders have prefix caches, and compute prompts if that is faster",
    )
    add(
        "--tokenize-us",
        type=positive_number,
        default=1.0,
        help="per token, before an answer is read (default: %(default)s)",
    )
    add("--coarse", action="store_true", help="engines find up to 512 tokens less than was sent")


def _share(text: str) -> float:
    """Parse a share or a probability."""
    try:
        share = float(text)
    except ValueError:
        share = nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError("must be a number from 0 to 1")
    return share


def _number_of_sessions(text: str) -> tuple[float, bool]:
    """Parse a number of sessions. Returns the number, and whether it is a multiple of those that fit."""
    is_multiple = text.endswith(("x", "×"))
    try:
        number = float(text[:-1]) if is_multiple else float(int(text))
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST_SESSIONS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of sessions: write 96, or 2x for twice as many as fit in the KV memory"
        )
    return number, is_multiple


def workload(options: argparse.Namespace) -> Workload:
    """Return the distributions of the command line."""
    return Workload(
        shared_tokens=options.shared_tokens,
        systems=options.systems,
        first_tokens=options.first_tokens,
        growth_tokens=options.growth_tokens,
        answer_tokens=options.answer_tokens,
        reasoning_tokens=options.reasoning_tokens,
        drops_reasoning=options.drop_reasoning,
        turns=options.turns,
        gaps=Gaps(options.short_gaps, options.medium_gaps, options.longest_gap),
        subagents=options.subagents,
        forks=options.forks,
        compaction_tokens=options.compaction_tokens,
        single_turns=options.single_turns,
        keeps_last_block=options.coarse,
    )


class Sweep:
    """Runs every policy with every number of sessions and every seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read recorded sessions, if there are any. Raises InvalidTrace and OSError."""
        self._options = options
        self._workload = workload(options)
        self._recorded = [] if options.recorded is None else read_sessions(called_from() / options.recorded)

    def rows(self) -> list[Row]:
        """Return a row for each run, with lines about the progress on standard error."""
        options = self._options
        rows = []
        for fleet in fleets(options):
            fits = self._fits(fleet)
            print(f"{fleet.name}: {fits} sessions fit into the caches", file=sys.stderr, flush=True)
            names = options.policies or list(policies(fleet, options.decode_policy))
            numbers = [
                max(1, round(number * fits if is_multiple else number)) for number, is_multiple in options.sessions
            ]
            plan = list(product(numbers, names, options.read_back, options.skip_prefill, options.seeds))
            for at, (number, name, read_back, skip, seed) in enumerate(plan, 1):
                label = {"policy": name, "read_back": read_back, "skip_prefill": skip, "sessions": number, "seed": seed}
                label |= {"fleet": fleet.name, "fits": fits}
                rows.append(self._run(fleet, label, f"{at}/{len(plan)} {fleet.name}, {name}, {number} sessions"))
        return rows

    def _fits(self, fleet: Fleet) -> int:
        """Return the largest number of sessions with nearly the hit rate of one, with affinity and no admission."""

        def hit_rate(number: int) -> float:
            label = {"policy": AFFINITY, "read_back": "off", "skip_prefill": "-", "sessions": number, "seed": 1}
            label |= {"fleet": fleet.name, "fits": 0}
            return self._run(fleet, label, f"{fleet.name}, search of sessions that fit, {number}").hit_rate

        least = FITS * hit_rate(1)
        low, high = 1, 2 * fleet.prefillers
        while high < _MOST_SESSIONS and hit_rate(high) >= least:
            low, high = high, 2 * high
        while high - low > max(1, low // 20):
            middle = (low + high) // 2
            low, high = (middle, high) if hit_rate(middle) >= least else (low, middle)
        return low

    def _run(self, fleet: Fleet, label: Mapping[str, Any], name: str) -> Row:
        options, seed = self._options, label["seed"]
        began, made = time.monotonic(), list[ClosedLoop]()
        numbers = {_LARGE: label["sessions"], **({_SMALL: options.beside} if options.beside else {})}

        async def course() -> None:
            run = ClosedLoop(
                fleet,
                *policies(fleet, options.decode_policy)[label["policy"]],
                seed=seed,
                tokenize_seconds=options.tokenize_us / 1e6 if label["read_back"] == "on" else None,
                skip_prefill=_SKIP_PREFILL[label["skip_prefill"]],
                **replay_options(options),
            )
            made.append(run)
            report = asyncio.create_task(_report(name, options.seconds))
            conversations = Conversations(self._workload, self._recorded, seed)
            await run.run_sessions(conversations, numbers, options.seconds, random.Random(seed))
            report.cancel()

        virtual_time.run(course(), virtual_time.VirtualLoop())
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}{name}, seed {seed}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return row(made[0], label, options.seconds)


async def _report(name: str, seconds: float) -> None:
    """Rewrite a progress line during the run on a terminal."""
    loop = asyncio.get_running_loop()
    while sys.stderr.isatty():
        print(f"\r{name}: {loop.time():.0f} of {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(seconds / 100)


_HEADS: Final = (
    *("fleet", "sessions", "policy", "read-back", "skip", "turns/s", "tokens/s", "hits", "read", "local"),
    *("TTFT p50", "p99", "max", "later p50", "s/turn p50", "p99", "slowest tenth", "rejected", "beside"),
)


def means(rows: Sequence[Row]) -> list[Row]:
    """Return the means over the seeds, in the order of the rows. Their seed is 0."""
    grouped: dict[tuple[str, int, str, str, str], list[Row]] = defaultdict(list)
    for each in rows:
        grouped[each.fleet, each.sessions, each.policy, each.read_back, each.skip_prefill].append(each)
    made = []
    for group in grouped.values():
        values = asdict(group[0]) | {"seed": 0, "rejected": sum(each.rejected for each in group)}
        figures = [name for name, value in values.items() if isinstance(value, float)]
        made.append(Row(**values | {name: average(getattr(each, name) for each in group) for name in figures}))
    return made


def table(rows: Sequence[Row]) -> str:
    """Return a line for each fleet, number of sessions and policy, as means over the seeds."""
    return aligned([_HEADS, *map(_cells, means(rows))])


def _cells(each: Row) -> Sequence[str]:
    return (
        *(each.fleet, f"{each.sessions} ({each.sessions / max(1, each.fits):.1f}x)", each.policy, each.read_back),
        *(each.skip_prefill, f"{each.turns_per_second:.2f}", f"{each.tokens_per_second:,.0f}", f"{each.hit_rate:.3f}"),
        *(f"{each.read_share:.3f}", f"{each.local_share:.2f}"),
        *(f"{each.ttft_p50:.2f}", f"{each.ttft_p99:.1f}", f"{each.ttft_max:.0f}", f"{each.later_ttft_p50:.3f}"),
        *(f"{each.seconds_per_turn_p50:.1f}", f"{each.seconds_per_turn_p99:.1f}"),
        *(f"{each.slowest_tenth_slowdown:.1f}×", str(each.rejected)),
        "-" if isnan(each.beside_seconds_per_turn) else f"{each.beside_seconds_per_turn:.1f}",
    )


def chart(rows: Sequence[Row], title: str) -> str:
    """Return an SVG chart of turns per second over the number of sessions, with a line for each policy."""
    lines: dict[str, dict[float, float]] = defaultdict(dict)
    for each in means(rows):
        name = each.policy if each.read_back == "off" else f"{each.policy}, read-back"
        name += f", skip-prefill {each.skip_prefill}" if each.skip_prefill in ("on", "auto") else ""
        lines[name][each.sessions] = each.turns_per_second
    high = max(each.turns_per_second for each in rows) * 1.05 or 1.0
    fits = rows[0].fits
    subtitle = f"turns per second over concurrent sessions; {fits} fit into the caches"
    levels = {high * part / 4: f"{high * part / 4:.1f}" for part in range(5)}
    return line_chart((title, subtitle), lines, levels, fits)


def report(options: argparse.Namespace) -> str:
    """Run everything, write the files that the command line names, and return the table."""
    rows = Sweep(options).rows()
    write_json(options, [each.as_json() for each in rows])
    if options.svg is not None:
        (called_from() / options.svg).write_text(chart(rows, f"{rows[0].fleet}, {options.machine}"))
    return table(rows)
