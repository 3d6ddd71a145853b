"""Predicts what another split of the instances between prefill and decode would carry, and decides on moves. No IO.

`pdproxy advise`, the controller of elastic instances, and scripts/replay use the same prediction.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.settings.fleet import Elastic

LEAST_GAIN: Final = 0.05
"""Minimum gain of a move that `advised` recommends, as a share of the present load."""
# Requests are late before a role is full, because prompts and answers have different lengths.
_FULL: Final = 0.9
# The share of KV memory that answers fill before a decoder is full.
_FULL_KV: Final = 0.95


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of instances by role, and their utilisation: 1.0 is full, and more means that demand exceeds capacity."""

    prefillers: int
    decoders: int
    prefill_busy: float
    decode_busy: float

    @property
    def name(self) -> str:
        return f"{self.prefillers}P{self.decoders}D"

    @property
    def carries(self) -> float:
        """Return the load that fills the busier side, as a multiple of the present load; infinite without load."""
        busiest = max(self.prefill_busy, self.decode_busy)
        return 1 / busiest if busiest else float("inf")

    @property
    def served(self) -> float:
        """Return the predicted share of the demand that is served in time."""
        return min(1.0, _FULL * self.carries)

    def desired(self) -> dict[Role, int]:
        """Return how many instances of each role the demand needs, at least one."""
        busy = {Role.PREFILL: self.prefill_busy * self.prefillers, Role.DECODE: self.decode_busy * self.decoders}
        return {role: max(1, math.ceil(instances / _FULL)) for role, instances in busy.items()}

    def __str__(self) -> str:
        return f"{self.name}, prefillers {self.prefill_busy:.0%} busy, decoders {self.decode_busy:.0%} busy"

    @property
    def bottleneck(self) -> str:
        """Return the busier role."""
        return "prefill" if self.prefill_busy >= self.decode_busy else "decode"

    def moved(self, prefillers: int) -> Split | None:
        """Return the split with more prefillers from the decoders, or fewer; None if a role would be empty."""
        left = self.prefillers + prefillers, self.decoders - prefillers
        if min(left) < 1:
            return None
        return Split(*left, self.prefill_busy * self.prefillers / left[0], self.decode_busy * self.decoders / left[1])

    def alternatives(self) -> list[Split]:
        """Return this split and those that differ by one instance."""
        return [self, *(each for each in (self.moved(1), self.moved(-1)) if each is not None)]


def advised(now: Split) -> Split:
    """Return the recommended split, which differs only if it carries at least LEAST_GAIN more."""
    best = max(now.alternatives(), key=lambda split: split.carries)
    return best if best.carries >= (1 + LEAST_GAIN) * now.carries else now


