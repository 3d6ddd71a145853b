"""Roster of the backends that exist, for all workers. Any worker may add or remove a backend, and all of them see it.

A backend is a member while at least one origin wants it. Origins are the configuration, administrators and the sources
of discovery. They do not know each other, so a backend that two origins want stays if one of them drops it. An
administrator has the last word. A backend that was removed by hand leaves even if other origins want it, until the
configuration is read again, or until an origin drops it and then wants it again.

An administrator may also disable a member, which then gets no new requests until it is enabled, and may set its weight.
Both last as long as the backend is wanted.

An elastic member may move to the other role. The roster alone has its present role, which outlives the role that an
origin gives. A moving member gets no new requests. It either gets its new role or keeps its old one, in one step.

The roster owns the scoreboard's slots. A member that no origin wants drains: it gets no new requests, keeps its slot
until its last request has ended, and is then dropped by `drop_drained_backends`. Create the roster before forking.
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
class RoleMove:
    """A move of a member to another role that has not ended. The member gets no new requests meanwhile."""

    new_role: Role
    """The new role."""
    must_end_at: float
    """When the move is given up unless the requests of the member have ended, in seconds of the monotonic clock."""
    move_reason: str = ""
    """Origin and reason of the move, for operators."""
    is_engine_switching: bool = False
    """Whether the engine may have been asked to exchange its role, so that its role is unknown until it reports it."""


@dataclass(frozen=True, slots=True)
class RosterMember:
    """A backend with the origins that want it."""

    backend: Backend
    origins: tuple[str, ...] = ()
    """Origins that want the backend, in alphabetical order. Empty: it drains."""
    must_leave_at: float | None = None
    """When a draining or disabled backend is evacuated, in seconds of the monotonic clock that all workers share. None:
    its requests may complete."""
    is_disabled: bool = False
    """Whether an administrator has disabled the backend, so that it gets no new requests."""
    weight_percent: int = FULL_PERCENT
    """Share of its requests that the backend gets, in percent from 1 to 100."""
    pending_move: RoleMove | None = None
    """The move to another role that has begun. None: the member keeps its role."""
    is_role_pinned: bool = False
    """Whether an administrator has chosen the role, so that only an administrator changes it."""
    move_problem: str = ""
    """Why the last move failed. Empty: it did not, or there was none."""
    is_move_refused: bool = False
    """Whether the engine refused the last move, so that only an administrator moves it until the engine restarts."""

    @property
    def next_role(self) -> Role:
        """Return the role that the backend has, or to which it moves."""
        return self.backend.role if self.pending_move is None else self.pending_move.new_role

    @property
    def is_draining(self) -> bool:
        """Whether no origin wants the backend any more, so that it gets no new requests."""
        return not self.origins

    @property
    def may_serve(self) -> bool:
        """Whether origins and administrators let the backend get new requests."""
        return bool(self.origins) and not self.is_disabled and self.pending_move is None

    def copy_with_origin(self, origin: str) -> RosterMember:
        """Return the member with one more origin."""
        origins = tuple(sorted({*self.origins, origin}))
        is_away = self.is_disabled or self.pending_move is not None
        return replace(self, origins=origins, must_leave_at=self.must_leave_at if is_away else None)

    def copy_without_origin(self, origin: str, leaves_at: float | None) -> RosterMember:
        """Return the member without an origin. If it was the last one, it drains and is evacuated at `leaves_at`."""
        remaining = tuple(other for other in self.origins if other != origin)
        return replace(self, origins=remaining) if remaining else RosterMember(self.backend, must_leave_at=leaves_at)

    def copy_with_details(self, wanted_backend: Backend, *, is_authoritative: bool) -> RosterMember:
        """Return the member with the bootstrap port, models, trust, TLS and elasticity that an origin gives.

        A missing port, missing models, missing TLS and missing elasticity keep the known ones, unless
        `is_authoritative`.
        """
        current = self.backend
        has_port = is_authoritative or wanted_backend.bootstrap_port is not None
        backend = replace(
            current,
            tls=wanted_backend.tls if is_authoritative else current.tls or wanted_backend.tls,
            is_trusted=current.is_trusted or wanted_backend.is_trusted,
            bootstrap_port=wanted_backend.bootstrap_port if has_port else current.bootstrap_port,
            models=wanted_backend.models if is_authoritative or wanted_backend.models else current.models,
            is_elastic=wanted_backend.is_elastic
            if is_authoritative
            else current.is_elastic or wanted_backend.is_elastic,
        )
        return replace(self, backend=backend)

    @property
    def stored_row(self) -> tuple[object, ...]:
        """Member as it is stored in shared memory."""
        b = self.backend
        place = (b.role, b.host, b.port, b.bootstrap_port, b.slot, b.is_trusted)
        roles = (
            b.is_elastic,
            self.is_role_pinned,
            self.move_problem,
            self.pending_move and astuple(self.pending_move),
            self.is_move_refused,
        )
        return *place, self.origins, self.must_leave_at, self.is_disabled, self.weight_percent, b.models, b.tls, roles

    @classmethod
    def from_stored_row(cls, row: Sequence[Any]) -> RosterMember:
        """Return the member of a stored row.

        A gateway of an older version may have written it, without models, TLS or elasticity.
        """
        role, host, port, bootstrap_port, slot, trusted, origins, leaves_at, is_disabled, weight, *more = row
        models, tls, roles = [*more, *_OLDER_ROW[len(more) :]]
        is_elastic, is_pinned, problem, move, *refused = roles
        backend = Backend(Role(role), host, port, slot, trusted, bootstrap_port, tuple(models), tls, is_elastic)
        if move is not None:
            move = RoleMove(Role(move[0]), *move[1:])
        return cls(backend, tuple(origins), leaves_at, is_disabled, weight, move, is_pinned, problem, any(refused))


# The last parts of a row that an older version has written: models, TLS and the exchange of roles.
_OLDER_ROW: Final[tuple[Any, ...]] = ((), False, (False, False, "", None))
_MAX_PROBLEM_BYTES: Final = 200
_BYTES_PER_ENTRY: Final = 512  # A host name has at most 253 bytes, and few instances have a list of models.


class JoiningList:
    """Instances that were added at run time and have not answered yet, for all workers.

    One worker waits for the instance, and any worker may be asked to cancel that. If the waiting worker dies, nothing
    waits any more, so each entry expires. An instance that was removed from the list may be added again, so each entry
    has a ticket. Create the list before forking.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty list for `capacity` instances. `clock` is the system's monotonic clock, except in tests."""
        self._clock = clock
        self._shared_value = SharedValue("list of joining instances", capacity_bytes=capacity * _BYTES_PER_ENTRY)
        self._shared_value.write_value([])

    def add_instance(self, backend: Backend, max_seconds: float) -> int | None:
        """Add an instance for `max_seconds`, and return its ticket, or None if it is on the list already.

        Raises ValueError if the list is full.
        """
        with self._shared_value.hold_writer_lock():
            rows = self._stored_rows()
            if backend in map(_backend_of_row, rows):
                return None
            ticket = self._shared_value.current_version
            place = (backend.role, backend.host, backend.port)
            details = [backend.is_trusted, backend.bootstrap_port, backend.models, backend.tls, backend.is_elastic]
            instance = [*place, *details]
            self._shared_value.write_value([*rows, [instance, self._clock() + max_seconds, ticket]])
            return ticket

    def remove_instance(self, backend: Backend, ticket: int | None = None) -> bool:
        """Remove an instance, and return whether it was on the list, with this ticket if one is given."""
        with self._shared_value.hold_writer_lock():
            rows = self._stored_rows()
            remaining = [row for row in rows if not _matches_row(row, backend, ticket)]
            if len(remaining) < len(rows):
                self._shared_value.write_value(remaining)
            return len(remaining) < len(rows)

    def has_instance(self, backend: Backend, ticket: int) -> bool:
        """Return whether an instance is still on the list with this ticket."""
        return any(_matches_row(row, backend, ticket) for row in self._stored_rows())

    def joining_backends(self) -> list[Backend]:
        """Return the instances on the list, oldest first."""
        return [_backend_of_row(row) for row in self._stored_rows()]

    def _stored_rows(self) -> list[Any]:
        now = self._clock()
        return [row for row in self._shared_value.current_value if row[1] > now]


