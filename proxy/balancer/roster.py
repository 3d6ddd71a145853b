"""Which backends exist, for all workers: any of them may add or remove one, all of them see it.

A backend is a member for as long as an origin wants it: the configuration, an administrator, a source of discovery.
Origins do not know each other, so one that two of them want stays when one does not want it any more. An
administrator's word is the last: what is removed by hand leaves, whichever other origin wants it, until the
configuration is read again, or an origin that had ceased to want it wants it anew.

An administrator may also disable a member, which then gets no new requests until it is enabled again, and give it a
weight. Both stay with it for as long as somebody wants it.

The roster owns the scoreboard's slots. A member that no origin wants drains: it gets no new requests, keeps its slot
until its own last request has ended, and is then dropped by `finalize`. Build the roster before forking.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.shared.memory import SharedValue
from proxy.common.backend import Backend, Load, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from proxy.balancer.shared.scoreboard import Scoreboard


@dataclass(frozen=True, slots=True)
class Member:
    """A backend and who wants it."""

    backend: Backend
    origins: tuple[str, ...] = ()
    """The origins that want it, in alphabetical order. Empty: it drains."""
    leaves_at: float | None = None
    """When it is to be evacuated, if it drains or is disabled, in seconds of the system's monotonic clock, which all
    workers share; None: its requests may come to their end."""
    is_disabled: bool = False
    """An administrator has it get no new requests, although it is wanted."""
    weight: int = FULL_PERCENT
    """How much of its share of requests it is to get, in per cent, from 1 to 100."""

    @property
    def draining(self) -> bool:
        """Whether it is to get no new requests, because no origin wants it any more."""
        return not self.origins

    @property
    def serves(self) -> bool:
        """Whether it may get new requests, as far as origins and administrators are concerned."""
        return bool(self.origins) and not self.is_disabled

    def wanted_by(self, origin: str) -> Member:
        """The same with one more origin."""
        origins = tuple(sorted({*self.origins, origin}))
        return replace(self, origins=origins, leaves_at=self.leaves_at if self.is_disabled else None)

    def given_up_by(self, origin: str, leaves_at: float | None) -> Member:
        """The same without this origin; it drains if there is no other, and is then evacuated at `leaves_at`."""
        left = tuple(other for other in self.origins if other != origin)
        return replace(self, origins=left) if left else Member(self.backend, leaves_at=leaves_at)

    def with_details_of(self, wanted: Backend, *, is_authority: bool) -> Member:
        """The same with what an origin says of its backend. Where that gives no bootstrap port or no models, the known
        ones stay unless the origin is the authority.
        """
        known = self.backend
        has_said = is_authority or wanted.bootstrap_port is not None
        backend = replace(
            known,
            trusted=known.trusted or wanted.trusted,
            bootstrap_port=wanted.bootstrap_port if has_said else known.bootstrap_port,
            models=wanted.models if is_authority or wanted.models else known.models,
        )
        return replace(self, backend=backend)

    @property
    def row(self) -> tuple[object, ...]:
        """As it lies in shared memory."""
        b = self.backend
        place = (b.role, b.host, b.port, b.bootstrap_port, b.slot, b.trusted)
        return *place, self.origins, self.leaves_at, self.is_disabled, self.weight, b.models

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Member:
        """Return what lies in shared memory, perhaps since a gateway of a version without models."""
        role, host, port, bootstrap_port, slot, trusted, origins, leaves_at, is_disabled, weight, *models = row
        backend = Backend(Role(role), host, port, slot, trusted, bootstrap_port, tuple(models[0]) if models else ())
        return cls(backend, tuple(origins), leaves_at, is_disabled, weight)


_BYTES_PER_ENTRY: Final = 512  # a host name has at most 253, and what it serves is told of few


class WaitingList:
    """The instances that were added while the gateway runs and did not answer yet, as all workers see them.

    The worker that is to add an instance waits for it, and any worker may be asked to stop that. Should the first one
    die, nothing waits any more, so each entry has a time by which it is over. It has a ticket, since an instance that
    was taken off the list may be put on it again. Make the list before forking.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """For `capacity` instances. `clock` is the system's monotonic one, which all workers share, except in tests."""
        self._clock = clock
        self._shared = SharedValue("list of instances that join", capacity_bytes=capacity * _BYTES_PER_ENTRY)
        self._shared.write([])

    def enter(self, backend: Backend, seconds: float) -> int | None:
        """Put it on the list for `seconds`; its ticket, None if it is there already. Raises ValueError if it is
        full.
        """
        with self._shared.exclusive():
            rows = self._rows()
            if backend in map(_backend, rows):
                return None
            ticket = self._shared.version
            place = (backend.role, backend.host, backend.port)
            instance = [*place, backend.trusted, backend.bootstrap_port, backend.models]
            self._shared.write([*rows, [instance, self._clock() + seconds, ticket]])
            return ticket

    def leave(self, backend: Backend, ticket: int | None = None) -> bool:
        """Take it off; False when it is not there, or not with this ticket."""
        with self._shared.exclusive():
            rows = self._rows()
            left = [row for row in rows if not _is(row, backend, ticket)]
            if len(left) < len(rows):
                self._shared.write(left)
            return len(left) < len(rows)

    def holds(self, backend: Backend, ticket: int) -> bool:
        """Whether it is still there with this ticket."""
        return any(_is(row, backend, ticket) for row in self._rows())

    def backends(self) -> list[Backend]:
        """The instances on the list, the longest first."""
        return [_backend(row) for row in self._rows()]

    def _rows(self) -> list[Any]:
        now = self._clock()
        return [row for row in self._shared.read()[1] if row[1] > now]


