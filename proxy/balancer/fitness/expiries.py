"""Whether KV that a prefiller hands over is left to it until its lease expires, judged by its own counter. Pure.

vLLM's NixlConnector counts the requests whose KV it has freed because no decoder fetched it in time. Some of that this
gateway knows about: it has left KV behind itself, and a decoder that is known to fetch nothing explains what was handed
to it. What remains was handed over and lost: decoders do not come for it, or their
notice does not reach the prefiller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.balancer.fitness.handovers import LEAST_HANDOVERS, LEAST_SHARE, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping


class Totals(NamedTuple):
    """Counts since the prefiller or the workers started."""

    expired: float
    """Leases that ended without a decoder, as the prefiller counts them."""
    orphans: int
    """KV caches on it that this gateway has given up."""
    sent: Mapping[Any, int]
    """Hand-overs, by decoder."""


@dataclass(slots=True)
class ExpiryWatch:
    """What is known of one prefiller's leases since the last verdict."""

    _since: Totals | None = None
    _started: float | None = None
    """When the first hand-over was seen; None: there was none."""
    _sent_before: int = 0
    """Hand-overs in the window before this one, whose leases expire in this one."""

    def read(
        self, now: float, totals: Totals | None, fetch_nothing: Collection[Hashable], lease_seconds: float
    ) -> tuple[Verdict, int] | None:
        """Take a reading at `now`, in seconds; None if the engine tells nothing. `fetch_nothing`: decoders that are
        known not to fetch from this prefiller.

        COMPUTED, as soon as a good part of what was handed over was lost, with how many; TRANSFERRED, when two leases
        long less than that was. None: it is too early to say.
        """
        since = self._since
        if totals is None or since is None:
            self._begin(totals, 0)
            return None
        expired, orphans = totals.expired - since.expired, totals.orphans - since.orphans
        sent = {decoder: count - since.sent.get(decoder, 0) for decoder, count in totals.sent.items()}
        if min(expired, orphans, *sent.values()) < 0:  # it has started anew, or a worker died and its part is gone
            self._begin(totals, 0)
            return None
        explained = sum(count for decoder, count in sent.items() if decoder in fetch_nothing)
        doubtful = sum(sent.values()) - explained
        lost = round(expired) - max(orphans, explained)
        # More than was sent is what others have lost.
        if LEAST_HANDOVERS <= lost <= doubtful + self._sent_before and lost >= LEAST_SHARE * doubtful:
            self._begin(totals, doubtful)
            return Verdict.COMPUTED, lost
        if doubtful and self._started is None:
            self._started = now
        if doubtful < LEAST_HANDOVERS or self._started is None or now - self._started < 2 * lease_seconds:
            return None
        self._begin(totals, doubtful)
        return Verdict.TRANSFERRED, max(0, lost)

    def _begin(self, totals: Totals | None, sent_before: int) -> None:
        self._since, self._started, self._sent_before = totals, None, sent_before
