"""The quarantine of pairs: prefillers and decoders between which hand-overs fail are kept apart for a while.

When a decoder cannot fetch the KV cache it may be the decoder's fault, the prefiller's, or that of what lies between
them, and the decoder's error does not say whose. So a failed hand-over counts against the pair first. A pair is kept
apart after fewer failures (2) than eject a backend (5): where only the way between two is bad, they are parted before
either is blamed, and both go on with others. A bad prefiller fails with one decoder after the other, two failures each
and a success with another prefiller in between, so it ends up apart from all of them and none of them is ejected.

It is advice, not a verdict: a pair that is kept apart is used where no other is left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.settings import HealthChecks

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.common.backend import Backend

_LONGEST: Final = 10  # times `seconds`
_DEFAULT_CHECKS: Final = HealthChecks()
_NOBODY: Final[frozenset[Backend]] = frozenset()


@dataclass(slots=True, eq=False)
class _Pair:
    failures: int = 0  # hand-overs in a row
    quarantines: int = 0  # in a row
    until: float = 0.0


class PairQuarantine:
    """The pairs as one worker sees them.

    A pair is quarantined after `quarantine_after` failed handoffs in a row for `quarantine_seconds`, at the next
    failure after that for twice as long, and so on up to ten times.
    """

    def __init__(
        self, checks: Callable[[], HealthChecks] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`checks`: returns the settings of now."""
        self._checks = checks or (lambda: _DEFAULT_CHECKS)
        self._clock = clock
        self._pairs: dict[tuple[Backend, Backend], _Pair] = {}  # those that failed since their last success
        self.apart: dict[Backend, dict[Backend, float]] = {}
        """The partners quarantined with each, until when; empty while no pair ever was."""

    def failed(self, prefiller: Backend, decoder: Backend) -> bool:
        """A hand-over failed; whether the pair is quarantined now because of it."""
        pair = self._pairs.setdefault((prefiller, decoder), _Pair())
        pair.failures += 1
        now = self._clock()
        checks = self._checks()
        if pair.failures < checks.quarantine_after or now < pair.until:
            return False
        pair.quarantines = min(pair.quarantines + 1, _LONGEST)
        pair.until = now + pair.quarantines * checks.quarantine_seconds
        self.apart.setdefault(prefiller, {})[decoder] = pair.until
        self.apart.setdefault(decoder, {})[prefiller] = pair.until
        return True

    def succeeded(self, prefiller: Backend, decoder: Backend) -> None:
        """A hand-over went well, which clears the pair."""
        if self._pairs:
            self._clear(prefiller, decoder)

    def partners_to_avoid(self, backend: Backend) -> frozenset[Backend]:
        """The partners that are quarantined with it now. Costs one look-up while there are none."""
        partners = self.apart.get(backend)
        if not partners:
            return _NOBODY
        now = self._clock()
        return frozenset(partner for partner, until in partners.items() if now < until)

    def forget(self, backend: Backend) -> None:
        """Drop what is known about a backend that has left."""
        for prefiller, decoder in [pair for pair in self._pairs if backend in pair]:
            self._clear(prefiller, decoder)

    def _clear(self, prefiller: Backend, decoder: Backend) -> None:
        pair = self._pairs.pop((prefiller, decoder), None)
        if pair is not None and pair.quarantines:
            del self.apart[prefiller][decoder]
            del self.apart[decoder][prefiller]