def _backend(row: Any) -> Backend:
    role, host, port, trusted, bootstrap_port, models = row[0]
    return Backend(Role(role), host, port, 0, trusted, bootstrap_port, tuple(models))


def _is(row: Any, backend: Backend, ticket: int | None) -> bool:
    return _backend(row) == backend and ticket in (None, row[2])


CONFIG: Final = "config"
ADMIN: Final = "admin"
"""Origins that are no source of discovery: the configuration, and administrators."""

# Its host name, of at most 253 bytes, stands in it and in what an origin wants, and so do models that it is said to
# serve, which few have.
_BYTES_PER_MEMBER = 1024

Address = tuple[str, int] | tuple[str, int, int | None] | tuple[str, int, int | None, tuple[str, ...]]
"""Host and port of a backend, its bootstrap port if it may have one, and its models if they are told."""


class Roster:
    """Membership of all roles. Reading it is cheap; changing it takes a lock that all workers share."""

    def __init__(
        self,
        prefill: Iterable[Address],
        decode: Iterable[Address],
        scoreboard: Scoreboard,
        encode: Iterable[Address] = (),
        *,
        before: Any = None,
    ) -> None:
        """Create the roster from the configuration.

        Args:
            prefill: Addresses of the configured prefillers, which are trusted with the engine key.
            decode: Addresses of the configured decoders.
            scoreboard: Its slots are given to the members.
            encode: Addresses of the configured encoders.
            before: The `state` of the roster to continue; None: there is none. Its instances stay unless the
                configuration says otherwise. A state that cannot be read is ignored; see `is_restored`.

        Raises:
            ValueError: An address is listed twice, or there are more addresses than slots.
        """
        self.waiting = WaitingList(scoreboard.slots)
        """Instances that are to become members as soon as they answer."""
        self._scoreboard = scoreboard
        self._shared = SharedValue("list of instances", capacity_bytes=scoreboard.slots * _BYTES_PER_MEMBER)
        self.versions = self._shared.head
        """Its first cell is `version`, without a call."""
        self._read_version = -1
        self._members: tuple[Member, ...] = ()
        self._by_role: dict[Role, tuple[Member, ...]] = {}
        self._leaving: tuple[Member, ...] = ()
        self._wanted: dict[str, frozenset[Backend]] = {}  # by origin
        self._write((), {})
        self.is_restored = self._go_on_with(before)
        """It has what `before` told."""
        configured: dict[Backend, Backend] = {}
        for role, endpoints in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.ENCODE, encode)):
            for address in endpoints:
                bootstrap_port = address[2] if len(address) >= 3 else None
                models = address[3] if len(address) == 4 else ()
                backend = Backend(role, address[0], address[1], 0, True, bootstrap_port, models)
                if configured.setdefault(backend, backend) is not backend:
                    raise ValueError(f"{backend.name} is listed twice as a {role.value} instance")
        self.sync(CONFIG, configured)

    @property
    def version(self) -> int:
        """Moves with every change, whichever worker made it."""
        return self._shared.version

    def members(self, role: Role) -> tuple[Member, ...]:
        """The members of one role, in slot order."""
        self._read()
        return self._by_role[role]

    def add(self, wanted: Backend) -> bool:
        """Let an administrator want a backend, whatever its slot; False when it was there and did not drain. One that
        is known stays with all it had, but for the bootstrap port or the models that are given, and is trusted from
        now on if `wanted` is.

        Raises ValueError when it has another role or there is no room.
        """
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, wanted)
            if known is None:
                backend = replace(wanted, slot=self._free_slot(members))
                self._write((*members, Member(backend, (ADMIN,))), self._wanted)
                return True
            _check_role(known, wanted.role)
            enabled = known.wanted_by(ADMIN).with_details_of(wanted, is_authority=False)
            if enabled.row != known.row:
                self._write((enabled if member is known else member for member in members), self._wanted)
            return known.draining

    def wanted(self) -> Mapping[str, Collection[Backend]]:
        """What each origin wants, by origin; those that want nothing are left out."""
        self._read()
        return self._wanted

    def leaving(self) -> tuple[Member, ...]:
        """The members of all roles that have a time to be evacuated."""
        self._read()
        return self._leaving

    def remove(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Let a backend drain, whichever origins want it, and have it evacuated at `leaves_at`, see Member; False when
        there is no such backend. For one that drains already the time is the last one given.
        """
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, Backend(role, host, port))
            if known is None or known.backend.role is not role:
                return False
            leaving = Member(known.backend, leaves_at=leaves_at)
            if leaving != known:
                self._write((leaving if member is known else member for member in members), self._wanted)
            return True

    def disable(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Give a backend no new requests until it is enabled, and have it evacuated at `leaves_at`, see Member; False
        when there is no such backend, or it drains. For one that is disabled already the time is the last one given.
        """
        return self._change(role, host, port, lambda known: replace(known, is_disabled=True, leaves_at=leaves_at))

    def enable(self, role: Role, host: str, port: int) -> bool:
        """Let a disabled backend get requests again; False when there is no such backend, or it drains."""
        return self._change(role, host, port, lambda known: replace(known, is_disabled=False, leaves_at=None))

    def weigh(self, role: Role, host: str, port: int, weight: int) -> bool:
        """Give a backend a weight, see Member; False when there is no such backend, or it drains."""
        return self._change(role, host, port, lambda known: replace(known, weight=weight))

    def _change(self, role: Role, host: str, port: int, change: Callable[[Member], Member]) -> bool:
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, Backend(role, host, port))
            if known is None or known.backend.role is not role or known.draining:
                return False
            changed = change(known)
            if changed != known:
                self._write((changed if member is known else member for member in members), self._wanted)
            return True

    def sync(
        self,
        origin: str,
        wanted: Collection[Backend],
        leaves_at: float | None = None,
        *,
        restores: bool = False,
        is_dry_run: bool = False,
    ) -> tuple[list[Backend], list[Backend]]:
        """Let an origin want these backends and no others, in one step. Returns those that are enabled now and were not
        before, and those that drain now, which are evacuated at `leaves_at`, see Member.

        What the origin has ceased to want drains unless another origin wants it. What it wanted before and still wants
        is left alone if an administrator has removed it; `restores`: it is enabled again, and has the bootstrap port
        that is given, also none. One that is trusted by one origin is trusted until it is dropped. `is_dry_run`:
        nothing is changed.

        Raises ValueError, and changes nothing, when a backend has another role or there is no room.
        """
        with self._shared.exclusive():
            rows = [member.row for member in self._read()]
            members = {member.backend: member for member in self._members}
            before, added, removed = self._wanted.get(origin, frozenset()), list[Backend](), list[Backend]()
            gone = [members[backend] for backend in before.difference(wanted) & members.keys()]
            for backend in wanted:
                known = members.get(backend)
                is_wanted_already = known is not None and origin in known.origins
                if backend in before and not is_wanted_already and not restores:
                    continue  # an administrator has removed it
                if known is None:
                    _check_role(_find(members.values(), backend), backend.role)
                    known = Member(replace(backend, slot=self._free_slot(members.values())))
                if known.draining:
                    added.append(known.backend)
                members[backend] = known.wanted_by(origin).with_details_of(backend, is_authority=restores)
            for member in sorted((member for member in gone if not member.draining), key=_slot):
                left = member.given_up_by(origin, leaves_at)
                if left.draining:
                    removed.append(member.backend)
                members[member.backend] = left
            after = [member.row for member in sorted(members.values(), key=_slot)]
            if not is_dry_run and (before != frozenset(wanted) or rows != after):
                self._write(members.values(), {**self._wanted, origin: frozenset(wanted)})
            return added, removed

    def finalize(self) -> list[Backend]:
        """Drop the draining backends whose last request has ended, in whichever worker, and return them."""
        if not any(member.draining for member in self._read()):
            return []
        with self._shared.exclusive():
            members = self._read()
            finished = [member for member in members if self._has_drained(member)]
            if finished:
                self._write((member for member in members if member not in finished), self._wanted)
            return [member.backend for member in finished]

    def state(self) -> Any:
        """What there is, for a roster of another process to go on with; JSON."""
        with self._shared.exclusive():
            rows = [member.row for member in self._read() if not member.draining]
            return [rows, {origin: [(b.role, b.host, b.port) for b in those] for origin, those in self._wanted.items()}]

    def _go_on_with(self, before: Any) -> bool:
        """Whether it could be read."""
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            rows, wanted = before
            members = [Member.of_row(row) for row in rows]
            fresh = [
                replace(member, backend=replace(member.backend, slot=slot))
                for slot, member in enumerate(members[: self._scoreboard.slots])
            ]
            by_origin = {o: [Backend(Role(r), host, port) for r, host, port in those] for o, those in wanted.items()}
            self._write(fresh, by_origin)
            return True
        return False

    def _has_drained(self, member: Member) -> bool:
        return member.draining and self._scoreboard.requests(member.backend.slot) == 0

    def _free_slot(self, members: Iterable[Member]) -> int:
        """The lowest slot that no member has and whose column is zero.

        The column matters: another worker may have picked a backend just before it was removed and charge it just after
        it was dropped. Until that request ends, its load must not be taken for a new backend's.
        """
        used = {member.backend.slot for member in members}
        for slot in range(self._scoreboard.slots):
            if slot not in used and self._scoreboard.requests(slot) == 0 and self._scoreboard.load(slot) == Load():
                return slot
        raise ValueError(f"there is no room for another instance: all {self._scoreboard.slots} slots are in use")

    def _read(self) -> tuple[Member, ...]:
        if self._shared.version != self._read_version:
            self._read_version, (rows, wanted) = self._shared.read()
            self._members = tuple(Member.of_row(row) for row in rows)
            self._wanted = {
                origin: frozenset(Backend(Role(role), host, port) for role, host, port in backends)
                for origin, backends in wanted.items()
            }
            self._leaving = tuple(member for member in self._members if member.leaves_at is not None)
            self._by_role = {
                role: tuple(member for member in self._members if member.backend.role is role) for role in Role
            }
        return self._members

    def _write(self, members: Iterable[Member], wanted: Mapping[str, Collection[Backend]]) -> None:
        rows = [member.row for member in sorted(members, key=_slot)]
        by_origin = {origin: [(b.role, b.host, b.port) for b in those] for origin, those in wanted.items() if those}
        self._shared.write([rows, by_origin])


