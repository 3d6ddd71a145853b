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
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pool import Pools
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.settings.fleet import Elastic

LEAST_GAIN: Final = 0.05
"""Minimum gain of a move that `advised` recommends, as a share of the present load."""
# Requests are late before a role is full, because prompts and answers have different lengths. This share of one
# instance stays free, and more of several instances by the square root of their number, as in queueing theory: 60 % of
# one instance can be busy, and 90 % of 16.
_FREE: Final = 0.4
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
        late = max(self.prefill_busy / _usable(self.prefillers), self.decode_busy / _usable(self.decoders))
        return 1.0 if late <= 1 else 1 / late

    def desired(self) -> dict[Role, int]:
        """Return how many instances of each role the demand needs, at least one."""
        busy = {Role.PREFILL: self.prefill_busy * self.prefillers, Role.DECODE: self.decode_busy * self.decoders}
        # The smallest n with n * _usable(n) >= instances.
        roots = {role: (_FREE + math.sqrt(_FREE**2 + 4 * instances)) / 2 for role, instances in busy.items()}
        return {role: max(1, math.ceil(root**2 - 1e-9)) for role, root in roots.items()}

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


def _usable(instances: int) -> float:
    """Return the share of some instances of a role that can be busy while requests are in time."""
    return 1 - _FREE / math.sqrt(instances)


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
    computing = sum(scoreboard.load(each.slot).compute_tokens > 0 for each in pools.prefill.backends())
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
        limits.append(_FULL_KV * facts.kv_tokens * running / max(1, scoreboard.load(decoder.slot).kv_tokens))
    return max(1.0, min((float(each) for each in limits if each is not None), default=math.inf))


# A queue that empties shows that there is less demand than load, but not that there is none.
_LEAST_FACTOR: Final = 0.1


def split_of(samples: Sequence[FleetSample], horizon_seconds: float) -> Split | None:
    """Return the present split, or None if too little is known. The samples have the same numbers of instances.

    Queued requests count as demand of both roles: the growth of the queue, which is negative if requests of an earlier
    demand are served, and a part of the queue, so that it is empty after `horizon_seconds`.
    """
    first, last = samples[0], samples[-1]
    seconds, started = last.at - first.at, last.handoffs - first.handoffs
    is_idle = started <= 0 and not last.waiting and not last.streams
    if seconds <= 0 or is_idle or not last.prefillers or not last.decoders:
        return None
    full = [sample.full for sample in samples]
    if math.isinf(max(full)):
        return None
    unserved = last.waiting - first.waiting + last.waiting * seconds / horizon_seconds
    factor = max(_LEAST_FACTOR, 1 + unserved / max(1, started)) / len(samples)
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
    lost_seconds: float = 0.0
    """Seconds of the whole demand that the present split has lost against the best one."""

    @property
    def gain(self) -> float:
        """Return the predicted gain, as a share of the demand."""
        return self.then.served - self.now.served

    def __str__(self) -> str:
        return (
            f"{self.now.name} to {self.then.name}: prefillers {self.now.prefill_busy:.0%} to "
            f"{self.then.prefill_busy:.0%} busy, decoders {self.now.decode_busy:.0%} to {self.then.decode_busy:.0%}, "
            f"served in time {self.now.served:.0%} to {self.then.served:.0%}, cost {self.cost:.1%}, "
            f"lost {self.lost_seconds:.0f} s of the demand"
        )


