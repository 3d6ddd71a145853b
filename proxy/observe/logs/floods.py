"""Limits for similar lines: the decision which lines are left out.

Each kind of line has a token bucket: a burst passes, and then a fixed number per second. Lines that are left out are
counted, and the number is logged.
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
    """Lines that differ only in their arguments."""

    logger: str
    level: int
    message: str
    """The message without arguments.

    Libraries may compose messages, so their lines have the place in the code instead.
    """
    term: str = ""
    code: int | None = None


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float
    untold: int = 0
    """Number of lines left out since the number was last logged."""
    untold_since: float = 0.0


class Floods:
    """The token buckets, one per kind. There must be few kinds, because each bucket stays in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[LineKind, _Bucket] = {}
        self.suppressed = 0
        """Total number of lines left out."""

    def admits(self, kind: LineKind) -> bool:
        """Return whether one more line of this kind may be written now."""
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
        """Return how many lines of this kind were left out since the last call."""
        bucket = self._buckets[kind]
        untold, bucket.untold = bucket.untold, 0
        return untold

    def overdue(self) -> Iterator[LineKind]:
        """Return the kinds whose numbers are due: lines were left out a while ago, and no line has come since."""
        told_by = self._clock() - _TELL_AFTER_SECONDS
        return (kind for kind, bucket in self._buckets.items() if bucket.untold and bucket.untold_since <= told_by)
