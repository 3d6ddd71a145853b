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
"""Minimum gain of a move that `recommend_split` recommends, as a share of the present load."""
# Requests are late before a role is full, because prompts and answers have different lengths. This share of one
# instance stays free, and more of several instances by the square root of their number, as in queueing theory: 60 % of
# one instance can be busy, and 90 % of 16.
_FREE: Final = 0.4
# A decoder without room for answers counts as this part of one, so that its use is a number.
_LEAST_DECODERS: Final = 0.01
# The share of KV memory that answers fill before a decoder is full.
_FULL_KV: Final = 0.95


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """Numbers of instances by role, and their utilisation: 1.0 is full, and more means that demand exceeds capacity."""

    prefillers: int
    decoders: int
    prefill_busy: float
    decode_busy: float
    decoders_for_prompts: float = 0.0
    """The part of the decoders that requests hold while their prompts are computed. Answers have the others."""

    @property
    def split_name(self) -> str:
        return f"{self.prefillers}P{self.decoders}D"

    @property
    def load_capacity(self) -> float:
        """Return the load that fills the busier side, as a multiple of the present load; infinite without load."""
        busiest = max(self.prefill_busy, self.decode_busy)
        return 1 / busiest if busiest else float("inf")

    @property
    def served_share(self) -> float:
        """Return the predicted share of the demand that is served in time."""
        late = max(self.prefill_busy / _usable_share(self.prefillers), self.decode_busy / _usable_share(self.decoders))
        return 1.0 if late <= 1 else 1 / late

    def desired_instances(self) -> dict[Role, int]:
        """Return how many instances of each role the demand needs, at least one."""
        decode = self.decode_busy * (self.decoders - self.decoders_for_prompts) + self.decoders_for_prompts
        busy = {Role.PREFILL: self.prefill_busy * self.prefillers, Role.DECODE: decode}
        # The smallest n with n * _usable(n) >= instances.
        roots = {role: (_FREE + math.sqrt(_FREE**2 + 4 * instances)) / 2 for role, instances in busy.items()}
        return {role: max(1, math.ceil(root**2 - 1e-9)) for role, root in roots.items()}

    def __str__(self) -> str:
        return f"{self.split_name}, prefillers {self.prefill_busy:.0%} busy, decoders {self.decode_busy:.0%} busy"

    @property
    def busier_role(self) -> str:
        """Return the busier role."""
        return "prefill" if self.prefill_busy >= self.decode_busy else "decode"

    def copy_with_prefillers(self, prefillers: int) -> RoleSplit | None:
        """Return the split with more prefillers from the decoders, or fewer; None if a role would be empty."""
        left = self.prefillers + prefillers, self.decoders - prefillers
        if min(left) < 1:
            return None
        for_prompts = self.decoders_for_prompts
        decode = self.decode_busy * (self.decoders - for_prompts) / max(_LEAST_DECODERS, left[1] - for_prompts)
        return RoleSplit(*left, self.prefill_busy * self.prefillers / left[0], decode, for_prompts)

    def neighbour_splits(self) -> list[RoleSplit]:
        """Return this split and those that differ by one instance."""
        return [
            self,
            *(each for each in (self.copy_with_prefillers(1), self.copy_with_prefillers(-1)) if each is not None),
        ]


def _usable_share(instance_count: int) -> float:
    """Return the share of some instances of a role that can be busy while requests are in time."""
    return 1 - _FREE / math.sqrt(instance_count)


def recommend_split(present_split: RoleSplit) -> RoleSplit:
    """Return the recommended split, which differs only if it carries at least LEAST_GAIN more."""
    best = max(present_split.neighbour_splits(), key=lambda split: split.load_capacity)
    return best if best.load_capacity >= (1 + LEAST_GAIN) * present_split.load_capacity else present_split


