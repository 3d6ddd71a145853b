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

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.member import Member
from proxy.balancer.shared.memory import SharedValue
from proxy.balancer.waiting_list import WaitingList
from proxy.common.backend import Backend, Load, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from proxy.balancer.shared.scoreboard import Scoreboard

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
        """The configured endpoints, which are trusted with the engine key. `before`: the `state` of another roster,
        which this one goes on with: its instances stay, but for what the configuration has otherwise. None: there is
        none. One that cannot be read, as another version may have written it, is as if there were none; see `goes_on`.

        Raises ValueError when one is listed twice or there are more than the scoreboard has slots.
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
        self.goes_on = self._go_on_with(before)
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
            enabled = known.wanted_by(ADMIN).told(wanted, is_authority=False)
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
                members[backend] = known.wanted_by(origin).told(backend, is_authority=restores)
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
