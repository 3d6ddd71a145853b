"""Attribution of failures: to an engine, to a pair of engines, or to the request.

If a request breaks down on one engine and another engine serves it, the first engine is the likely cause. If it breaks
down in the same way on two engines, the request is the likely cause. So pdproxy charges a failure to an engine only
after the outcome on another engine is known, and a request that fails on every engine ejects none of them.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from proxy.balancer.shared.memory import SharedValue
from proxy.common.errors import Failure
from proxy.settings import HealthChecks
from proxy.wire.document import body_length, body_pieces

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from proxy.common.backend import Backend, Role
    from proxy.common.errors import UpstreamError
    from proxy.wire.document import Body

    FailedEngines = dict[tuple[Role, bool], set[Backend]]
    """Engines on which a request has broken down, by role and by whether the engine reported the failure."""


_MIN_ENGINES_TO_BLAME_REQUEST: Final = 2
"""If at least this many engines break down in the same way, the request is the cause."""


class FailureBlame:
    """Collects the failures of one unit of a request and charges them when its outcome is known.

    A context manager, entered outside of all leases. Leaving it settles the failures.

    Args:
        failed_engines: Engines on which the request has broken down. All units of a request share it. None: the unit is
            alone.
    """

    def __init__(self, failed_engines: FailedEngines | None = None) -> None:
        self._failed_engines: FailedEngines = {} if failed_engines is None else failed_engines
        self._unsettled_errors: list[UpstreamError] = []

    @property
    def has_unsettled_failures(self) -> bool:
        """Return whether a request's failures are not settled yet."""
        return bool(self._unsettled_errors)

    def record_failure(self, error: UpstreamError) -> None:
        """Record the failure of an attempt, for a later decision on its cause."""
        if error.is_engine_breakdown:
            self._unsettled_errors.append(error)
            self._failed_engines.setdefault(_failure_kind_of(error), set()).add(error.backend)

    def settle_failures(self) -> None:
        """Charge the failures to their engines, except those that the request caused on several engines."""
        for error in self._unsettled_errors:
            charge, error.blame = error.blame, None
            if (
                charge is not None
                and len(self._failed_engines[_failure_kind_of(error)]) < _MIN_ENGINES_TO_BLAME_REQUEST
            ):
                charge()
        self._unsettled_errors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsettled_errors:
            self.settle_failures()


def _failure_kind_of(error: UpstreamError) -> tuple[Role, bool]:
    return error.backend.role, error.failure is Failure.STATUS


_MAX_FACTOR: Final = 10
"""The longest quarantine, as a multiple of `quarantine_seconds`."""
_DEFAULT_CHECKS: Final = HealthChecks()
_NO_PARTNERS: Final[frozenset[Backend]] = frozenset()


@dataclass(slots=True, eq=False)
class _QuarantinedPair:
    failure_count: int = 0  # consecutive failed handoffs
    quarantine_count: int = 0  # consecutive
    quarantined_until: float = 0.0


