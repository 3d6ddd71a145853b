"""A Kalman filter in information form: the tokens per second of one answer, by the number of answers beside it.

Each answer that ended gives one equation: the sum over the buckets of rate × seconds is its number of tokens. Similar
answers under steady load all give nearly the same equation, so the equations alone often fit many curves. The prior
decides between these: the rate does not depend on the number of answers until the data show otherwise. The logarithm of
the rate is a random walk in the logarithm of that number.

The filter knows how uncertain the difference between two buckets is. Adding an answer costs a few multiplications per
pair of its buckets. Solving costs up to some milliseconds and is done at most once a second.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Variance of the prior's random walk for one unit of the logarithm of the number of answers.
_WALK_VARIANCE: Final = 1.0
# A rate stays above this part of the mean rate, as a linear filter might estimate a negative one.
_LEAST_RATE: Final = 0.02


class RateFilter:
    """The rates of all buckets. `sizes[i]`: the answers at a time in bucket i, greater than 0 and increasing."""

    def __init__(self, sizes: Sequence[float]) -> None:
        count = len(sizes)
        self.rates = [0.0] * count
        """Tokens per second of one answer, by bucket. All are 0.0 before the first answer."""
        self._distances = [math.log(sizes[place + 1] / sizes[place]) for place in range(count - 1)]
        self._information = [[0.0] * (place + 1) for place in range(count)]  # lower triangle
        self._target = [0.0] * count
        self._first, self._last = count, -1  # the range of buckets with data
        self._factor: list[list[float]] = []  # Cholesky factor of that range, as last solved
        self._solved_first = 0

    def begin(self, rate: float) -> None:
        """Start with this rate in all buckets, which only scales the first answers."""
        self.rates = [rate] * len(self.rates)

    def expected(self, spent: Sequence[tuple[int, float]]) -> float:
        """Return the tokens that an answer gets that spends these seconds in these buckets."""
        rates = self.rates
        return sum(rates[place] * seconds for place, seconds in spent)

    def add(self, spent: Sequence[tuple[int, float]], expected: float, ratio: float, weight: float) -> None:
        """Add an answer.

        Args:
            spent: Bucket and seconds, in the order of the buckets, for each bucket in which it spent time.
            expected: The tokens that were expected of it.
            ratio: The tokens that it got, as a multiple of these.
            weight: The inverse of the variance of `ratio`.
        """
        if not spent:
            return
        information, target = self._information, self._target
        for at, (place, seconds) in enumerate(spent):
            share = seconds / expected
            weighted = weight * share
            target[place] += weighted * ratio
            row = information[place]
            for other, its_seconds in spent[: at + 1]:
                row[other] += weighted * its_seconds / expected
        self._first = min(self._first, spent[0][0])
        self._last = max(self._last, spent[-1][0])

    def forget(self, kept: float) -> None:
        """Keep this part of all information."""
        for place in range(self._first, self._last + 1):
            self._target[place] *= kept
            self._information[place] = [kept * each for each in self._information[place]]

    def scale(self, factor: float) -> None:
        """All engines have become this many times as fast."""
        self.rates = [factor * rate for rate in self.rates]
        for place in range(self._first, self._last + 1):
            self._target[place] /= factor
            self._information[place] = [each / (factor * factor) for each in self._information[place]]

    def solve(self) -> None:
        """Take all answers into the rates. Buckets outside the range that was seen have the rate of its nearest end."""
        first, last = self._first, self._last
        if last < first:
            return
        self._factor, self._solved_first = self._factored(), first
        solution = self._back(self._forward(self._target[first : last + 1]))
        least = _LEAST_RATE * sum(solution) / len(solution)
        if least <= 0.0:
            return  # nonsense in, nonsense out: keep the rates before
        rates = [max(least, rate) for rate in solution]
        self.rates = [rates[0]] * first + rates + [rates[-1]] * (len(self.rates) - last - 1)

    def variance(self, one: int, other: int) -> float:
        """Return the variance of the logarithm of the ratio of two buckets' rates; infinite outside the range seen."""
        first, count = self._solved_first, len(self._factor)
        if not (first <= one < first + count and first <= other < first + count):
            return math.inf
        gradient = [0.0] * count
        gradient[one - first] = 1 / self.rates[one]
        gradient[other - first] -= 1 / self.rates[other]
        return sum(each * each for each in self._forward(gradient))

    def _factored(self) -> list[list[float]]:
        """Return the Cholesky factor of the data's information plus the prior's, for the range with data."""
        first, last, rates = self._first, self._last, self.rates
        count = last - first + 1
        matrix = [self._information[first + at][first : first + at + 1] for at in range(count)]
        for at in range(count - 1):
            place = first + at
            precision = 1 / (_WALK_VARIANCE * self._distances[place] * rates[place] * rates[place + 1])
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

    def _forward(self, values: Sequence[float]) -> list[float]:
        """Solve factor · x = values."""
        solution: list[float] = []
        for row, value in zip(self._factor, values, strict=True):
            rest = value
            for at, each in enumerate(solution):
                rest -= row[at] * each
            solution.append(rest / row[-1])
        return solution

    def _back(self, values: Sequence[float]) -> list[float]:
        """Solve transposed factor · x = values."""
        solution = list(values)
        for at in range(len(solution) - 1, -1, -1):
            row = self._factor[at]
            solution[at] /= row[-1]
            for other in range(at):
                solution[other] -= row[other] * solution[at]
        return solution
