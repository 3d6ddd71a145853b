"""Harm to running answers: how much they slow down while their decoder computes a prompt.

Each ended answer shows the share of its time in which its decoder computed prompts, and the share of its expected
tokens that it missed. The slope between both is the harm: 1.0 if running answers stop meanwhile, and 0.0 if they go on
as before. Answers are compared with others beside the same number of answers, because the load changes both shares.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

# Each answer makes the older ones count less by this factor: some 500 of them count.
_KEPT: Final = 1 - 1 / 500
# Weight of a new answer in the means of its bucket.
_MEAN_STEP: Final = 1 / 100
# Minimum number of answers for a slope.
_MIN_ANSWERS: Final = 32.0
# Maximum standard deviation of the slope. One deviation is added to it, so that errors favour the running answers.
_MAX_DEVIATION: Final = 0.15


class AppendHarm:
    """Harm to running answers as one worker has learned it, the same for all decoders."""

    __slots__ = ("harm_per_second", "_answer_weight", "_means_by_bucket", "_sum_xx", "_sum_xy", "_sum_yy")

    def __init__(self) -> None:
        self.harm_per_second: float | None = None
        """Seconds that a running answer loses for each second of a prompt, at most 1.0. None: not known yet."""
        self._means_by_bucket: dict[int, tuple[float, float, float]] = {}
        """Answers, and the means of both shares, by bucket of numbers of answers."""
        self._answer_weight = self._sum_xx = self._sum_xy = self._sum_yy = (
            0.0  # sums over answers, around the means of their buckets
        )

    def learn_from_answer(self, bucket: int, computing_share: float, missed_share: float) -> None:
        """Learn from an answer that ended.

        Args:
            bucket: Bucket of the number of answers beside it.
            computing_share: Share of its time in which its decoder computed prompts.
            missed_share: Share of its expected tokens that it missed. Negative: it got more.
        """
        count, mean_x, mean_y = self._means_by_bucket.get(bucket, (0.0, 0.0, 0.0))
        x, y = computing_share - mean_x, missed_share - mean_y
        step = max(_MEAN_STEP, 1 / (count + 1))
        self._means_by_bucket[bucket] = count + 1, mean_x + step * x, mean_y + step * y
        if not count:
            return
        weight = 1 - step
        self._answer_weight = _KEPT * self._answer_weight + 1
        self._sum_xx = _KEPT * self._sum_xx + weight * x * x
        self._sum_xy = _KEPT * self._sum_xy + weight * x * y
        self._sum_yy = _KEPT * self._sum_yy + weight * y * y
        self._fit_harm()

    def _fit_harm(self) -> None:
        self.harm_per_second = None
        if self._answer_weight < _MIN_ANSWERS or self._sum_xx <= 0.0:
            return
        slope = self._sum_xy / self._sum_xx
        deviation = sqrt(max(0.0, self._sum_yy - slope * self._sum_xy) / (self._answer_weight - 2) / self._sum_xx)
        if deviation <= _MAX_DEVIATION:
            self.harm_per_second = max(0.0, min(1.0, slope + deviation))
