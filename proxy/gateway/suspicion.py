"""Is a request poison? What is known of one client request under which engines went down. Pure.

An engine may go down because of a request, and repeating or resuming that request elsewhere costs one engine after the
other. So each client request has one Suspicion, for all of its units, and it may cost two engines and no more.

Most requests that are on an engine when it goes down are innocent. What tells them apart: those that the next engine
keeps serving for longer than the lost one did are cleared; and suspects are kept on engines of their own (see
`suspects`), so when the next one goes down, it is known under whom. Engines that go down one after the other for
another reason, such as a rack, take some requests along twice by chance. But they do not stop at these: an engine that
goes down without a suspect, and that no other one explains, acquits it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from proxy.balancer.blame import FailedEngines
    from proxy.common.backend import Backend, Role
    from proxy.dialects.call import Call

MOST_ENGINES: Final = 2
"""How many engines a client request may cost."""

# A suspect is cleared when the next engine has served it for this many times as long as the lost one had, and a bit.
# An answer that goes on begins where it broke off, so what breaks it there breaks it soon: nobody has to wait longer
# than the last.
_TIMES_AS_LONG: Final = 2.0
_CLEARED_AFTER_SECONDS: Final = 1.0
_CLEARED_AFTER_AT_MOST_SECONDS: Final = 30.0
# For shorter than that it is alone on its engine, as others wait for the place.
_APART_SECONDS: Final = 0.25
_APART_AT_MOST_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class UnitHistory:
    """What became of one unit's attempts. Times are clock seconds."""

    began_at: float | None = None
    """When the attempt under way had its first output; None: it had none yet."""
    lost: dict[Backend, float] = field(default_factory=dict)
    """The engines that went down under it: how many seconds of output it had had there."""
    doubtful: dict[Backend, float] = field(default_factory=dict)
    """The same for engines that broke off and yet were well a moment later."""
    reserved: list[Backend] = field(default_factory=list)
    """The engines that are reserved for it, so that it is the only suspect there."""

    def seconds_of_output(self, now: float) -> float:
        """How long the attempt under way has had output."""
        return 0.0 if self.began_at is None else now - self.began_at

    def is_cleared(self, now: float) -> bool:
        """Whether it has been served for so long that the engines it was on did not go down because of it."""
        if self.began_at is None:
            return False
        longest = max(self.lost.values(), default=0.0)
        needed = min(_TIMES_AS_LONG * longest + _CLEARED_AFTER_SECONDS, _CLEARED_AFTER_AT_MOST_SECONDS)
        return now - self.began_at > needed

    @property
    def apart_seconds(self) -> float:
        """How long after its first output no other suspect may join it; after that its last engine is to blame."""
        longest = max((*self.lost.values(), *self.doubtful.values()), default=0.0)
        return min(_TIMES_AS_LONG * longest + _APART_SECONDS, _APART_AT_MOST_SECONDS) if longest else 0.0