# The present split, from samples of the loads that all workers share.


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The loads at one time."""

    taken_at: float
    """Time in seconds of a monotonic clock."""
    prefiller_count: int
    """Number of available prefillers."""
    decoder_count: int
    """Number of available decoders."""
    computing_prompts: int
    """Number of prefillers that compute a prompt."""
    running_answers: int
    """Number of running answers."""
    full_answers: float
    """Number of running answers of one full decoder. Infinite: not known."""
    waiting_requests: int
    """Number of requests in the queues of all workers and of the prefillers."""
    handoff_count: int
    """Number of answers that have begun since the gateway started."""


def take_fleet_sample(
    pools: Pools, scoreboard: Scoreboard, waiting_requests: int, now: float, *, token_seconds: float
) -> FleetSample:
    """Return the present loads. `token_seconds`: a decoder is full at this time for a token at the latest."""
    prefillers, decoders = pools.prefill.eligible_backends(), pools.decode.eligible_backends()
    full = [_full_streams(pools, scoreboard, decoder, token_seconds) for decoder in decoders]
    # A request holds memory of its decoder from the prefill on. Those in the queue of a prefiller only wait.
    prefilling = sum(scoreboard.running_requests(each.slot) for each in pools.prefill.all_backends())
    held = sum(scoreboard.running_requests(each.slot) for each in pools.decode.all_backends())
    computing = sum(scoreboard.load_of(each.slot).compute_tokens > 0 for each in pools.prefill.all_backends())
    behind = max(0, prefilling - computing)
    return FleetSample(
        taken_at=now,
        prefiller_count=len(prefillers),
        decoder_count=len(decoders),
        computing_prompts=computing,
        running_answers=max(0, held - behind),
        full_answers=sum(full) / len(full) if full else math.inf,
        waiting_requests=waiting_requests + behind,
        handoff_count=sum(scoreboard.count_handoffs(each.slot).handoff_count for each in decoders),
    )


def _full_streams(pools: Pools, scoreboard: Scoreboard, decoder: Backend, token_seconds: float) -> float:
    """Return the number of running answers at which a decoder is full, by its limit, its pace and its KV memory."""
    pool = pools.decode
    limits = [
        pool.running_limit(decoder),
        pool.policy.learned_max_running(decoder),
        pool.policy.answers_within_pace(token_seconds),
    ]
    facts, running = pool.health.health_of(decoder).engine_facts, scoreboard.running_requests(decoder.slot)
    if facts is not None and facts.kv_memory_tokens and running:
        limits.append(_FULL_KV * facts.kv_memory_tokens * running / max(1, scoreboard.load_of(decoder.slot).kv_tokens))
    return max(1.0, min((float(each) for each in limits if each is not None), default=math.inf))


# A queue that empties shows that there is less demand than load, but not that there is none.
_LEAST_FACTOR: Final = 0.1


def measure_split(samples: Sequence[FleetSample], horizon_seconds: float) -> RoleSplit | None:
    """Return the present split, or None if too little is known. The samples have the same numbers of instances.

    Queued requests count as demand of both roles: the growth of the queue, which is negative if requests of an earlier
    demand are served, and a part of the queue, so that it is empty after `horizon_seconds`.
    """
    first, last = samples[0], samples[-1]
    seconds, started = last.taken_at - first.taken_at, last.handoff_count - first.handoff_count
    is_idle = started <= 0 and not last.waiting_requests and not last.running_answers
    if seconds <= 0 or is_idle or not last.prefiller_count or not last.decoder_count:
        return None
    full = [sample.full_answers for sample in samples]
    if math.isinf(max(full)):
        return None
    unserved = last.waiting_requests - first.waiting_requests + last.waiting_requests * seconds / horizon_seconds
    factor = max(_LEAST_FACTOR, 1 + unserved / max(1, started)) / len(samples)
    prefill = sum(sample.computing_prompts for sample in samples) * factor
    # A request holds a place of its decoder from the prefill on. Prompts alone do not make a decoder late.
    for_prompts = sum(sample.computing_prompts / sample.full_answers for sample in samples) / len(samples)
    answers = [max(0, sample.running_answers - sample.computing_prompts) / sample.full_answers for sample in samples]
    decode = sum(answers) * factor / max(_LEAST_DECODERS, last.decoder_count - for_prompts)
    return RoleSplit(last.prefiller_count, last.decoder_count, prefill / last.prefiller_count, decode, for_prompts)


# Decisions of the controller.


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """A move that pays."""

    new_role: Role
    """New role of one instance of the other role."""
    present_split: RoleSplit
    future_split: RoleSplit
    """The predicted split."""
    move_cost: float
    """Share of the demand that the move itself costs within the horizon."""
    lost_work_seconds: float = 0.0
    """Seconds of the whole demand that the present split has lost against the best one."""

    @property
    def predicted_gain(self) -> float:
        """Return the predicted gain, as a share of the demand."""
        return self.future_split.served_share - self.present_split.served_share

    def __str__(self) -> str:
        return (
            f"{self.present_split.split_name} to {self.future_split.split_name}: prefillers "
            f"{self.present_split.prefill_busy:.0%} to "
            f"{self.future_split.prefill_busy:.0%} busy, decoders {self.present_split.decode_busy:.0%} to "
            f"{self.future_split.decode_busy:.0%}, "
            f"served in time {self.present_split.served_share:.0%} to {self.future_split.served_share:.0%}, "
            f"cost {self.move_cost:.1%}, "
            f"lost {self.lost_work_seconds:.0f} s of the demand"
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
        self._get_options = options
        self._fleet_samples: deque[FleetSample] = deque()
        self._losses_by_split: dict[int, float] = {}
        """Seconds of the whole demand that each split would have served late, by its number of prefillers."""
        self._instance_count = 0
        """Number of instances of the splits in `_losses_by_split`."""
        self._losses_counted_at = -math.inf
        """Time of the last change of `_losses_by_split`."""
        self._caution_factor = 1.0
        """The factor by which the loss must be greater, because moves were reversed."""
        self._last_move_at = -math.inf
        self._last_move: Role | None = None
        """The role of the last move; None: there was none."""
        self._pending_advice: MoveAdvice | None = None
        """The last move, until it is known whether its gain came true."""
        self._failures_by_role = {Role.PREFILL: 0, Role.DECODE: 0}
        """Moves to each role in a row whose gain did not come true."""
        self._blocked_until = {Role.PREFILL: -math.inf, Role.DECODE: -math.inf}
        self._rate = 0.0
        """Answers that began per second before the last move."""
        self._streams = 0.0
        """Running answers before the last move."""
        self.split: RoleSplit | None = None
        """The present split; None: too little is known."""
        self.outcome: bool | None = None
        """Whether the gain of the last move came true; None: not known yet, or there was none."""

    def add_sample(self, sample: FleetSample) -> MoveAdvice | None:
        """Take a sample, and return the move that pays now, or None."""
        samples, options = self._fleet_samples, self._get_options()
        last = samples[-1] if samples else None
        if last is not None and (last.prefiller_count, last.decoder_count) != (
            sample.prefiller_count,
            sample.decoder_count,
        ):
            self.forget_samples()
        samples.append(sample)
        while len(samples) > 1 and sample.taken_at - samples[1].taken_at >= options.window_seconds:
            samples.popleft()
        if sample.taken_at - samples[0].taken_at < _LEAST_SHARE * options.window_seconds:
            return None
        self.split = split = measure_split(samples, options.horizon_seconds)
        if split is None:
            return None
        self._judge_last_move(split, sample.taken_at)
        advice = self._advise_move(split, sample.taken_at)
        return None if advice is None or self._blocked_until[advice.new_role] > sample.taken_at else advice

    def record_move(self, advice: MoveAdvice) -> None:
        """Note that a move has begun."""
        now, horizon = self._fleet_samples[-1].taken_at, self._get_options().horizon_seconds
        if self._last_move is advice.new_role.counterpart and now < self._last_move_at + _REVERSAL_HORIZONS * horizon:
            self._caution_factor = min(_MAX_CAUTION, 2 * self._caution_factor)
        elif self._last_move is not None:
            self._caution_factor = max(1.0, self._caution_factor * 0.5 ** ((now - self._last_move_at) / horizon))
        self._last_move, self._last_move_at = advice.new_role, now
        self._pending_advice, self.outcome = advice, None
        self._rate, self._streams = _started_per_second(self._fleet_samples), _mean_streams(self._fleet_samples)
        self.forget_samples()

    def forget_samples(self) -> None:
        """Forget the samples, because the numbers of instances change."""
        self._fleet_samples.clear()
        self.split = None

    def _judge_last_move(self, split: RoleSplit, now: float) -> None:
        """Find out whether the gain of the last move came true: more is served, or faster.

        The demand may have changed in the meantime, so one failure does not count.
        """
        advice, self._pending_advice = self._pending_advice, None
        if advice is None:
            return
        rate, streams = _started_per_second(self._fleet_samples), _mean_streams(self._fleet_samples)
        is_relieved = split.served_share >= advice.present_split.served_share + advice.predicted_gain / 2
        is_faster = rate >= self._rate * (1 + _LEAST_SPEED_UP / max(split.prefillers, split.decoders))
        # Long answers end long after the move.
        fills = (
            advice.new_role is Role.DECODE
            and streams >= self._streams + _LEAST_SPEED_UP * self._fleet_samples[-1].full_answers
        )
        self.outcome = is_relieved or is_faster or fills
        failures = self._failures_by_role[advice.new_role] = (
            0 if self.outcome else self._failures_by_role[advice.new_role] + 1
        )
        if failures >= _MAX_FAILURES:
            seconds = self._get_options().horizon_seconds * 2 ** min(_MAX_DOUBLINGS, failures - _MAX_FAILURES)
            self._blocked_until[advice.new_role] = now + seconds

    def _advise_move(self, split: RoleSplit, now: float) -> MoveAdvice | None:
        """Return the move towards the split that would have lost least, if that pays."""
        options, cost = self._get_options(), self._cost_of_move(split)
        needed = _PAYBACK * options.horizon_seconds * (options.margin + cost) * self._caution_factor
        losses = self._count_losses(split, now)
        lost = losses[split.prefillers]
        best = min(losses, key=lambda prefillers: (losses[prefillers], abs(prefillers - split.prefillers)))
        if lost - losses[best] <= needed:
            return None
        then = split.copy_with_prefillers(1 if best > split.prefillers else -1)
        assert then is not None
        return MoveAdvice(
            Role.PREFILL if best > split.prefillers else Role.DECODE, split, then, cost, lost - losses[best]
        )

    def _count_losses(self, split: RoleSplit, now: float) -> Mapping[int, float]:
        """Add the losses of the last second to those of each split, and return them."""
        options, instances = self._get_options(), split.prefillers + split.decoders
        if instances != self._instance_count:
            self._instance_count, self._losses_by_split = instances, {}
        seconds = min(_MAX_SAMPLE_SECONDS, now - self._losses_counted_at)
        fading = math.exp(-seconds / options.horizon_seconds)
        self._losses_counted_at, before = now, self._losses_by_split
        splits = {split.prefillers, *range(options.min_prefill, instances - options.min_decode + 1)}
        losses = {}
        for prefillers in splits:
            other = split.copy_with_prefillers(prefillers - split.prefillers)
            assert other is not None
            losses[prefillers] = before.get(prefillers, 0.0) * fading + (1 - other.served_share) * seconds
        most = losses[split.prefillers]
        self._losses_by_split = {prefillers: min(most, loss) for prefillers, loss in losses.items()}
        return self._losses_by_split

    def _cost_of_move(self, split: RoleSplit) -> float:
        """Return what a move costs: an instance serves nothing meanwhile, and its answers are computed again."""
        options, samples = self._get_options(), self._fleet_samples
        instances = split.prefillers + split.decoders
        evacuate_after = options.evacuate_after_seconds
        away_seconds = _JOIN_SECONDS + (options.drain_seconds if evacuate_after is None else evacuate_after)
        lost = away_seconds / instances / options.horizon_seconds
        started = max(1, samples[-1].handoff_count - samples[0].handoff_count)
        busy_seconds = sum(
            (after.taken_at - before.taken_at) * before.computing_prompts for before, after in pairwise(samples)
        )
        again_seconds = samples[-1].running_answers / split.decoders * busy_seconds / started
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
    return (samples[-1].handoff_count - samples[0].handoff_count) / max(
        1e-9, samples[-1].taken_at - samples[0].taken_at
    )


def _mean_streams(samples: Sequence[FleetSample]) -> float:
    return sum(sample.running_answers for sample in samples) / len(samples)
