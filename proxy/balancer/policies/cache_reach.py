"""How far back a prefix cache reaches, learned from the ages at which answers found prefixes or missed them.

The age of a prefix is the number of tokens that its engine has computed since the prefix was last used. A cache that
evicts the least recently used blocks finds nearly everything up to some age and nearly nothing beyond it. Misses with
another cause (coarse blocks, a chat template that renders history differently, two equal prompts at the same time) come
at every age. So a reach is believed only while it explains the misses: many more prefixes must be found below it than
beyond it. Otherwise there is none.
"""

from __future__ import annotations

from math import log, log2, sqrt
from typing import Final

_LEAST_TOKENS: Final = 32_768
_BUCKETS_PER_DOUBLING: Final = 4
_BUCKETS: Final = 45
"""The last one begins at 64 million tokens."""
_BOUNDS: Final = tuple(_LEAST_TOKENS * 2 ** (bucket / _BUCKETS_PER_DOUBLING) for bucket in range(_BUCKETS))
# Each observation makes the older ones count less by this factor: some 300 of them count.
_FORGETTING: Final = 1 / 300
_MAX_WEIGHT: Final = 1e6
# The reach is computed again after this number of observations.
_FIT_EVERY: Final = 8
# A reach must explain the misses better than none does by this logarithm of the odds.
_PROOF: Final = 6.0
# A proven reach is kept until its proof is weaker than this.
_DOUBT: Final = 3.0
# It takes this number of misses beyond it.
_MISSES: Final = 5.0
# Beyond a reach at most this share is found of what is found below it.
_MAX_FOUND_BEYOND: Final = 0.4
# A prefix that is found at an age of more than this number of reaches makes the misses below it count less.
_SURELY_BEYOND: Final = 1.5
_REFUTED: Final = 0.9


class CacheReach:
    """What the answers of one backend say of its cache."""

    __slots__ = ("tokens", "_found", "_missed", "_unfitted", "_weight")

    def __init__(self) -> None:
        self.tokens: float | None = None
        """The age up to which prefixes are found. None: no reach explains the misses."""
        self._found = [0.0] * _BUCKETS
        self._missed = [0.0] * _BUCKETS
        self._weight = 1.0  # of the next observation, which grows instead of all older ones shrinking
        self._unfitted = 0

    def note(self, found_age: float | None, missed_age: float | None) -> None:
        """Take in one answer: the greatest age of a prefix that was found, and the least age of one that was not.

        None: there was no such prefix.
        """
        if found_age is not None:
            bucket = _bucket(found_age)
            self._found[bucket] += self._weight
            if self.tokens is not None and found_age > _SURELY_BEYOND * self.tokens:
                for below in range(_bucket(self.tokens), bucket):
                    self._missed[below] *= _REFUTED
        if missed_age is not None:
            self._missed[_bucket(missed_age)] += self._weight
        self._weight /= 1 - _FORGETTING
        self._unfitted += 1
        if self._unfitted >= _FIT_EVERY:
            self._fit()

    @property
    def longest_found(self) -> float:
        """The greatest age at which a prefix was found lately, to the precision of the buckets; 0: none was."""
        least = 0.5 * self._weight
        for bucket in range(_BUCKETS - 1, -1, -1):
            if self._found[bucket] >= least:
                return _BOUNDS[bucket]
        return 0.0

    def _fit(self) -> None:
        self._unfitted = 0
        if self._weight > _MAX_WEIGHT:
            self._found = [weight / self._weight for weight in self._found]
            self._missed = [weight / self._weight for weight in self._missed]
            self._weight = 1.0
        found_beyond, missed_beyond = sum(self._found), sum(self._missed)
        none = _log_likelihood(found_beyond, missed_beyond)
        best, gain = None, (_PROOF if self.tokens is None else _DOUBT) * self._weight
        found = missed = 0.0
        for bucket in range(_BUCKETS - 1):
            found += self._found[bucket]
            missed += self._missed[bucket]
            found_beyond -= self._found[bucket]
            missed_beyond -= self._missed[bucket]
            if missed_beyond < _MISSES * self._weight:
                break
            if found_beyond * (found + missed) > _MAX_FOUND_BEYOND * found * (found_beyond + missed_beyond):
                continue
            gained = _log_likelihood(found, missed) + _log_likelihood(found_beyond, missed_beyond) - none
            if gained > gain:
                best, gain = bucket, gained
        self.tokens = None if best is None else self._boundary(best)

    def _boundary(self, bucket: int) -> float:
        """The age between this bucket, in which prefixes are still found, and the first one with misses behind it."""
        beyond = bucket + 1
        while beyond < _BUCKETS - 1 and not self._missed[beyond]:
            beyond += 1
        return sqrt(_BOUNDS[bucket + 1] * _BOUNDS[beyond])


def _bucket(age: float) -> int:
    if age < _LEAST_TOKENS:
        return 0
    return min(_BUCKETS - 1, int(_BUCKETS_PER_DOUBLING * log2(age / _LEAST_TOKENS)))


def _log_likelihood(found: float, missed: float) -> float:
    """The logarithm of how likely so many of each are where their shares are the true ones."""
    total = found + missed
    likelihood = found * log(found / total) if found > 1e-9 else 0.0
    return likelihood + (missed * log(missed / total) if missed > 1e-9 else 0.0)