class Suspicion:
    """That of one client request; each of its `units` has a history.

    `earlier`: engines that the same request has cost when it was sent before. `is_split`: there are several units.
    """

    __slots__ = ("call", "earlier", "is_convicted", "units", "ways", "reserved", "_subsets", "is_confined")

    def __init__(self, earlier: int = 0, *, is_split: bool = False, call: Call | None = None) -> None:
        self.earlier = earlier
        self.call = call
        """The client request; None in tests of this alone."""
        self.is_convicted = False
        self.units: list[UnitHistory] = []
        self.ways: FailedEngines = {}
        self.reserved: list[Backend] = []
        """The other engines of its subset, once one has broken down: no other suspect is to join its units there."""
        self.is_confined = is_split
        """Whether the units stay on few engines. Units run at the same time. Otherwise one request could crash an
        engine with each unit before the first failure is reported."""
        self._subsets: dict[Role, list[Backend]] = {}

    def add_unit(self) -> UnitHistory:
        """The history of one more unit."""
        history = UnitHistory()
        self.units.append(history)
        return history

    def lost(self, now: float) -> set[Backend]:
        """The engines that may have gone down because of it."""
        return {backend for history in self.units if not history.is_cleared(now) for backend in history.lost}

    def engines(self, now: float) -> int:
        """How many it may have cost."""
        return self.earlier + len(self.lost(now))

    def acquit(self) -> None:
        """It has cost no engine so far, whatever it seemed."""
        self.earlier = 0
        for history in self.units:
            history.lost.clear()

    @property
    def has_broken_down(self) -> bool:
        """Whether any unit was on an engine that did."""
        return any(history.lost or history.doubtful for history in self.units)

    def was_served(self, history: UnitHistory) -> None:
        """A unit has its whole answer. So the request breaks no engine that it comes to, and may spread; whether
        another unit does is not known.
        """
        history.lost.clear()
        history.doubtful.clear()
        self.is_confined = False
        self._subsets.clear()

    @property
    def bears_on_choice(self) -> bool:
        """Whether it matters on which engines its units come to be."""
        if self.is_confined or self.earlier > 0:
            return True
        for history in self.units:  # noqa: SIM110 - each request asks, and a generator costs as much as all else
            if history.lost:
                return True
        return False

    def subset(self, role: Role, eligible: Collection[Backend]) -> list[Backend]:
        """The engines of one role on which its units may be, as far as they have been chosen: the caller adds to it.
        One that broke down keeps its place, so that none is put at risk for it.
        """
        broken = {backend for history in self.units for backend in (*history.lost, *history.doubtful)}
        subset = [backend for backend in self._subsets.get(role, ()) if backend in eligible or backend in broken]
        self._subsets[role] = subset
        return subset

    def rest_of_subset(self, backend: Backend) -> list[Backend]:
        """The other engines of the subset that one belongs to."""
        return [other for other in self._subsets.get(backend.role, ()) if other != backend]

    def drop_subset(self, role: Role) -> set[Backend]:
        """Choose others from now on; those it was."""
        return set(self._subsets.pop(role, ()))


@dataclass(slots=True, eq=False)
class Casualty:
    """One unit that was on an engine when this broke down."""

    suspicion: Suspicion
    rank: int
    """How suspicious it was before: 2: it was the only suspect on the engine, 1: one of several, 0: none."""
    seconds_of_output: float


def rank_of(suspicion: Suspicion, history: UnitHistory, backend: Backend, now: float) -> int:
    """See Casualty."""
    if not suspicion.engines(now):
        return 0
    return 2 if backend in history.reserved or backend in suspicion.reserved else 1


def is_charged(casualty: Casualty, casualties: Iterable[Casualty], most: int) -> bool:
    """Whether an engine that went down counts against this one of those that were on it: only against the most
    suspicious ones, and of many only against the `most` that had come last, for what an engine has been serving for
    long has seldom broken it.
    """
    alike = [other for other in casualties if other.rank >= casualty.rank]
    if any(other.rank > casualty.rank for other in alike):
        return False
    fresher = sum(other.seconds_of_output < casualty.seconds_of_output for other in alike)
    return fresher < most


@dataclass(frozen=True, slots=True, eq=False)
class Death:
    """An engine that went down."""

    backend: Backend
    casualties: Sequence[Casualty]
    """What was on it, as far as has been heard."""


def is_acquitted(suspicion: Suspicion, deaths: Iterable[Death], now: float) -> bool:
    """Return whether engines went down that this suspect does not explain, nor another one.

    Another suspect explains an engine if it was there and has cost as many engines as a request may, none of which this
    suspect was on: poison requests that run side by side are not on the same engines.

    Args:
        suspicion: That of a request that has cost as many engines as it may.
        deaths: Those of about the same time, of the same role.
        now: Clock time.
    """
    lost = suspicion.lost(now)
    unexplained = 0
    for death in deaths:
        if death.backend in lost or any(other.suspicion is suspicion for other in death.casualties):
            continue
        others = [other.suspicion.lost(now) for other in death.casualties]
        unexplained += not any(len(theirs) >= MOST_ENGINES and lost.isdisjoint(theirs) for theirs in others)
    return unexplained > suspicion.earlier  # which are among them, as another suspicion knows them


def is_poison(casualty: Casualty, casualties: Iterable[Casualty], now: float) -> bool:
    """Whether a request that was charged with an engine is the one that breaks engines: it has cost as many as it may,
    and no other request that was on the last one is as suspicious.
    """
    suspicion = casualty.suspicion
    if suspicion.engines(now) < MOST_ENGINES:
        return False
    rivals = (other for other in casualties if other.suspicion is not suspicion and other.rank >= casualty.rank)
    return not any(other.rank or other.suspicion.engines(now) >= MOST_ENGINES for other in rivals)