# The present split, from samples of the loads that all workers share.


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The loads at one time."""

    at: float
    """Time in seconds of a monotonic clock."""
    prefillers: int
    """Number of available prefillers."""
    decoders: int
    """Number of available decoders."""
    computing: int
    """Number of prefillers that compute a prompt."""
    streams: int
    """Number of running answers."""
    full: float
    """Number of running answers of one full decoder. Infinite: not known."""
    waiting: int
    """Number of requests in the queues of all workers and of the prefillers."""
    handoffs: int
    """Number of answers that have begun since the gateway started."""


def sample_of(pools: Pools, scoreboard: Scoreboard, waiting: int, now: float, *, token_seconds: float) -> FleetSample:
    """Return the present loads. `token_seconds`: a decoder is full at this time for a token at the latest."""
    prefillers, decoders = pools.prefill.eligible(), pools.decode.eligible()
    full = [_full_streams(pools, scoreboard, decoder, token_seconds) for decoder in decoders]
    # A request holds memory of its decoder from the prefill on. Those in the queue of a prefiller only wait.
    prefilling = sum(scoreboard.running(each.slot) for each in pools.prefill.backends())
    held = sum(scoreboard.running(each.slot) for each in pools.decode.backends())
    computing = sum(scoreboard.load(each.slot).compute > 0 for each in pools.prefill.backends())
    behind = max(0, prefilling - computing)
    return FleetSample(
        at=now,
        prefillers=len(prefillers),
        decoders=len(decoders),
        computing=computing,
        streams=max(0, held - behind),
        full=sum(full) / len(full) if full else math.inf,
        waiting=waiting + behind,
        handoffs=sum(scoreboard.handoffs(each.slot).count for each in decoders),
    )


def _full_streams(pools: Pools, scoreboard: Scoreboard, decoder: Backend, token_seconds: float) -> float:
    """Return the number of running answers at which a decoder is full, by its limit, its pace and its KV memory."""
    pool = pools.decode
    limits = [pool.limit(decoder), pool.policy.most_running(decoder), pool.policy.answers_within(token_seconds)]
    facts, running = pool.health.of(decoder).facts, scoreboard.running(decoder.slot)
    if facts is not None and facts.kv_tokens and running:
        limits.append(_FULL_KV * facts.kv_tokens * running / max(1, scoreboard.load(decoder.slot).kv))
    return max(1.0, min((float(each) for each in limits if each is not None), default=math.inf))


def split_of(samples: Sequence[FleetSample], horizon_seconds: float) -> Split | None:
    """Return the present split, or None if too little is known. The samples have the same numbers of instances.

    Queued requests count as demand of both roles: those that have come in the time of the samples, and a part of the
    others, so that the queue is empty after `horizon_seconds`.
    """
    first, last = samples[0], samples[-1]
    seconds, started = last.at - first.at, last.handoffs - first.handoffs
    is_idle = started <= 0 and not last.waiting and not last.streams
    if seconds <= 0 or is_idle or not last.prefillers or not last.decoders:
        return None
    full = [sample.full for sample in samples]
    if math.isinf(max(full)):
        return None
    unserved = max(0, last.waiting - first.waiting) + last.waiting * seconds / horizon_seconds
    factor = (1 + unserved / max(1, started)) / len(samples)
    prefill = sum(sample.computing for sample in samples) * factor
    decode = sum(sample.streams / sample.full for sample in samples) * factor
    return Split(last.prefillers, last.decoders, prefill / last.prefillers, decode / last.decoders)


# Decisions of the controller.


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """A move that pays."""

    to: Role
    """New role of one instance of the other role."""
    now: Split
    then: Split
    """The predicted split."""
    cost: float
    """Share of the demand that the move itself costs within the horizon."""

    @property
    def gain(self) -> float:
        """Return the predicted gain, as a share of the demand."""
        return self.then.served - self.now.served

    def __str__(self) -> str:
        return (
            f"{self.now.name} to {self.then.name}: prefillers {self.now.prefill_busy:.0%} to "
            f"{self.then.prefill_busy:.0%} busy, decoders {self.now.decode_busy:.0%} to {self.then.decode_busy:.0%}, "
            f"served in time {self.now.served:.0%} to {self.then.served:.0%}, cost {self.cost:.1%}"
        )


class MovePlanner:
    """Decides which moves pay. Its owner reports a sample every second, and each move.

    A move must gain more than its cost and a margin within the horizon, for another window, or for a quarter of it if
    many requests are late. The next one is decided from samples after the last one, and after half of the window if it
    has the same direction. If the gain of two moves in a row does not come true, there is none in this direction for
    the horizon, and for twice the time after each further one.
    """

    def __init__(self, options: Callable[[], Elastic]) -> None:
        """Know nothing yet. `options`: returns the present settings."""
        self._options = options
        self._samples: deque[FleetSample] = deque()
        self._since = math.inf
        """Time since which the same move pays; infinite if none does."""
        self._direction: Role | None = None
        self._pending: MoveAdvice | None = None
        """The last move, until it is known whether its gain came true."""
        self._failures = {Role.PREFILL: 0, Role.DECODE: 0}
        """Moves to each role in a row whose gain did not come true."""
        self._blocked_until = {Role.PREFILL: -math.inf, Role.DECODE: -math.inf}
        self._last_move: Role | None = None
        """The role of the last move, until the next decision. Another move to this role needs a part of the window."""
        self._rate = 0.0
        """Answers that began per second before the last move."""
        self._streams = 0.0
        """Running answers before the last move."""
        self.split: Split | None = None
        """The present split; None: too little is known."""
        self.outcome: bool | None = None
        """Whether the gain of the last move came true; None: not known yet, or there was none."""

    def note(self, sample: FleetSample) -> MoveAdvice | None:
        """Take a sample, and return the move that pays now, or None."""
        samples, options = self._samples, self._options()
        last = samples[-1] if samples else None
        if last is not None and (last.prefillers, last.decoders) != (sample.prefillers, sample.decoders):
            self.forget()
        samples.append(sample)
        while len(samples) > 1 and sample.at - samples[1].at >= options.window_seconds:
            samples.popleft()
        share = _NEXT_SHARE if self._last_move is not None else 1.0
        if sample.at - samples[0].at < share * options.window_seconds:
            return None
        self.split = split = split_of(samples, options.horizon_seconds)
        if split is None:
            return None
        self._judge(split, sample.at)
        advice = self._best(split)
        last_move, self._last_move = self._last_move, None
        if advice is None or self._blocked_until[advice.to] > sample.at:
            self._direction, self._since = None, math.inf
            return None
        if last_move is advice.to:
            return advice
        if advice.to is not self._direction:
            self._direction, self._since = advice.to, sample.at
        hold = _URGENT_HOLD if split.served < _URGENT else _HOLD
        return advice if sample.at - self._since >= hold * options.window_seconds else None

    def note_move(self, advice: MoveAdvice) -> None:
        """Note that a move has begun."""
        self._pending, self._last_move, self.outcome = advice, advice.to, None
        self._rate, self._streams = _started_per_second(self._samples), _mean_streams(self._samples)
        self._blocked_until[_other(advice.to)] = max(
            self._blocked_until[_other(advice.to)], self._samples[-1].at + self._options().horizon_seconds / 3
        )
        self.forget()

    def forget(self) -> None:
        """Forget the samples, because the numbers of instances change."""
        self._samples.clear()
        self.split = None
        self._direction, self._since = None, math.inf

    def _judge(self, split: Split, now: float) -> None:
        """Find out whether the gain of the last move came true: more is served, or faster.

        The demand may have changed in the meantime, so one failure does not count.
        """
        advice, self._pending = self._pending, None
        if advice is None:
            return
        rate, streams, options = self._rate, self._streams, self._options()
        self._rate, self._streams = _started_per_second(self._samples), _mean_streams(self._samples)
        is_relieved = split.served >= advice.now.served + advice.gain / 2
        is_faster = self._rate >= rate * (1 + _LEAST_SPEED_UP / max(split.prefillers, split.decoders))
        # Long answers end long after the move.
        fills = advice.to is Role.DECODE and self._streams >= streams + _LEAST_SPEED_UP * self._samples[-1].full
        self.outcome = is_relieved or is_faster or fills
        failures = self._failures[advice.to] = 0 if self.outcome else self._failures[advice.to] + 1
        if failures >= _MAX_FAILURES:
            seconds = options.horizon_seconds * 2 ** min(_MAX_DOUBLINGS, failures - _MAX_FAILURES)
            self._blocked_until[advice.to] = now + seconds

    def _best(self, split: Split) -> MoveAdvice | None:
        """Return the neighbouring split with the greatest gain, if it pays."""
        options = self._options()
        moves = [
            MoveAdvice(to, split, then, self._cost(split))
            for to, then in ((Role.PREFILL, split.moved(1)), (Role.DECODE, split.moved(-1)))
            if then is not None and then.prefillers >= options.min_prefill and then.decoders >= options.min_decode
        ]
        best = max(moves, key=lambda each: each.gain, default=None)
        return best if best is not None and best.gain > options.margin + best.cost else None

    def _cost(self, split: Split) -> float:
        """Return what a move costs: an instance serves nothing meanwhile, and its answers are computed again."""
        options, samples = self._options(), self._samples
        instances = split.prefillers + split.decoders
        evacuate_after = options.evacuate_after_seconds
        away_seconds = _JOIN_SECONDS + (options.drain_seconds if evacuate_after is None else evacuate_after)
        lost = away_seconds / instances / options.horizon_seconds
        started = max(1, samples[-1].handoffs - samples[0].handoffs)
        busy_seconds = sum((after.at - before.at) * before.computing for before, after in pairwise(samples))
        again_seconds = samples[-1].streams / split.decoders * busy_seconds / started
        return lost + again_seconds / split.prefillers / options.horizon_seconds


# Time for which a move must pay before it begins, as a share of the window. Loads that fit vary by chance.
_HOLD: Final = 1.0
_URGENT_HOLD: Final = 0.25
# The share of the demand that is served in time below which a move is urgent.
_URGENT: Final = 0.85
# The part of the window after which another move in the same direction may follow.
_NEXT_SHARE: Final = 0.5
# Time from the end of the requests of an instance to its full share in the new role.
_JOIN_SECONDS: Final = 20.0
_MAX_DOUBLINGS: Final = 5
_MAX_FAILURES: Final = 2
# The part of one instance by which the throughput must grow.
_LEAST_SPEED_UP: Final = 0.25


def _started_per_second(samples: Sequence[FleetSample]) -> float:
    """Return how many answers began per second."""
    return (samples[-1].handoffs - samples[0].handoffs) / max(1e-9, samples[-1].at - samples[0].at)


def _mean_streams(samples: Sequence[FleetSample]) -> float:
    return sum(sample.streams for sample in samples) / len(samples)


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
