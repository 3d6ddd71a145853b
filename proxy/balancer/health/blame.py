"""Whose fault the failures of one client's request were: the engines', or its own.

A request that breaks down on one engine and is served by another tells something about the first one. One that breaks
down the same way on two engines tells nothing about either: what they have in common is the request. So no
failure is held against an engine before it is known how the request fared elsewhere, and requests that fail everywhere
eject no engine.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from proxy.balancer.shared.memory import SharedValue
from proxy.common.errors import Failure
from proxy.settings import HealthChecks
from proxy.wire.document import length_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from proxy.common.backend import Backend, Role
    from proxy.common.errors import UpstreamError
    from proxy.wire.document import Body

    FailedEngines = dict[tuple[Role, bool], set[Backend]]
    """Where a request has broken down, by role, and by whether engines said so or broke off."""


_EVERYWHERE: Final = 2


class Blame:
    """The blame of one unit of a request; `ways` is shared by all its units. `with` it, outside of all leases."""

    __slots__ = ("_errors", "_ways")

    def __init__(self, ways: FailedEngines | None = None) -> None:
        self._ways: FailedEngines = {} if ways is None else ways
        self._errors: list[UpstreamError] = []

    @property
    def is_open(self) -> bool:
        """Whether something is to be settled."""
        return bool(self._errors)

    def failed(self, error: UpstreamError) -> None:
        """An attempt failed."""
        if error.is_breakdown:
            self._errors.append(error)
            self._ways.setdefault(_way(error), set()).add(error.backend)

    def settle(self) -> None:
        """It is known how the request fares elsewhere, or that it goes nowhere else: tell the balancer who is to
        blame.
        """
        for error in self._errors:
            tell, error.blame = error.blame, None
            if tell is not None and len(self._ways[_way(error)]) < _EVERYWHERE:
                tell()
        self._errors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._errors:
            self.settle()


def _way(error: UpstreamError) -> tuple[Role, bool]:
    return error.backend.role, error.failure is Failure.STATUS


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


_MOST: Final = 256
"""Requests remembered at a time; the oldest is dropped for one more."""
_ENTRY_BYTES: Final = 128
_DIGEST_BYTES: Final = 16

# Length and digest of the request, clock time until which it is remembered, engines that it has cost.
_Entry = tuple[int, str, float, int]


class SuspectMemory:
    """Make it before forking. `clock` is the system's monotonic one, which all workers share, except in tests."""

    def __init__(self, seconds: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._key = os.urandom(32)
        self._shared = SharedValue("memory of suspects", _MOST * _ENTRY_BYTES)
        with self._shared.exclusive():
            self._shared.write([])
        self._head = self._shared.head
        self._version = 0
        self._entries: list[_Entry] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compare a request with. Nearly free."""
        if self._head[0] != self._version:
            self._version, entries = self._shared.read()
            self._entries = [(length, digest, until, engines) for length, digest, until, engines in entries]
        return not self._entries

    def engines(self, body: Body) -> int:
        """How many engines this request has cost lately."""
        if self.is_empty:
            return 0
        now = self._clock()
        # Without the digest of a large body, as long as no other is of its length.
        alike = [entry for entry in self._entries if entry[0] == length_of(body) and entry[2] > now]
        digest = self._digest(body) if alike else ""
        return next((engines for _, known, _, engines in alike if known == digest), 0)

    def remember(self, body: Body, engines: int) -> None:
        """A request has cost `engines` engines. This is forgotten after a while, however often it is looked up until
        then.
        """
        self._replace(body, engines)

    def forget(self, body: Body) -> None:
        """The request was served, so it was not to blame."""
        if self.engines(body):
            self._replace(body, 0)

    def _replace(self, body: Body, engines: int) -> None:
        digest, now = self._digest(body), self._clock()
        with self._shared.exclusive():
            _, entries = self._shared.read()
            kept = [entry for entry in entries if entry[2] > now and (entry[0], entry[1]) != (length_of(body), digest)]
            if engines:
                kept.append((length_of(body), digest, now + self._seconds, engines))
            self._shared.write(kept[-_MOST:])

    def _digest(self, body: Body) -> str:
        digest = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES)
        for piece in pieces_of(body):
            digest.update(piece)
        return digest.hexdigest()
