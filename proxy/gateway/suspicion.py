"""Decides whether a client request crashes engines.

A request can crash an engine. If it is then repeated or resumed, it crashes one engine after the other. So each client
request has one Suspicion for all its units, and may crash two engines at most.

Most requests on a crashed engine are innocent. A request is cleared if the next engine serves it for longer than the
crashed one did. Suspects run on separate engines (see `suspects`), so that the next crash shows which one is the cause.

Engines may also crash one after the other for another reason, such as a power failure, and the same request may be on
two of them by chance. But then other engines crash, too. A crash that no suspect explains acquits the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from proxy.balancer.blame import FailedEngines
    from proxy.common.backend import Backend, Role
    from proxy.dialects.call import Call

MAX_ENGINES: Final = 2
"""How many engines a client request may crash."""

# A suspect is cleared after the next engine has served it for 1 s and twice the time of the crashed engine, 30 s at
# most. A resumed answer begins where it broke off, so a request that crashes engines does so soon again.
_CLEARING_FACTOR: Final = 2.0
_CLEARING_SECONDS: Final = 1.0
_MAX_CLEARING_SECONDS: Final = 30.0
# A suspect has its engine for itself for a shorter time, because other suspects wait for the engine.
_APART_SECONDS: Final = 0.25
_MAX_APART_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class UnitHistory:
    """The attempts of one unit. Times are in clock seconds."""

    attempt_began_at: float | None = None
    """Time of the first output of the present attempt. None: no output yet."""
    lost_engines: dict[Backend, float] = field(default_factory=dict)
    """Engines that crashed while they served the unit, with the seconds of output."""
    doubtful_engines: dict[Backend, float] = field(default_factory=dict)
    """Engines that closed the connection and were up a moment later, with the seconds of output."""
    reserved_backends: list[Backend] = field(default_factory=list)
    """Engines that are reserved for the unit, so that it is their only suspect."""

    def seconds_of_output(self, now: float) -> float:
        """Return the seconds since the first output of the present attempt, or 0."""
        return 0.0 if self.attempt_began_at is None else now - self.attempt_began_at

    def has_run_long_enough(self, now: float) -> bool:
        """Return whether the present attempt has run for so long that the unit did not crash its earlier engines."""
        if self.attempt_began_at is None:
            return False
        longest = max(self.lost_engines.values(), default=0.0)
        needed = min(_CLEARING_FACTOR * longest + _CLEARING_SECONDS, _MAX_CLEARING_SECONDS)
        return now - self.attempt_began_at > needed

    @property
    def isolation_seconds(self) -> float:
        """The time after the first output in which no other suspect may share the engine."""
        longest = max((*self.lost_engines.values(), *self.doubtful_engines.values()), default=0.0)
        return min(_CLEARING_FACTOR * longest + _APART_SECONDS, _MAX_APART_SECONDS) if longest else 0.0


class Suspicion:
    """The suspicion that one client request crashes engines."""

    def __init__(self, earlier_crashes: int = 0, *, is_split: bool = False, call: Call | None = None) -> None:
        """Begin without any crash, except for `earlier_crashes`.

        Args:
            earlier_crashes: The number of engines that the same request has crashed when it was sent before.
            is_split: Whether the request has several units.
            call: The client request. None: only in tests.
        """
        self.earlier_crashes = earlier_crashes
        self.client_call = call
        self.is_convicted = False
        """Whether the request is stopped, because it crashes engines."""
        self.unit_histories: list[UnitHistory] = []
        """The histories of the units."""
        self.failed_engines: FailedEngines = {}
        """The engines that failed in attempts of the request, see FailureBlame."""
        self.reserved_backends: list[Backend] = []
        """The other engines of the subset, reserved after one of them has crashed."""
        self.are_units_confined = is_split
        """Whether the units stay on few engines. Units run at the same time. Otherwise one request could crash an
        engine with each unit before the first failure is reported."""
        self._subsets_by_role: dict[Role, list[Backend]] = {}
        """The engines that a confined request may use, by role."""

    def add_unit(self) -> UnitHistory:
        """Return the crash history of another unit of the request."""
        history = UnitHistory()
        self.unit_histories.append(history)
        return history

    def crashed_engines(self, now: float) -> set[Backend]:
        """Return the engines that the request may have crashed. `now`: clock time."""
        return {
            backend
            for history in self.unit_histories
            if not history.has_run_long_enough(now)
            for backend in history.lost_engines
        }

    def count_crashed_engines(self, now: float) -> int:
        """Return how many engines the request may have crashed, `earlier_crashes` included. `now`: clock time."""
        return self.earlier_crashes + len(self.crashed_engines(now))

    def clear_of_crashes(self) -> None:
        """Clear the request of all engine crashes so far."""
        self.earlier_crashes = 0
        for history in self.unit_histories:
            history.lost_engines.clear()

    @property
    def has_broken_down(self) -> bool:
        """Whether an engine has failed while it served a unit."""
        return any(history.lost_engines or history.doubtful_engines for history in self.unit_histories)

    def clear_served_unit(self, history: UnitHistory) -> None:
        """Clear a unit that has its whole answer. The other units may now use all engines."""
        history.lost_engines.clear()
        history.doubtful_engines.clear()
        self.are_units_confined = False
        self._subsets_by_role.clear()

    @property
    def affects_engine_choice(self) -> bool:
        """Whether the choice of engines for the units matters."""
        if self.are_units_confined or self.earlier_crashes > 0:
            return True
        for history in self.unit_histories:  # noqa: SIM110 - each request asks, and a generator costs as much as all else
            if history.lost_engines:
                return True
        return False

    def engines_for_units(self, role: Role, eligible_backends: Collection[Backend]) -> list[Backend]:
        """Return the engines of one role that the units may use. The caller adds engines to the list.

        A failed engine keeps its place, so that no other engine is put at risk.
        """
        broken = {
            backend for history in self.unit_histories for backend in (*history.lost_engines, *history.doubtful_engines)
        }
        subset = [
            backend
            for backend in self._subsets_by_role.get(role, ())
            if backend in eligible_backends or backend in broken
        ]
        self._subsets_by_role[role] = subset
        return subset

    def rest_of_subset(self, backend: Backend) -> list[Backend]:
        """Return the other engines of the subset that contains this one."""
        return [other for other in self._subsets_by_role.get(backend.role, ()) if other != backend]

    def drop_subset(self, role: Role) -> set[Backend]:
        """Forget and return the subset of a role, so that other engines are chosen."""
        return set(self._subsets_by_role.pop(role, ()))


@dataclass(slots=True, eq=False)
class Casualty:
    """One unit that was on an engine when the engine failed."""

    suspicion: Suspicion
    """The suspicion of the client request."""
    suspicion_rank: int
    """2: the unit was the only suspect on the engine. 1: it was one of several suspects. 0: it was no suspect."""
    seconds_of_output: float
    """Seconds since the first output of the unit, or 0."""


def suspicion_rank_of(suspicion: Suspicion, unit_history: UnitHistory, backend: Backend, now: float) -> int:
    """Return the rank of a unit on a failed engine. See Casualty."""
    if not suspicion.count_crashed_engines(now):
        return 0
    return 2 if backend in unit_history.reserved_backends or backend in suspicion.reserved_backends else 1


def is_charged(casualty: Casualty, casualties: Iterable[Casualty], max_charged: int) -> bool:
    """Return whether the crash of an engine counts against one of its units.

    It counts against the units of the highest rank only, and of these against the `max_charged` units that began last.
    An engine seldom crashes because of a unit that it has served for long.
    """
    alike = [other for other in casualties if other.suspicion_rank >= casualty.suspicion_rank]
    if any(other.suspicion_rank > casualty.suspicion_rank for other in alike):
        return False
    fresher = sum(other.seconds_of_output < casualty.seconds_of_output for other in alike)
    return fresher < max_charged


@dataclass(frozen=True, slots=True, eq=False)
class EngineCrash:
    """The crash of an engine while it worked on a request."""

    backend: Backend
    """The engine."""
    casualties: Sequence[Casualty]
    """The units on the engine that have been reported so far."""


def is_acquitted(suspicion: Suspicion, deaths: Iterable[EngineCrash], now: float) -> bool:
    """Return whether other crashes show that a suspect is innocent: neither it nor another suspect explains them.

    Another suspect explains a crash if it was on the engine and has crashed as many engines as a request may. The given
    suspect must not have been on any of these engines, because such requests never share an engine.

    Args:
        suspicion: The suspicion of a request that has crashed as many engines as it may.
        deaths: The crashes of the same role at about the same time.
        now: Clock time.
    """
    lost = suspicion.crashed_engines(now)
    unexplained = 0
    for death in deaths:
        if death.backend in lost or any(other.suspicion is suspicion for other in death.casualties):
            continue
        others = [other.suspicion.crashed_engines(now) for other in death.casualties]
        unexplained += not any(len(engines) >= MAX_ENGINES and lost.isdisjoint(engines) for engines in others)
    return unexplained > suspicion.earlier_crashes  # the earlier crashes are included: they belong to another suspicion


def is_poison(casualty: Casualty, casualties: Iterable[Casualty], now: float) -> bool:
    """Return whether a request crashes engines.

    It does if it has crashed as many engines as a request may, and no other request on the last one is as suspicious.
    """
    suspicion = casualty.suspicion
    if suspicion.count_crashed_engines(now) < MAX_ENGINES:
        return False
    rivals = (
        other
        for other in casualties
        if other.suspicion is not suspicion and other.suspicion_rank >= casualty.suspicion_rank
    )
    return not any(
        other.suspicion_rank or other.suspicion.count_crashed_engines(now) >= MAX_ENGINES for other in rivals
    )
