"""Number of prompts that a prefiller computes side by side, as reported by it and tested by its answers.

Most engines compute prompts one after the other, or several in one step that takes the sum of their times. Others are
several engines behind one address (data-parallel ranks), and may report their number. Some ranks are idle while others
have several prompts, because prompts are usually distributed without regard to their cost. pdproxy may hold prompts
back only if it can predict when a prefiller is free. So a prefiller gets all prompts at once until its answers show
that it computes them in order. With several ranks, answers must come as fast as if each prompt had its own rank, and
more prompts than ranks must have brought no more throughput, because ranks may batch prompts, too.

This test needs no known costs: the order is confirmed if some costs explain the answers.

Holding prompts back is a learned restriction, so it must prove itself: throughput with the limit must be as high as
without. From time to time a prefiller gets more prompts as a test. If its throughput with the limit is lower, nothing
is held back for an hour.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heapreplace
from math import inf, log, sqrt
from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.prefill_cost import mean_fit_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.policies.prefill_cost import PrefillSample

_MAX_LANES: Final = 64
# Number of answers to queued prompts before the first test.
_FIRST_TEST: Final = 12
# Number of further answers before the second test. It doubles after each test without a result.
_NEXT_TEST: Final = 8
# Number of last answers that a test uses.
_LAST: Final = 32
# Number of answers for which a result is valid, for one lane and for several. It doubles with each equal result.
_VALID_SERIAL: Final = 32
_VALID: Final = 32
_MAX_VALID: Final = 1024
# The error of the serial model must be below this multiple of the side-by-side model's error.
_SERIAL_FIT_RATIO: Final = 0.4
# Maximum error of the serial model.
_MAX_SERIAL_ERROR: Final = 0.25
# Minimum number of overtaking answers that is evidence against computing in order. Fewer may have other causes.
_OVERTAKING: Final = 3
# If none of this number of answers overtakes another, the order is confirmed without a fit of costs. Costs of engines
# that compute chunks of several prompts in a step are not predicted well.
_IN_ORDER: Final = 16
# That requires that lengths differ from their mean by more than this share, on average.
_MIN_LENGTH_SPREAD: Final = 0.25
# Maximum error of the side-by-side model for several ranks.
_MAX_RANKS_ERROR: Final = 0.1
# Answers belong to one step if they are at most this share of their prompts' time apart, and at most these seconds.
_STEP_SHARE: Final = 0.02
_STEP_SECONDS: Final = 0.01

# Faster answers are not used: no prompt would be held back for so short a time.
_MIN_SECONDS: Final = 0.05

# Number of answers in a group, for each lane.
_GROUP: Final = 3
# Number of last groups that are kept, with the limit and beyond it, and the minimum for a comparison.
_GROUPS: Final = 20
_ENOUGH_GROUPS: Final = 6
# Prompts in flight up to this multiple of the capacity are within the limit, because the next ones are sent early.
_AHEAD: Final = 2
# Throughput beyond the limit is higher if the logarithm of the ratio exceeds this value ...
_HIGHER: Final = 0.03
# ... by more than this number of standard deviations. It is equal if it exceeds this value by less.
_EQUAL: Final = 0.15
_SURE: Final = 2.0
# A result is dropped after this number of late answers since then, if they outnumber the timely ones.
_MAX_LATE: Final = 64
DOUBT_SECONDS: Final = 3600.0
"""Time for which nothing is held back after throughput was higher with more prompts."""


class _Throughput:
    """Throughput of a prefiller, from the last groups of consecutive answers.

    Answers of one step are in one group, because only the first of them takes time.
    """

    def __init__(self) -> None:
        self._complete_groups: deque[tuple[float, float, float, float]] = deque(maxlen=_GROUPS)
        """Groups: number of answers, uncached tokens, attention factors, and seconds."""
        self._current_group = (0.0, 0.0, 0.0, 0.0)

    @property
    def has_enough_groups(self) -> bool:
        """Whether there are enough groups for a comparison."""
        return len(self._complete_groups) >= _ENOUGH_GROUPS

    def add_answer(self, sample: PrefillSample, group_size: int) -> bool:
        """Add an answer to the current group of this size, or begin the next. Return whether a group is complete."""
        count, uncached, attention, seconds = self._current_group
        is_complete = count >= group_size and not _is_same_step(sample)
        if is_complete:
            self._complete_groups.append(self._current_group)
            count = uncached = attention = seconds = 0.0
        self._current_group = (
            count + 1,
            uncached + sample.uncached_tokens,
            attention + sample.attention_factor,
            seconds + sample.prefill_seconds,
        )
        return is_complete

    def predict_rate(self, cost_shape: Sequence[float]) -> tuple[float, float]:
        """Return the predicted seconds of work per second, and the variance of its logarithm."""
        first, token, attention = cost_shape[:3]  # loading cached tokens is not work of the prefiller
        works = [first * count + token * tokens + attention * each for count, tokens, each, _ in self._complete_groups]
        seconds = [each for *_, each in self._complete_groups]
        work, number = sum(works), len(works)
        rate = work / max(sum(seconds), 1e-9)
        squares = sum([(each - rate * its_seconds) ** 2 for each, its_seconds in zip(works, seconds, strict=True)])
        return rate, squares / (work * work) * number / (number - 1)


class ConcurrencyEstimate:
    """The learned number of prompts that a prefiller computes at the same time."""

    def __init__(self, rank_count: int | None = None) -> None:
        """Create an estimate without learned values.

        `rank_count`: see EngineFacts. There may be several engines even if it is 1 or None, behind a load balancer.
        """
        self.rank_count = rank_count
        self.lane_count = min(rank_count or 1, _MAX_LANES)
        """Assumed number of prompts that it computes side by side."""
        self.computes_in_order: bool | None = None
        """Whether answers confirm this number, so that its next free time can be predicted. None: unknown yet."""
        self._result_validity = self._remaining_validity = 0
        # The last answers: tokens, attention factor, and seconds since the previous answer (of steps) or since the
        # prompt was sent.
        self._recent_steps: deque[tuple[float, float, float]] = deque(maxlen=_LAST)
        self._recent_answers: deque[tuple[float, float, float]] = deque(maxlen=_LAST)
        self._overtaking_shares: deque[float] = deque(maxlen=_LAST)  # PrefillSample.overtaken_prompts of queued prompts
        self._until_test, self._next_test = _FIRST_TEST, _NEXT_TEST
        self._at, self._beyond = _Throughput(), _Throughput()  # within the limit, and beyond it
        self._tested_answers = 0  # groups beyond the limit since the last result
        self.doubted_until = -inf
        """Nothing is held back before this time, because throughput was higher with more prompts."""
        self._late = self._timely = 0  # answers since the last result

    @property
    def target_in_flight(self) -> float:
        """Number of prompts that it should have in flight. It is infinite while the order is unknown.

        It is larger than the number of lanes while a result is tested again.
        """
        if not self.computes_in_order:
            return inf
        return (
            self.lane_count
            if self._remaining_validity or (self.lane_count > 1 and self._tested_answers >= _ENOUGH_GROUPS)
            else 3 * self.lane_count
        )

    def forget_limit(self) -> None:
        """Forget the throughput within the limit, because the limit has changed."""
        self._at = _Throughput()

    def learn_from_sample(self, sample: PrefillSample, cost_shape: Sequence[float] = (), now: float = 0.0) -> None:
        """Update the estimate by a prompt that has been computed.

        Args:
            sample: The prompt.
            cost_shape: Coefficients of `PrefillCost.cost_shape`. Empty: throughput is not compared.
            now: Time at which the prompt had been computed.
        """
        self._timely += 1
        if cost_shape:
            self._compare_throughput(sample, cost_shape, now)
        if self._remaining_validity:
            self._remaining_validity -= 1
            return
        if sample.seconds_since_send < _MIN_SECONDS:
            return
        if self.lane_count > 1 and sample.prompts_ahead >= self.lane_count:
            return
        uncached, attention = sample.uncached_tokens, sample.attention_factor
        if self._recent_steps and _is_same_step(sample):
            tokens, attentions, seconds = self._recent_steps.pop()
            self._recent_steps.append((tokens + uncached, attentions + attention, seconds + sample.prefill_seconds))
            if self._overtaking_shares:
                self._overtaking_shares[-1] = 0.0  # the order of answers within a step has no meaning
        else:
            self._recent_steps.append((uncached, attention, sample.prefill_seconds))
        self._recent_answers.append((uncached, attention, sample.seconds_since_send))
        if sample.prompts_ahead:
            self._overtaking_shares.append(sample.overtaken_prompts)
            self._until_test -= 1
            if not self._until_test:
                self._test_concurrency(cost_shape)

    def record_late_answer(self) -> None:
        """Note a late answer, which teaches nothing. A result that cannot be tested again is dropped."""
        self._late += 1
        if self._late > max(_MAX_LATE, self._timely):
            self._set_test_result(False)
            self.computes_in_order = None
            self._remaining_validity = self._result_validity = 0

    def _compare_throughput(self, sample: PrefillSample, shape: Sequence[float], now: float) -> None:
        """Compare the throughput within the limit with the throughput beyond it."""
        if sample.fill_share > _AHEAD:
            self._tested_answers += self._beyond.add_answer(sample, _GROUP * self.lane_count)
        elif sample.fill_share >= 1:
            self._at.add_answer(sample, _GROUP * self.lane_count)
        if now >= self.doubted_until and self.computes_in_order and self._is_throughput_lower(shape):
            self.doubted_until = now + DOUBT_SECONDS
            self._set_test_result(False)
        elif now >= self.doubted_until > -inf:
            self.doubted_until = -inf
            self._at, self._beyond = _Throughput(), _Throughput()

    def _is_throughput_lower(self, shape: Sequence[float]) -> bool:
        """Return whether throughput within the limit is significantly lower than beyond it.

        Without groups within the limit, several lanes are assumed to do one second of work per second each.
        """
        if not self._beyond.has_enough_groups or not (self._at.has_enough_groups or self.lane_count > 1):
            return False
        at, at_variance = self._at.predict_rate(shape) if self._at.has_enough_groups else (float(self.lane_count), 0.0)
        beyond, beyond_variance = self._beyond.predict_rate(shape)
        return log(beyond / at) > _HIGHER + _SURE * sqrt(at_variance + beyond_variance)

    def _ranks_compute_in_order(self, shape: Sequence[float]) -> bool:
        """Return whether ranks with several prompts each do at most one second of work per second.

        Ranks that compute several prompts in a step do more, and would lose throughput with one prompt each.
        """
        if not self._beyond.has_enough_groups:
            return False
        rate, variance = self._beyond.predict_rate(shape)
        return log(rate / self.lane_count) + _SURE * sqrt(variance) < _EQUAL

    def _test_concurrency(self, shape: Sequence[float]) -> None:
        self._until_test = self._next_test
        self._next_test *= 2
        side_by_side = mean_fit_error(self._recent_answers)
        if self.lane_count > 1:
            self._set_test_result(
                side_by_side < _MAX_RANKS_ERROR and bool(shape) and self._ranks_compute_in_order(shape)
            )
            return
        in_turn = mean_fit_error(self._recent_steps)
        if sum(self._overtaking_shares) >= _OVERTAKING:
            if in_turn > side_by_side:
                self._set_test_result(False)
        elif in_turn < min(_SERIAL_FIT_RATIO * side_by_side, _MAX_SERIAL_ERROR) or (
            len(self._overtaking_shares) >= _IN_ORDER and self._lengths_differ and not any(self._overtaking_shares)
        ):
            self._set_test_result(True)

    @property
    def _lengths_differ(self) -> bool:
        """Whether the lengths of prompts differ enough."""
        lengths = [uncached for uncached, *_ in self._recent_answers]
        mean = sum(lengths) / len(lengths)
        return sum(abs(length - mean) for length in lengths) > _MIN_LENGTH_SPREAD * mean * len(lengths)

    def _set_test_result(self, is_orderly: bool) -> None:
        is_orderly = is_orderly and self.doubted_until == -inf
        self._tested_answers = self._late = self._timely = 0
        if self._result_validity and is_orderly is self.computes_in_order:
            self._result_validity = min(2 * self._result_validity, _MAX_VALID)
        else:
            self._result_validity = _VALID_SERIAL if is_orderly and self.lane_count == 1 else _VALID
        self._remaining_validity = self._result_validity
        self.computes_in_order = is_orderly
        self._recent_steps.clear()
        self._recent_answers.clear()
        self._overtaking_shares.clear()
        self._until_test, self._next_test = _FIRST_TEST, _NEXT_TEST


def _is_same_step(sample: PrefillSample) -> bool:
    """Return whether a prompt was answered in the same step as the one before it."""
    return sample.prefill_seconds <= min(_STEP_SECONDS, _STEP_SHARE * sample.seconds_since_send)


def seconds_until_lane_free(remaining_seconds: Sequence[float], queued_seconds: Sequence[float]) -> float:
    """Return the time until a lane is free.

    Args:
        remaining_seconds: Remaining time of the prompt in each lane.
        queued_seconds: Times of the queued prompts, in order.
    """
    free = list(remaining_seconds)
    heapify(free)
    for seconds in queued_seconds:
        heapreplace(free, free[0] + seconds)
    return free[0]