def _backend_of_row(row: Any) -> Backend:
    role, host, port, trusted, bootstrap_port, models, tls, is_elastic = row[0]
    return Backend(Role(role), host, port, 0, trusted, bootstrap_port, tuple(models), tls, is_elastic)


def _matches_row(row: Any, backend: Backend, ticket: int | None) -> bool:
    return _backend_of_row(row) == backend and ticket in (None, row[2])


CONFIG: Final = "config"
ADMIN: Final = "admin"
"""Origins other than the sources of discovery."""

# The host name, of at most 253 bytes, is stored in the member and with its origin, and so are the models of the few
# instances that have a list of them.
_BYTES_PER_MEMBER = 1024

Address = (
    tuple[str, int]
    | tuple[str, int, int | None]
    | tuple[str, int, int | None, tuple[str, ...]]
    | tuple[str, int, int | None, tuple[str, ...], bool]
)
"""Host and port of a backend, optionally with its bootstrap port, its models, and whether it has TLS."""


class Roster:
    """Members of all roles. Reading costs one comparison while nothing changes. Changing it takes a shared lock."""

    def __init__(
        self,
        prefill: Iterable[Address],
        decode: Iterable[Address],
        scoreboard: Scoreboard,
        encode: Iterable[Address] = (),
        *,
        elastic: Collection[tuple[str, int]] = (),
        previous_state: Any = None,
    ) -> None:
        """Create the roster from the configuration.

        Args:
            prefill: Addresses of the configured prefillers, which are trusted with the engine key.
            decode: Addresses of the configured decoders.
            scoreboard: Scoreboard whose slots the members get.
            encode: Addresses of the configured encoders.
            elastic: Places of the elastic ones among these; see Backend.
            previous_state: The `export_state` of the roster to continue. Its instances stay unless the configuration
            says
                otherwise. A state that cannot be read is ignored; see `is_restored`. None: there is none.

        Raises:
            ValueError: An address is listed twice, or there are more addresses than slots.
        """
        self.joining_list = JoiningList(scoreboard.slot_count)
        """Instances that become members when they answer."""
        self._scoreboard = scoreboard
        self._shared_value = SharedValue("list of instances", capacity_bytes=scoreboard.slot_count * _BYTES_PER_MEMBER)
        self.version_cells = self._shared_value.head_cells
        """The first cell increases with every change by any worker."""
        self._read_version = -1
        self._all_members: tuple[RosterMember, ...] = ()
        self._members_by_role: dict[Role, tuple[RosterMember, ...]] = {}
        self._leaving_members: tuple[RosterMember, ...] = ()
        self._elastic_members: tuple[RosterMember, ...] = ()
        self._wanted: dict[str, frozenset[Backend]] = {}  # by origin
        self._write_members((), {})
        self.is_restored = self._restore_state(previous_state)
        """Whether the members of `previous_state` could be read."""
        configured: dict[Backend, Backend] = {}
        for role, endpoints in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.ENCODE, encode)):
            for address in endpoints:
                bootstrap_port = address[2] if len(address) >= 3 else None
                models = address[3] if len(address) >= 4 else ()
                tls = address[4] if len(address) == 5 else False
                backend = Backend(role, address[0], address[1], 0, True, bootstrap_port, models, tls)
                if backend.place in elastic:
                    backend = replace(backend, is_elastic=True)
                if configured.setdefault(backend, backend) is not backend:
                    raise ValueError(f"{backend.name} is listed twice as a {role.value} instance")
        self.sync_origin(CONFIG, configured)

    def members_of_role(self, role: Role) -> tuple[RosterMember, ...]:
        """Return the members of one role, in slot order."""
        self._read_members()
        return self._members_by_role[role]

    def find_backend_at(self, place: tuple[str, int]) -> Backend | None:
        """Return the member at an address as it is now, in any role, or None if there is none."""
        return next((member.backend for member in self._read_members() if member.backend.place == place), None)

    def add_for_administrator(self, wanted_backend: Backend) -> bool:
        """Add a backend for an administrator, and return whether it was absent or draining. Its slot is ignored.

        A known backend keeps its details, except for a bootstrap port or models that are given. It is trusted from now
        on if `wanted_backend` is.

        Raises:
            ValueError: The backend has another role, or there is no room.
        """
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            current = _find_member(members, wanted_backend)
            if current is not None:
                wanted_backend = _in_present_role(wanted_backend, current.backend)
            if current is None:
                backend = replace(wanted_backend, slot=self._find_free_slot(members))
                self._write_members((*members, RosterMember(backend, (ADMIN,))), self._wanted)
                return True
            _check_role(current, wanted_backend.role)
            enabled = current.copy_with_origin(ADMIN).copy_with_details(wanted_backend, is_authoritative=False)
            if enabled.stored_row != current.stored_row:
                self._write_members((enabled if member is current else member for member in members), self._wanted)
            return current.is_draining

    def wanted_by_origin(self) -> Mapping[str, Collection[Backend]]:
        """Return the backends that each origin wants, without the origins that want none."""
        self._read_members()
        return self._wanted

    def leaving_members(self) -> tuple[RosterMember, ...]:
        """Return the members of all roles that have a time for their evacuation."""
        self._read_members()
        return self._leaving_members

    def elastic_members(self) -> tuple[RosterMember, ...]:
        """Return the members that may exchange their role and do not drain, and those that move."""
        self._read_members()
        return self._elastic_members

    # Moves to another role

    def begin_move(self, backend: Backend, move: RoleMove, leaves_at: float | None, *, is_pinned: bool = False) -> bool:
        """Begin the move of an elastic member to another role, and return whether it is a member that does not drain.

        A move to its own role ends a move that has begun. `leaves_at`: see RosterMember. `is_pinned`: whether only an
        administrator may change the role from now on.

        Raises:
            ValueError: The member cannot move. Nothing has changed.
        """
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            current = _find_member(members, backend)
            if current is None or current.is_draining:
                return False
            role = current.backend.role
            if not current.backend.is_elastic:
                raise ValueError(f"{current.backend.name} is not elastic, so it stays a {role} instance")
            if (
                current.pending_move is not None
                and current.pending_move.is_engine_switching
                and current.pending_move != move
            ):
                raise ValueError(f"{current.backend.name} is exchanging its role already: try again when it has ended")
            if move.new_role is role and not move.is_engine_switching:
                moving = replace(
                    current, pending_move=None, must_leave_at=None if current.pending_move else current.must_leave_at
                )
            else:
                others = (each for each in self._members_by_role[role] if each is not current)
                if not move.is_engine_switching and not any(each.may_serve for each in others):
                    raise ValueError(f"{current.backend.name} is the only {role} instance")
                moving = replace(
                    current, pending_move=move, must_leave_at=leaves_at, move_problem="", is_move_refused=False
                )
            moving = replace(moving, is_role_pinned=is_pinned)
            if moving != current:
                self._write_members((moving if member is current else member for member in members), self._wanted)
            return True

    def unpin_role(self, backend: Backend) -> bool:
        """Let the gateway choose the role of a member again, and return whether it is a member that does not drain."""
        return self._change_member(
            backend.role, backend.host, backend.port, lambda current: replace(current, is_role_pinned=False)
        )

    def mark_switching(self, backend: Backend, is_switching: bool) -> bool:
        """Note whether the engine of a moving member may have been asked to exchange its role.

        Return whether the member still moves.
        """
        return self._change_or_end_move(
            backend,
            lambda current, move: replace(current, pending_move=replace(move, is_engine_switching=is_switching)),
        )

    def abandon_move(self, backend: Backend, problem: str, *, is_refused: bool = False) -> bool:
        """End a move so that the member keeps its old role, and return whether it was moving.

        `problem`: the reason for operators, of which the first 200 bytes are kept. `is_refused`: see RosterMember.
        """
        kept_problem = problem.encode()[:_MAX_PROBLEM_BYTES].decode(errors="ignore")
        return self._change_or_end_move(
            backend,
            lambda current, _: replace(
                current, pending_move=None, must_leave_at=None, move_problem=kept_problem, is_move_refused=is_refused
            ),
        )

    def forget_refusal(self, backend: Backend) -> bool:
        """Forget that the engine of a member refused a move, and return whether it is a member that does not drain."""
        return self._change_member(
            backend.role, backend.host, backend.port, lambda current: replace(current, is_move_refused=False)
        )

    def finish_move(self, backend: Backend) -> Backend | None:
        """Give a moving member its new role in one step, and return the backend, or None if it does not move any more.

        The backend has a new slot. Raises ValueError, after which nothing has changed, if there is none.
        """
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            current = _find_member(members, backend)
            if current is None or current.pending_move is None:
                return None
            moved = replace(current.backend, role=current.pending_move.new_role, slot=self._find_free_slot(members))
            joined = replace(current, backend=moved, pending_move=None, must_leave_at=None, move_problem="")
            wanted = {
                origin: [_in_present_role(each, moved) for each in backends]
                for origin, backends in self._wanted.items()
            }
            self._write_members((joined if member is current else member for member in members), wanted)
            return moved

    def _change_or_end_move(self, backend: Backend, change: Callable[[RosterMember, RoleMove], RosterMember]) -> bool:
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            current = _find_member(members, backend)
            if current is None or current.pending_move is None or current.backend != backend:
                return False
            changed = change(current, current.pending_move)
            self._write_members((changed if member is current else member for member in members), self._wanted)
            return True

    def remove_backend(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Let a backend drain even if origins want it, and return whether it is a member.

        `leaves_at` is the time of its evacuation; see RosterMember. It replaces that of a draining backend.
        """
        return self._change_member(
            role,
            host,
            port,
            lambda current: RosterMember(current.backend, must_leave_at=leaves_at),
            takes_draining=True,
        )

    def disable_backend(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Give a backend no new requests until it is enabled, and return whether it is a member that does not drain.

        `leaves_at` is the time of its evacuation; see RosterMember. It replaces that of a disabled backend.
        """
        return self._change_member(
            role, host, port, lambda current: replace(current, is_disabled=True, must_leave_at=leaves_at)
        )

    def enable_backend(self, role: Role, host: str, port: int) -> bool:
        """Let a disabled backend get requests again, and return whether it is a member that does not drain."""
        return self._change_member(
            role,
            host,
            port,
            lambda current: replace(
                current, is_disabled=False, must_leave_at=current.must_leave_at if current.pending_move else None
            ),
        )

    def set_backend_weight(self, role: Role, host: str, port: int, weight: int) -> bool:
        """Set the weight of a backend, see RosterMember, and return whether it is a member that does not drain."""
        return self._change_member(role, host, port, lambda current: replace(current, weight_percent=weight))

    def _change_member(
        self,
        role: Role,
        host: str,
        port: int,
        change: Callable[[RosterMember], RosterMember],
        *,
        takes_draining: bool = False,
    ) -> bool:
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            current = _find_member(members, Backend(role, host, port))
            if current is None or current.backend.role is not role or (current.is_draining and not takes_draining):
                return False
            changed = change(current)
            if changed != current:
                self._write_members((changed if member is current else member for member in members), self._wanted)
            return True

    def sync_origin(
        self,
        origin: str,
        wanted_backends: Collection[Backend],
        leaves_at: float | None = None,
        *,
        restores_removed: bool = False,
        is_dry_run: bool = False,
    ) -> tuple[list[Backend], list[Backend]]:
        """Set the backends that an origin wants, in one step.

        A backend that the origin drops drains, unless another origin wants it. A backend that an origin trusts stays
        trusted until it leaves.

        Args:
            origin: The origin.
            wanted_backends: All backends that it wants now.
            leaves_at: Time at which the draining ones are evacuated; see RosterMember.
            restores_removed: Whether wanted backends that an administrator has removed come back, and the given
                bootstrap ports and models replace the known ones even if they are empty.
            is_dry_run: Whether to change nothing.

        Returns:
            The backends that are enabled now and were not before, and those that drain now.

        Raises:
            ValueError: A backend has another role, or there is no room. Nothing has changed.
        """
        with self._shared_value.hold_writer_lock():
            rows = [member.stored_row for member in self._read_members()]
            members = {member.backend: member for member in self._all_members}
            before, added, removed = self._wanted.get(origin, frozenset()), list[Backend](), list[Backend]()
            present = {backend.place: backend for backend in (*before, *members)}
            wanted_backends = [
                _in_present_role(backend, present.get(backend.place, backend), is_authority=restores_removed)
                for backend in wanted_backends
            ]
            gone = [members[backend] for backend in before.difference(wanted_backends) & members.keys()]
            for backend in wanted_backends:
                current = members.get(backend)
                is_wanted_already = current is not None and origin in current.origins
                if backend in before and not is_wanted_already and not restores_removed:
                    continue  # an administrator has removed it
                if current is None:
                    _check_role(_find_member(members.values(), backend), backend.role)
                    current = RosterMember(replace(backend, slot=self._find_free_slot(members.values())))
                if current.is_draining:
                    added.append(current.backend)
                members[backend] = current.copy_with_origin(origin).copy_with_details(
                    backend, is_authoritative=restores_removed
                )
            for member in sorted((member for member in gone if not member.is_draining), key=_slot_of_member):
                remaining = member.copy_without_origin(origin, leaves_at)
                if remaining.is_draining:
                    removed.append(member.backend)
                members[member.backend] = remaining
            after = [member.stored_row for member in sorted(members.values(), key=_slot_of_member)]
            if not is_dry_run and (before != frozenset(wanted_backends) or rows != after):
                self._write_members(members.values(), {**self._wanted, origin: frozenset(wanted_backends)})
            return added, removed

    def drop_drained_backends(self) -> list[Backend]:
        """Drop the draining backends whose last request has ended in all workers, and return them."""
        if not any(member.is_draining for member in self._read_members()):
            return []
        with self._shared_value.hold_writer_lock():
            members = self._read_members()
            requests = self._scoreboard.open_leases
            finished = [member for member in members if member.is_draining and not requests(member.backend.slot)]
            if finished:
                self._write_members((member for member in members if member not in finished), self._wanted)
            return [member.backend for member in finished]

    def export_state(self) -> Any:
        """Return the members and origins as JSON, for the roster of the process that takes over."""
        with self._shared_value.hold_writer_lock():
            rows = [member.stored_row for member in self._read_members() if not member.is_draining]
            return [rows, {origin: [(b.role, b.host, b.port) for b in those] for origin, those in self._wanted.items()}]

    def _restore_state(self, state: Any) -> bool:
        """Write the members of a state, and return whether it could be read."""
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            rows, wanted = state
            members = [RosterMember.from_stored_row(row) for row in rows]
            fresh = [
                replace(member, backend=replace(member.backend, slot=slot))
                for slot, member in enumerate(members[: self._scoreboard.slot_count])
            ]
            by_origin = {o: [Backend(Role(r), host, port) for r, host, port in those] for o, those in wanted.items()}
            self._write_members(fresh, by_origin)
            return True
        return False

    def _find_free_slot(self, members: Iterable[RosterMember]) -> int:
        """Return the lowest slot that no member has and whose column is zero.

        Another worker may have picked a backend just before its removal, and may charge it after it was dropped. Until
        that request ends, its load must not count for a new backend.
        """
        used = {member.backend.slot for member in members}
        for slot in range(self._scoreboard.slot_count):
            if (
                slot not in used
                and self._scoreboard.open_leases(slot) == 0
                and self._scoreboard.load_of(slot) == Load()
            ):
                return slot
        raise ValueError(f"there is no room for another instance: all {self._scoreboard.slot_count} slots are in use")

    def _read_members(self) -> tuple[RosterMember, ...]:
        if self._shared_value.current_version != self._read_version:
            self._read_version, (rows, wanted) = self._shared_value.read_version_and_value()
            self._all_members = tuple(RosterMember.from_stored_row(row) for row in rows)
            self._wanted = {
                origin: frozenset(Backend(Role(role), host, port) for role, host, port in backends)
                for origin, backends in wanted.items()
            }
            self._leaving_members = tuple(member for member in self._all_members if member.must_leave_at is not None)
            self._elastic_members = tuple(
                member
                for member in self._all_members
                if not member.is_draining and (member.backend.is_elastic or member.pending_move is not None)
            )
            self._members_by_role = {
                role: tuple(member for member in self._all_members if member.backend.role is role) for role in Role
            }
        return self._all_members

    def _write_members(self, members: Iterable[RosterMember], wanted: Mapping[str, Collection[Backend]]) -> None:
        rows = [member.stored_row for member in sorted(members, key=_slot_of_member)]
        by_origin = {origin: [(b.role, b.host, b.port) for b in those] for origin, those in wanted.items() if those}
        self._shared_value.write_value([rows, by_origin])


def _slot_of_member(member: RosterMember) -> int:
    return member.backend.slot


def _find_member(members: Iterable[RosterMember], backend: Backend) -> RosterMember | None:
    """Return the member at the same address, in any role, because an engine has one role."""
    return next((member for member in members if member.backend.place == backend.place), None)


def _in_present_role(wanted: Backend, present: Backend, *, is_authority: bool = False) -> Backend:
    """Return a wanted backend in its present role, if it is elastic.

    `is_authority`: whether it is only elastic if `wanted` says so.
    """
    is_elastic = wanted.is_elastic or (present.is_elastic and not is_authority)
    is_moved = is_elastic and present.place == wanted.place and present.role is not wanted.role
    return replace(wanted, role=present.role) if is_moved else wanted


def _check_role(current: RosterMember | None, role: Role) -> None:
    """Raise ValueError if the member at an address has another role."""
    if current is not None and current.backend.role is not role:
        how = "still draining as" if current.is_draining else "already"
        raise ValueError(f"{current.backend.name} is {how} a {current.backend.role.value} instance")


_CAPACITY_BYTES: Final = 2 * 1024 * 1024  # about 250 sources whose names are the longest paths
_MAX_PROBLEM_LENGTH: Final = 400


@dataclass(frozen=True, slots=True)
class SourceState:
    """State of one discovery source since the gateway started, or since the source was configured if that was later."""

    succeeded_at: float | None = None
    """Time of the last successful read, in seconds since the epoch. None: there was none."""
    failures: int = 0
    """Number of failed reads, including invalid contents."""
    problem: str | None = None
    """Current problem. None: there is none, or the source has not been read yet."""


class SourceStates:
    """State of the discovery sources by origin, for all workers.

    The roster has the instances that a source names, and this table whether the source can be read. The worker that
    watches the sources writes it. Reading costs one comparison while nothing has changed. Create it before forking.
    """

    def __init__(self) -> None:
        self._shared_value = SharedValue("list of sources", _CAPACITY_BYTES)
        self._read_version = 0
        self._states_by_origin: dict[str, SourceState] = {}

    def states_by_origin(self) -> Mapping[str, SourceState]:
        """Return the state of each source by its origin, such as `file:/etc/engines.yaml`, in the settings' order."""
        if self._shared_value.current_version != self._read_version:
            self._read_version, rows = self._shared_value.read_version_and_value()
            self._states_by_origin = {origin: SourceState(*row) for origin, row in rows.items()}
        return self._states_by_origin

    def keep_only_origins(self, origins: Collection[str]) -> None:
        """Keep the states of these sources, add new ones, and drop all others."""
        states = self.states_by_origin()
        self._write_states({origin: states.get(origin, SourceState()) for origin in origins})

    def record_successful_read(self, origin: str) -> None:
        """Record a successful read of a source."""
        state = self.states_by_origin()[origin]
        self._write_states({**self.states_by_origin(), origin: SourceState(time.time(), state.failures)})  # noqa: TID251 - wall-clock time for display

    def record_failed_read(self, origin: str, problem: str) -> None:
        """Record a failed read of a source. `problem` is the text for operators."""
        state = self.states_by_origin()[origin]
        failed = replace(state, failures=state.failures + 1, problem=problem[:_MAX_PROBLEM_LENGTH])
        self._write_states({**self.states_by_origin(), origin: failed})

    def _write_states(self, states: Mapping[str, SourceState]) -> None:
        with self._shared_value.hold_writer_lock():
            self._shared_value.write_value({origin: astuple(state) for origin, state in states.items()})
