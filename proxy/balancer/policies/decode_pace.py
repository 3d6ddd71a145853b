"""The pace of decoders, by the number of answers that they write at a time. It is learned from answers that ended.

An answer shows its tokens and the seconds that its decoder spent in each bucket of numbers of answers meanwhile.
`RateFilter` estimates from these the tokens per second of one answer in each bucket. How slow each backend is beside
the others is learned apart.

Some decoders write fewer tokens per second in all when they write more answers at a time than at their saturation
point. Because slower answers stay longer, such a decoder does not recover. A saturation point is a learned
restriction, so it must prove itself twice. First the decline must be significant under the filter's own covariance,
and answers written beyond the point must show it without any estimate. Later, answers written at the point must show a
higher throughput than those beyond it: otherwise the point is dropped, and none is believed for an hour.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    _Spent = Sequence[tuple[int, float]]

_EVERY: Final = 16  # up to this number of answers each has a separate bucket; later buckets grow by an eighth
_BUCKETS: Final = 40
SIZES: Final = tuple(range(_EVERY + 1)) + tuple(
    accumulate(range(_BUCKETS), lambda size, _: size + size // 8, initial=_EVERY + 2)
)
"""Maximum number of concurrent answers of each bucket. The last bucket also has all greater numbers."""
PLACES: Final = tuple(min(bisect_left(SIZES, answers), len(SIZES) - 1) for answers in range(SIZES[-1] + 1))
"""Bucket of each number of concurrent answers. Greater numbers belong to the last bucket."""
_CENTERS: Final = (0.5, *(0.5 * (SIZES[place - 1] + 1 + SIZES[place]) for place in range(1, len(SIZES))))

# Minimum duration of an answer. The pace of shorter ones depends on reads that bring several tokens at once.
_MIN_SECONDS: Final = 0.1
# Weight of a new answer in the relative speed of a backend.
_SLOWNESS_STEP: Final = 0.03
# Bound of the logarithm of a backend's relative speed.
_MAX_SLOWNESS: Final = math.log(4)
# Smaller differences in speed are noise.
_EQUAL_SPEED: Final = math.log(1.05)
# Maximum factor between an answer's tokens and the expected ones. It limits outliers, such as slow clients.
_MAX_RATIO: Final = 2.5
# Time in a bucket from which on its rate is known, in answers.
_ENOUGH: Final = 4.0
# Maximum factor if an answer spent time in a bucket without a known rate, because the expectation may be wrong.
_MAX_RATIO_UNKNOWN: Final = 10.0
# Variance of the ratio of an answer's tokens to the expected ones, such as by accepted drafts.
_OWN_VARIANCE: Final = 0.1**2
# Additional variance that is common to all concurrent answers of a decoder, so that they count as one.
_COMMON_VARIANCE: Final = 0.04**2
# Weight of a new answer in the estimate of the variance.
_NOISE_STEP: Final = 0.02
# Standard deviation between two buckets that remains with any number of answers, for example because prompts differ.
_FLOOR: Final = 0.05
# Time in a bucket from which on it counts for the saturation point, in answers.
_KNOWN: Final = 2.0
# The same once a saturation point is learned.
_STILL_KNOWN: Final = 0.2
# Minimum number of answers for a saturation point, so that their variance is known.
_MIN_SAMPLES: Final = 50
# Minimum decline of throughput beyond a saturation point, as a logarithm.
_MIN_DECLINE: Final = -math.log(0.85)
# A decline is significant if it exceeds the minimum by this number of standard deviations.
_SURE: Final = 2.0
# A learned saturation point only needs this number, because few answers are still written beyond it.
_STILL_SURE: Final = 0.5
# Time in which the weight of an answer falls to 1/e.
_MEMORY_SECONDS: Final = 1800.0

TRUSTED_SECONDS: Final = 600.0
"""Time without answers beyond the saturation point after which one decoder gets more answers as a test."""
DOUBT_SECONDS: Final = 3600.0
"""Time without a saturation point after one was dropped because throughput at it was not higher."""
# Minimum number of concurrent answers for a test with fewer answers.
_MIN_SCOUTED: Final = 4
# Minimum cost of an answer as a share of a step. Otherwise one decoder would get all requests of a burst.
_MIN_SLOPE: Final = 0.01
# Assumed ratio of a step's time to the time that one answer adds. Measured machines have 10 and 13.
_FIRST_STEPS: Final = 10.0

# Number of last answers that are kept as evidence without estimates.
_WITNESSES: Final = 512
# Minimum number of answers on each side of a limit for a comparison.
_ENOUGH_WITNESSES: Final = 4
# Maximum number of answers on each side; the last ones are used.
_MAX_WITNESSES: Final = 32
# An answer is evidence for one side of a limit if it spent this part of its time there.
_MOSTLY: Final = 0.7
# It is evidence for the limit itself if its decoder wrote at least this part of that number of answers.
_NEAR: Final = 0.6

# Variance of the prior's random walk for one unit of the logarithm of the number of answers.
_WALK_VARIANCE: Final = 1.0
# A rate stays above this part of the mean rate, as a linear filter might estimate a negative one.
_MIN_RATE: Final = 0.02


class RateFilter:
    """Kalman filter in information form: the tokens per second of one answer, by the number of answers beside it.

    Each answer that ended gives one equation: the sum over the buckets of rate × seconds is its number of tokens.
    Similar answers under steady load all give nearly the same equation, so the equations alone often fit many curves.
    The prior decides between these: the rate does not depend on the number of answers until the data show otherwise.
    The logarithm of the rate is a random walk in the logarithm of that number.

    The filter knows how uncertain the difference between two buckets is. Adding an answer costs a few multiplications
    per pair of its buckets. Solving costs up to some milliseconds and is done at most once a second.
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        """Create a filter. `sizes[i]`: answers at a time in bucket i, greater than 0 and increasing."""
        count = len(sizes)
        self.rates_by_bucket = [0.0] * count
        """Tokens per second of one answer, by bucket. All are 0.0 before the first answer."""
        self._bucket_distances = [math.log(sizes[place + 1] / sizes[place]) for place in range(count - 1)]
        self._information_matrix = [[0.0] * (place + 1) for place in range(count)]  # lower triangle
        self._information_vector = [0.0] * count
        self._first, self._last = count, -1  # the range of buckets with data
        self._cholesky_factor: list[list[float]] = []  # Cholesky factor of that range, as last solved
        self._first_solved_bucket = 0

    def start_with_rate(self, first_rate: float) -> None:
        """Start with this rate in all buckets, which only scales the first answers."""
        self.rates_by_bucket = [first_rate] * len(self.rates_by_bucket)

    def expected_tokens(self, seconds_by_bucket: Sequence[tuple[int, float]]) -> float:
        """Return the tokens that an answer gets that spends these seconds in these buckets."""
        rates = self.rates_by_bucket
        return sum(rates[place] * seconds for place, seconds in seconds_by_bucket)

    def add_answer(
        self,
        seconds_by_bucket: Sequence[tuple[int, float]],
        expected_tokens: float,
        token_ratio: float,
        sample_weight: float,
    ) -> None:
        """Update the learned rates by one answer.

        Args:
            seconds_by_bucket: Bucket and seconds, in the order of the buckets, for each bucket in which it spent time.
            expected_tokens: The tokens that were expected of it.
            token_ratio: The tokens that it got, as a multiple of these.
            sample_weight: The inverse of the variance of `token_ratio`.
        """
        if not seconds_by_bucket:
            return
        information, target = self._information_matrix, self._information_vector
        for at, (place, seconds) in enumerate(seconds_by_bucket):
            share = seconds / expected_tokens
            weighted = sample_weight * share
            target[place] += weighted * token_ratio
            row = information[place]
            for other, its_seconds in seconds_by_bucket[: at + 1]:
                row[other] += weighted * its_seconds / expected_tokens
        self._first = min(self._first, seconds_by_bucket[0][0])
        self._last = max(self._last, seconds_by_bucket[-1][0])

    def reduce_weight(self, kept_share: float) -> None:
        """Reduce the weight of everything learned to a share."""
        for place in range(self._first, self._last + 1):
            self._information_vector[place] *= kept_share
            self._information_matrix[place] = [kept_share * each for each in self._information_matrix[place]]

    def scale_rates(self, speed_factor: float) -> None:
        """All engines have become this many times as fast."""
        self.rates_by_bucket = [speed_factor * rate for rate in self.rates_by_bucket]
        for place in range(self._first, self._last + 1):
            self._information_vector[place] /= speed_factor
            self._information_matrix[place] = [
                each / (speed_factor * speed_factor) for each in self._information_matrix[place]
            ]

    def solve_rates(self) -> None:
        """Take all answers into the rates. Buckets outside the range that was seen have the rate of its nearest end."""
        first, last = self._first, self._last
        if last < first:
            return
        self._cholesky_factor, self._first_solved_bucket = self._compute_factor(), first
        solution = self._solve_backward(self._solve_forward(self._information_vector[first : last + 1]))
        least = _MIN_RATE * sum(solution) / len(solution)
        if least <= 0.0:
            return  # nonsense in, nonsense out: keep the rates before
        rates = [max(least, rate) for rate in solution]
        self.rates_by_bucket = [rates[0]] * first + rates + [rates[-1]] * (len(self.rates_by_bucket) - last - 1)

    def ratio_variance(self, bucket: int, other_bucket: int) -> float:
        """Return the variance of the logarithm of the ratio of two buckets' rates; infinite outside the range seen."""
        first, count = self._first_solved_bucket, len(self._cholesky_factor)
        if not (first <= bucket < first + count and first <= other_bucket < first + count):
            return math.inf
        gradient = [0.0] * count
        gradient[bucket - first] = 1 / self.rates_by_bucket[bucket]
        gradient[other_bucket - first] -= 1 / self.rates_by_bucket[other_bucket]
        return sum(each * each for each in self._solve_forward(gradient))

    def _compute_factor(self) -> list[list[float]]:
        """Return the Cholesky factor of the data's information plus the prior's, for the range with data."""
        first, last, rates = self._first, self._last, self.rates_by_bucket
        count = last - first + 1
        matrix = [self._information_matrix[first + at][first : first + at + 1] for at in range(count)]
        for at in range(count - 1):
            place = first + at
            precision = 1 / (_WALK_VARIANCE * self._bucket_distances[place] * rates[place] * rates[place + 1])
            matrix[at][at] += precision
            matrix[at + 1][at + 1] += precision
            matrix[at + 1][at] -= precision
        factor: list[list[float]] = []
        for at in range(count):
            row = matrix[at]
            done: list[float] = []
            for other in range(at):
                before = factor[other]
                rest = row[other]
                for place in range(other):
                    rest -= done[place] * before[place]
                done.append(rest / before[other])
            rest = row[at]
            for each in done:
                rest -= each * each
            done.append(math.sqrt(max(rest, 1e-12 * row[at], 1e-300)))
            factor.append(done)
        return factor

    def _solve_forward(self, values: Sequence[float]) -> list[float]:
        """Solve factor · x = values."""
        solution: list[float] = []
        for row, value in zip(self._cholesky_factor, values, strict=True):
            rest = value
            for at, each in enumerate(solution):
                rest -= row[at] * each
            solution.append(rest / row[-1])
        return solution

    def _solve_backward(self, values: Sequence[float]) -> list[float]:
        """Solve transposed factor · x = values."""
        solution = list(values)
        for at in range(len(solution) - 1, -1, -1):
            row = self._cholesky_factor[at]
            solution[at] /= row[-1]
            for other in range(at):
                solution[other] -= row[other] * solution[at]
        return solution