class MovePlanner:
    """Decides which moves pay. Its owner reports a sample every second, and each move.

    For each split, the planner sums up the demand that it would have served late. Earlier losses fade within the
    horizon. An instance moves if the present split has lost more than the best one by _PAYBACK of the cost and the
    margin, over the horizon. So a heavy loss moves an instance within a minute, and a slight one takes several. Loads
    that alternate faster cost all splits the same, and cause no move.

    No split counts as worse than the present one for the demand of the past, so that a new demand shows at once. Each
    move back within half of the horizon doubles the difference that the next move needs. The next move is decided from
    samples after the last one. If the gain of two moves in a row does not come true, there is none in this direction
    for the horizon, and for twice the time after each further one.
    """

    def __init__(self, options: Callable[[], Elastic]) -> None:
        """Know nothing yet. `options`: returns the present settings."""
        self._options = options
        self._samples: deque[FleetSample] = deque()
        self._losses: dict[int, float] = {}
        """Seconds of the whole demand that each split would have served late, by its number of prefillers."""
        self._instances = 0
        """Number of instances of the splits in `_losses`."""
        self._counted_at = -math.inf
        """Time of the last change of `_losses`."""
        self._caution = 1.0
        """The factor by which the loss must be greater, because moves were reversed."""
        self._moved_at = -math.inf
        self._last_move: Role | None = None
        """The role of the last move; None: there was none."""
        self._pending: MoveAdvice | None = None
        """The last move, until it is known whether its gain came true."""
        self._failures = {Role.PREFILL: 0, Role.DECODE: 0}
        """Moves to each role in a row whose gain did not come true."""
        self._blocked_until = {Role.PREFILL: -math.inf, Role.DECODE: -math.inf}
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
        if sample.at - samples[0].at < _LEAST_SHARE * options.window_seconds:
            return None
        self.split = split = split_of(samples, options.horizon_seconds)
        if split is None:
            return None
        self._judge(split, sample.at)
        advice = self._advise(split, sample.at)
        return None if advice is None or self._blocked_until[advice.to] > sample.at else advice

    def note_move(self, advice: MoveAdvice) -> None:
        """Note that a move has begun."""
        now, horizon = self._samples[-1].at, self._options().horizon_seconds
        if self._last_move is advice.to.counterpart and now < self._moved_at + _REVERSAL_HORIZONS * horizon:
            self._caution = min(_MAX_CAUTION, 2 * self._caution)
        elif self._last_move is not None:
            self._caution = max(1.0, self._caution * 0.5 ** ((now - self._moved_at) / horizon))
        self._last_move, self._moved_at = advice.to, now
        self._pending, self.outcome = advice, None
        self._rate, self._streams = _started_per_second(self._samples), _mean_streams(self._samples)
        self.forget()

    def forget(self) -> None:
        """Forget the samples, because the numbers of instances change."""
        self._samples.clear()
        self.split = None

    def _judge(self, split: Split, now: float) -> None:
        """Find out whether the gain of the last move came true: more is served, or faster.

        The demand may have changed in the meantime, so one failure does not count.
        """
        advice, self._pending = self._pending, None
        if advice is None:
            return
        rate, streams = _started_per_second(self._samples), _mean_streams(self._samples)
        is_relieved = split.served >= advice.now.served + advice.gain / 2
        is_faster = rate >= self._rate * (1 + _LEAST_SPEED_UP / max(split.prefillers, split.decoders))
        # Long answers end long after the move.
        fills = advice.to is Role.DECODE and streams >= self._streams + _LEAST_SPEED_UP * self._samples[-1].full
        self.outcome = is_relieved or is_faster or fills
        failures = self._failures[advice.to] = 0 if self.outcome else self._failures[advice.to] + 1
        if failures >= _MAX_FAILURES:
            seconds = self._options().horizon_seconds * 2 ** min(_MAX_DOUBLINGS, failures - _MAX_FAILURES)
            self._blocked_until[advice.to] = now + seconds

    def _advise(self, split: Split, now: float) -> MoveAdvice | None:
        """Return the move towards the split that would have lost least, if that pays."""
        options, cost = self._options(), self._cost(split)
        needed = _PAYBACK * options.horizon_seconds * (options.margin + cost) * self._caution
        losses = self._count_losses(split, now)
        lost = losses[split.prefillers]
        best = min(losses, key=lambda prefillers: (losses[prefillers], abs(prefillers - split.prefillers)))
        if lost - losses[best] <= needed:
            return None
        then = split.moved(1 if best > split.prefillers else -1)
        assert then is not None
        return MoveAdvice(
            Role.PREFILL if best > split.prefillers else Role.DECODE, split, then, cost, lost - losses[best]
        )

    def _count_losses(self, split: Split, now: float) -> Mapping[int, float]:
        """Add the losses of the last second to those of each split, and return them."""
        options, instances = self._options(), split.prefillers + split.decoders
        if instances != self._instances:
            self._instances, self._losses = instances, {}
        seconds = min(_MAX_SAMPLE_SECONDS, now - self._counted_at)
        fading = math.exp(-seconds / options.horizon_seconds)
        self._counted_at, before = now, self._losses
        splits = {split.prefillers, *range(options.min_prefill, instances - options.min_decode + 1)}
        losses = {}
        for prefillers in splits:
            other = split.moved(prefillers - split.prefillers)
            assert other is not None
            losses[prefillers] = before.get(prefillers, 0.0) * fading + (1 - other.served) * seconds
        most = losses[split.prefillers]
        self._losses = {prefillers: min(most, loss) for prefillers, loss in losses.items()}
        return self._losses

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


# The part of the window after which samples are enough.
_LEAST_SHARE: Final = 1 / 3
# The part of the horizon in which the loss must reach the cost and the margin.
_PAYBACK: Final = 0.3
# The time in which a move in the other direction is a reversal, as a multiple of the horizon.
_REVERSAL_HORIZONS: Final = 0.5
_MAX_CAUTION: Final = 16.0
# Samples that are further apart count for this time.
_MAX_SAMPLE_SECONDS: Final = 5.0
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