def _slot(member: Member) -> int:
    return member.backend.slot


def _find(members: Iterable[Member], backend: Backend) -> Member | None:
    """The member at the same place, of whatever role: one engine has only one."""
    return next((member for member in members if member.backend.place == backend.place), None)


def _check_role(known: Member | None, role: Role) -> None:
    """Raise ValueError when what is known at an endpoint has another role."""
    if known is not None and known.backend.role is not role:
        how = "still draining as" if known.draining else "already"
        raise ValueError(f"{known.backend.name} is {how} a {known.backend.role.value} instance")


_CAPACITY_BYTES: Final = 2 * 1024 * 1024  # some 250 sources whose names are paths of the greatest length
_MAX_PROBLEM: Final = 400


@dataclass(frozen=True, slots=True)
class SourceState:
    """State of one discovery source since the gateway started, or since the source was configured if that was later."""

    succeeded_at: float | None = None
    """When it last said which instances there are, in seconds since the epoch; None: not yet."""
    failures: int = 0
    """How often it could not be asked, or said what cannot be."""
    problem: str | None = None
    """What is wrong now; None: nothing, or it was not asked yet."""


class SourceStates:
    """State of the discovery sources by origin, for all workers.

    The roster has the instances that a source names; this table has whether the source can be read. The worker that
    watches the sources writes it. Reading costs one comparison while nothing has changed. Create it before forking.
    """

    def __init__(self) -> None:
        self._shared = SharedValue("list of sources", _CAPACITY_BYTES)
        self._read_version = 0
        self._states: dict[str, SourceState] = {}

    def all(self) -> Mapping[str, SourceState]:
        """Return the state of each source by its origin, such as `file:/etc/engines.yaml`, in the settings' order."""
        if self._shared.version != self._read_version:
            self._read_version, rows = self._shared.read()
            self._states = {origin: SourceState(*row) for origin, row in rows.items()}
        return self._states

    def keep(self, origins: Collection[str]) -> None:
        """Keep the states of these sources, and drop all others."""
        states = self.all()
        self._write({origin: states.get(origin, SourceState()) for origin in origins})

    def succeeded(self, origin: str) -> None:
        """A source has said which instances there are."""
        state = self.all()[origin]
        self._write({**self.all(), origin: SourceState(time.time(), state.failures)})  # noqa: TID251 - shown to people

    def failed(self, origin: str, problem: str) -> None:
        """A source could not say which instances there are. `problem`: why, in words for operators."""
        state = self.all()[origin]
        failed = replace(state, failures=state.failures + 1, problem=problem[:_MAX_PROBLEM])
        self._write({**self.all(), origin: failed})

    def _write(self, states: Mapping[str, SourceState]) -> None:
        with self._shared.exclusive():
            self._shared.write({origin: astuple(state) for origin, state in states.items()})