class DecodePace:
    """The pace of one role's decoders, as one worker knows it."""

    def __init__(self) -> None:
        self.saturation_answers = math.inf
        """The answers at a time that a decoder should have at most: its saturation point. Infinite: none is known."""
        self.scout_max_answers = math.inf
        """The same for the one decoder that finds out whether the saturation point still holds."""
        self.scout_preferred_answers = math.inf
        """The answers at a time that one decoder should rather have, because no decoder has had this few lately. Never
        a reason for a request to wait. Infinite: there is nothing to find out."""
        self.max_answers_seen = math.inf
        """The most answers at a time of which enough was seen."""
        self.idle_gain_seconds = 0.0
        """Decoder seconds that a token takes more right beyond the saturation point than at it; 0.0: none is known."""
        self.step, self.slope = _FIRST_STEPS, 1.0
        """Seconds that a token takes: without other answers, and more for each answer. A straight line below the
        saturation point. Only the ratio counts as long as nothing is known."""
        self.is_line_fitted = False
        """Whether `step` and `slope` are in seconds."""
        self.first_token_seconds = 0.0
        """Seconds per token of a decoder at its highest throughput; 0.0: not known."""
        self.sample_count = 0
        self._rate_filter = RateFilter([max(0.5, each) for each in _CENTERS])
        self._seconds_by_bucket = [0.0] * len(SIZES)  # answers' worth of time in each bucket
        self._solved = [0.0] * len(SIZES)  # the same that are in the rates
        self._seen_at = [-math.inf] * len(SIZES)
        self._noise = 1.0  # variance of the answers relative to the assumed one
        self._noted = 4  # answers that it is the mean of, with those that were assumed
        self._slowness: dict[Hashable, float] = {}  # logarithms
        self._witnesses: deque[tuple[_Spent, float, float, float]] = deque(maxlen=_WITNESSES)
        """Buckets and seconds, all seconds, the decoder's tokens per second, and the time of the end."""
        self._since = math.inf  # when the saturation point was first believed
        self._kept = 0  # its highest bucket since then
        self._beyond = 0  # the first bucket beyond the saturation point
        self._gains: Sequence[float] = ()  # gain_seconds in that bucket and in those beyond it, never falling
        self._beyond_made = 0.0  # tokens per second beyond it, without any estimate
        self._doubted_until = -math.inf
        self._forgot_at = -math.inf
        self._unsolved = 0  # answers that are not in the rates yet

    @property
    def rates_by_bucket(self) -> Sequence[float]:
        """Tokens per second of one answer, by bucket; 0.0: nothing is known of any."""
        return self._rate_filter.rates_by_bucket

    @property
    def is_saturation_doubted(self) -> bool:
        """Whether a saturation point was dropped that did not prove itself, and none is believed for a while."""
        return self._doubted_until > -math.inf

    def greatest_gain_at(self, answers: float) -> float:
        """Return the greatest gain on the way to a decoder that writes this number of answers at a time."""
        place = PLACES[int(answers)] if answers < len(PLACES) else len(SIZES) - 1
        return self._gains[max(0, place - self._beyond)] if self.idle_gain_seconds else 0.0

    def slowness_of(self, backend: Hashable) -> float:
        """Return how many times as long a backend takes as the others; 1.0 if that is not known."""
        slowness = self._slowness.get(backend, 0.0)
        return 1.0 if abs(slowness) < _EQUAL_SPEED else math.exp(slowness)

    def forget_backend(self, backend: Hashable) -> None:
        """Forget the pace of a backend that has left."""
        self._slowness.pop(backend, None)

    def learn_from_answer(self, backend: Hashable, seconds_by_bucket: _Spent, answer_tokens: int, now: float) -> None:
        """Update the pace of a decoder by one answer.

        Args:
            backend: The decoder that wrote it.
            seconds_by_bucket: Bucket and seconds, in the order of the buckets, for each bucket in which the decoder was
                meanwhile.
            answer_tokens: Tokens that were written in this time. An answer of less than a tenth of a second teaches
                nothing.
            now: When it ended.
        """
        seconds = sum(each for _, each in seconds_by_bucket)
        if answer_tokens < 1 or seconds < _MIN_SECONDS:
            return
        if not self.sample_count:
            self._rate_filter.start_with_rate(answer_tokens / seconds)
        slowness = self._slowness.get(backend, 0.0)
        expected = self._rate_filter.expected_tokens(seconds_by_bucket)
        ratio = answer_tokens * math.exp(slowness) / expected
        is_known = all(self._solved[place] >= _ENOUGH for place, each in seconds_by_bucket if each > 0.1 * seconds)
        most = _MAX_RATIO if is_known else _MAX_RATIO_UNKNOWN
        ratio = max(1 / most, min(most, ratio))
        answers = sum(_CENTERS[place] * each for place, each in seconds_by_bucket) / seconds
        variance = _OWN_VARIANCE + _COMMON_VARIANCE * answers
        self._rate_filter.add_answer(seconds_by_bucket, expected, ratio, 1 / variance)
        self._witnesses.append((seconds_by_bucket, seconds, answers * ratio * expected / seconds, now))
        for place, each in seconds_by_bucket:
            self._seconds_by_bucket[place] += each / seconds
            if each > 0.05 * seconds:
                self._seen_at[place] = now
        if is_known:
            error = math.log(ratio)
            self._noted += 1
            self._noise += max(_NOISE_STEP, 1 / self._noted) * (error * error / _OWN_VARIANCE - self._noise)
            slower = slowness - _SLOWNESS_STEP * error
            self._slowness[backend] = max(-_MAX_SLOWNESS, min(_MAX_SLOWNESS, slower))
        self.sample_count += 1
        self._unsolved += 1
        if self._unsolved >= max(_ENOUGH, self.sample_count / 2):
            self._solve_rates(now)  # what is expected of the next answers is wrong otherwise

    def update_saturation(self, now: float) -> None:
        """Take what was learned by now into the saturation point and the line. To be called about once a second."""
        if self._unsolved:
            self._solve_rates(now)
        rates = self.rates_by_bucket
        least = _KNOWN if self.saturation_answers == math.inf else _STILL_KNOWN
        known = [place for place in range(1, len(SIZES)) if self._seconds_by_bucket[place] >= least]
        made = [center * rate for center, rate in zip(_CENTERS, rates, strict=True)]
        best = max(known, key=made.__getitem__, default=0)
        self.first_token_seconds = 1 / made[best] if known else 0.0
        self._update_limit(known, made, best, now)
        if self.saturation_answers < math.inf:
            known = [place for place in known if SIZES[place] <= self.saturation_answers]
        self.max_answers_seen = float(SIZES[known[-1]]) if known else math.inf
        self.scout_preferred_answers = self._choose_smaller_limit(known, now) if known else math.inf
        if len(known) > 1:
            self._fit_line(known)

    def _solve_rates(self, now: float) -> None:
        """Forget a little, level out what all backends have in common, and solve."""
        if self._forgot_at > -math.inf:
            kept = math.exp(-max(0.0, now - self._forgot_at) / _MEMORY_SECONDS)
            self._rate_filter.reduce_weight(kept)
            self._seconds_by_bucket = [kept * each for each in self._seconds_by_bucket]
        self._forgot_at = now
        self._unsolved = 0
        self._solved = self._seconds_by_bucket.copy()
        if self._slowness:
            common = sum(self._slowness.values()) / len(self._slowness)
            self._slowness = {backend: each - common for backend, each in self._slowness.items()}
            self._rate_filter.scale_rates(math.exp(-common))
        self._rate_filter.solve_rates()

    # The saturation point

    def _update_limit(self, known: Sequence[int], made: Sequence[float], best: int, now: float) -> None:
        """Believe a saturation point, keep it, or drop it."""
        was = self.saturation_answers
        surely = [place for place in known if place > best and self._is_throughput_declining(made, best, place)]
        self.saturation_answers = self.scout_max_answers = math.inf
        self.idle_gain_seconds = 0.0
        if now < self._doubted_until:
            return
        self._doubted_until = -math.inf
        if not surely:
            self._since = math.inf
            return
        first = next(place for place in range(best + 1, surely[0] + 1) if made[place] < 0.85 * made[best])
        good = first - 1
        if was == math.inf:
            if self.sample_count < _MIN_SAMPLES:
                return
            at, beyond = (
                self._mean_token_rate(lambda place: place <= good, now),
                self._mean_token_rate(lambda place: place > good, now),
            )
            if not 0.0 < beyond < at:
                return
            self._since, self._beyond_made, self._kept = now, beyond, good
        elif not self._is_saturation_confirmed(good, now):
            self._doubted_until = now + DOUBT_SECONDS
            self._since = math.inf
            return
        self.saturation_answers = self.scout_max_answers = float(SIZES[good])
        lost = (1 / made[place] - 1 / made[good] if place in known else 0.0 for place in range(first, len(SIZES)))
        self._beyond, self._gains = first, list(accumulate(lost, max, initial=0.0))[1:]
        self.idle_gain_seconds = self._gains[0]
        if now - max(self._seen_at[first:]) > TRUSTED_SECONDS:
            self.scout_max_answers = float(SIZES[first])

    def _is_throughput_declining(self, made: Sequence[float], best: int, place: int) -> bool:
        """Return whether surely fewer tokens per second are written in a bucket than in the best one."""
        decline = math.log(made[best] / made[place]) - _MIN_DECLINE
        if decline <= 0.0:
            return False
        variance = max(1.0, self._noise) * self._rate_filter.ratio_variance(best, place) + _FLOOR * _FLOOR
        return decline > (_SURE if self.saturation_answers == math.inf else _STILL_SURE) * math.sqrt(variance)

    def _is_saturation_confirmed(self, good: int, now: float) -> bool:
        """Return whether throughput at the saturation point is higher than it was beyond it, as far as answers show.

        The point is the highest since it was believed: it must not escape by moving down.
        """
        kept = self._kept = max(self._kept, good)
        beyond = self._mean_token_rate(lambda place: place > kept, now)
        if beyond:
            self._beyond_made = beyond
        at = self._mean_token_rate(lambda place: place <= kept, now, since=self._since, least=_NEAR * SIZES[good])
        return not at or at > self._beyond_made

    def _mean_token_rate(
        self, is_there: Callable[[int], bool], now: float, *, since: float = -math.inf, least: float = 0.0
    ) -> float:
        """Return the mean tokens per second of a decoder in some buckets, without any estimate; 0.0 if not known.

        Args:
            is_there: Whether a bucket is one of these.
            now: The time. Answers that ended long before do not count.
            since: Only answers count that began after this time.
            least: Only answers count whose decoders wrote this number at a time, on the average.
        """
        found: list[float] = []
        for spent, seconds, made, ended in reversed(self._witnesses):
            if ended < now - TRUSTED_SECONDS or ended < since or len(found) == _MAX_WITNESSES:
                break
            if ended - seconds < since:
                continue
            there = sum(each for place, each in spent if is_there(place))
            if there >= _MOSTLY * seconds and sum(_CENTERS[place] * each for place, each in spent) >= least * seconds:
                found.append(made)
        return sum(found) / len(found) if len(found) >= _ENOUGH_WITNESSES else 0.0

    # Exploration, and the fitted line

    def _choose_smaller_limit(self, known: Sequence[int], now: float) -> float:
        """Return how few answers one decoder should have because none has had this few lately; infinite: some have."""
        most = SIZES[known[-1]]
        least, enough = most / 2, most * 0.8
        if most < _MIN_SCOUTED or any(
            least <= SIZES[place] <= enough and now - self._seen_at[place] < TRUSTED_SECONDS for place in known
        ):
            return math.inf
        return int(0.7 * most)

    def _fit_line(self, known: Sequence[int]) -> None:
        """Fit the straight line by least squares. Each bucket counts as often as it was seen, up to a bound."""
        weights = [min(self._seconds_by_bucket[place], 50.0) for place in known]
        total = sum(weights)
        answers = [_CENTERS[place] for place in known]
        seconds = [1 / self.rates_by_bucket[place] for place in known]
        mean_answers = sum(map(float.__mul__, weights, answers)) / total
        mean_seconds = sum(map(float.__mul__, weights, seconds)) / total
        both = zip(weights, answers, seconds, strict=True)
        slope = sum(weight * (at - mean_answers) * (each - mean_seconds) for weight, at, each in both)
        spread = sum(weight * (at - mean_answers) ** 2 for weight, at in zip(weights, answers, strict=True))
        slope = max(slope / spread, _MIN_SLOPE * mean_seconds)
        self.step, self.slope = max(mean_seconds - slope * mean_answers, slope), slope
        self.is_line_fitted = True
