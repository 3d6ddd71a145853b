"""Which lines are left out because too many like them came at once.

Each kind of line has a bucket of tokens: a burst passes, then a fixed number per second. What is left out is counted
and told.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BURST_LINES: Final = 20
LINES_PER_SECOND: Final = 5.0
_TELL_AFTER_SECONDS: Final = 1.0


class LineKind(NamedTuple):
    """Lines that differ only in what is filled in."""

    logger: str
    level: int
    message: str
    """With nothing filled in. Libraries may compose one for each line: theirs is the place in the code instead."""
    term: str = ""
    code: int | None = None


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float
    untold: int = 0
    """Lines left out since it was last told how many were."""
    untold_since: float = 0.0


class Floods:
    """The buckets, one per kind. There must be few kinds: each is kept for ever."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[LineKind, _Bucket] = {}
        self.suppressed = 0
        """Lines left out so far."""

    def admits(self, kind: LineKind) -> bool:
        """Whether one more line of this kind may be written now."""
        now = self._clock()
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = _Bucket(BURST_LINES, now)
        bucket.tokens = min(BURST_LINES, bucket.tokens + (now - bucket.filled_at) * LINES_PER_SECOND)
        bucket.filled_at = now
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return True
        if not bucket.untold:
            bucket.untold_since = now
        bucket.untold += 1
        self.suppressed += 1
        return False

    def tell(self, kind: LineKind) -> int:
        """How many lines of this kind were left out since this was last asked."""
        bucket = self._buckets[kind]
        untold, bucket.untold = bucket.untold, 0
        return untold

    def overdue(self) -> Iterator[LineKind]:
        """The kinds of which lines were left out a while ago, and none that could have told of it came since."""
        told_by = self._clock() - _TELL_AFTER_SECONDS
        return (kind for kind, bucket in self._buckets.items() if bucket.untold and bucket.untold_since <= told_by)