class PairQuarantine:
    """Keeps prefillers and decoders apart between which handoffs fail, as one worker sees them.

    A decoder that cannot fetch KV does not report whether itself, the prefiller or the network between them is at
    fault. So a failed handoff counts against the pair first. A pair is quarantined after fewer failures (2) than eject
    a backend (5): if only the network between the two is bad, they are separated before either is ejected. A bad
    prefiller fails with one decoder after the other, so in the end it is quarantined from all of them and no decoder is
    ejected.

    The quarantine is advice: the pair is used if no other is available. It starts after `quarantine_after` consecutive
    failures. The n-th quarantine in a row lasts n times `quarantine_seconds`, up to ten times.
    """

    def __init__(
        self, checks: Callable[[], HealthChecks] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a quarantine without pairs.

        Args:
            checks: Returns the current settings. None: the defaults.
            clock: Returns monotonic seconds.
        """
        self._get_health_checks = checks or (lambda: _DEFAULT_CHECKS)
        self._clock = clock
        self._pairs: dict[tuple[Backend, Backend], _QuarantinedPair] = {}  # pairs with failures since the last success
        self.quarantined_partners: dict[Backend, dict[Backend, float]] = {}
        """Quarantined partners of a backend with the end of their quarantine. Empty until the first quarantine."""

    def record_failed_handoff(self, prefiller: Backend, decoder: Backend) -> bool:
        """Record a failed handoff, and return whether it starts a quarantine of the pair."""
        pair = self._pairs.setdefault((prefiller, decoder), _QuarantinedPair())
        pair.failure_count += 1
        now = self._clock()
        checks = self._get_health_checks()
        if pair.failure_count < checks.quarantine_after or now < pair.quarantined_until:
            return False
        pair.quarantine_count = min(pair.quarantine_count + 1, _MAX_FACTOR)
        pair.quarantined_until = now + pair.quarantine_count * checks.quarantine_seconds
        self.quarantined_partners.setdefault(prefiller, {})[decoder] = pair.quarantined_until
        self.quarantined_partners.setdefault(decoder, {})[prefiller] = pair.quarantined_until
        return True

    def record_successful_handoff(self, prefiller: Backend, decoder: Backend) -> None:
        """Record a successful handoff, which clears the pair."""
        if self._pairs:
            self._clear_pair(prefiller, decoder)

    def partners_to_avoid(self, backend: Backend) -> frozenset[Backend]:
        """Return the partners that are quarantined with a backend. Costs one lookup if there are none."""
        partners = self.quarantined_partners.get(backend)
        if not partners:
            return _NO_PARTNERS
        now = self._clock()
        return frozenset(partner for partner, until in partners.items() if now < until)

    def forget_backend(self, backend: Backend) -> None:
        """Drop the failures of a backend that has left."""
        for prefiller, decoder in [pair for pair in self._pairs if backend in pair]:
            self._clear_pair(prefiller, decoder)

    def _clear_pair(self, prefiller: Backend, decoder: Backend) -> None:
        pair = self._pairs.pop((prefiller, decoder), None)
        if pair is not None and pair.quarantine_count:
            del self.quarantined_partners[prefiller][decoder]
            del self.quarantined_partners[decoder][prefiller]


_MAX_REQUESTS: Final = 256
"""Maximum number of remembered requests. The oldest is dropped for another one."""
_ENTRY_BYTES: Final = 128
_DIGEST_BYTES: Final = 16


class SuspectMemory:
    """Remembers requests under which engines went down, for all workers.

    A client that sends such a request again finds it remembered. Only a keyed digest of the request is kept, and the
    key exists in memory only. Create it before forking.

    Args:
        seconds: Time for which a request is remembered.
        clock: The monotonic clock of the system, which all workers share, except in tests.
    """

    def __init__(self, seconds: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory_seconds = seconds
        self._clock = clock
        self._hash_key = os.urandom(32)
        # Entries of length and digest of the request, end of its memory on the clock, and number of engines.
        self._shared_value = SharedValue("memory of suspects", _MAX_REQUESTS * _ENTRY_BYTES)
        with self._shared_value.hold_writer_lock():
            self._shared_value.write_value([])
        # Each request reads `is_empty`, so it must run in compiled code only while nothing changes.
        self._version_cells = self._shared_value.head_cells
        self._read_version = 0
        self._entries: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """Whether no suspect request is remembered."""
        if self._version_cells[0] != self._read_version:
            self._read_version, self._entries = self._shared_value.read_version_and_value()
        return not self._entries

    def count_crashed_engines(self, body: Body) -> int:
        """Return the number of engines that went down under this request recently."""
        if self.is_empty:
            return 0
        now = self._clock()
        # The digest of a large body is only computed if a remembered request has the same length.
        alike = [entry for entry in self._entries if entry[0] == body_length(body) and entry[2] > now]
        digest = self._digest_of_body(body) if alike else ""
        return next((engines for _, known, _, engines in alike if known == digest), 0)

    def remember_request(self, body: Body, engine_count: int) -> None:
        """Record that `engine_count` engines went down under a request. 0: forget the request.

        Lookups do not prolong the memory of it.
        """
        digest, now = self._digest_of_body(body), self._clock()
        with self._shared_value.hold_writer_lock():
            kept = [
                entry
                for entry in self._shared_value.current_value
                if entry[2] > now and (entry[0], entry[1]) != (body_length(body), digest)
            ]
            if engine_count:
                kept.append([body_length(body), digest, now + self._memory_seconds, engine_count])
            self._shared_value.write_value(kept[-_MAX_REQUESTS:])

    def forget_request(self, body: Body) -> None:
        """Drop a request that was served, because it was not the cause."""
        if self.count_crashed_engines(body):
            self.remember_request(body, 0)

    def _digest_of_body(self, body: Body) -> str:
        digest = hashlib.blake2b(key=self._hash_key, digest_size=_DIGEST_BYTES)
        for piece in body_pieces(body):
            digest.update(piece)
        return digest.hexdigest()
