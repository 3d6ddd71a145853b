"""Which backends exist, for all workers: any of them may add or remove one, all of them see it.

The roster owns the scoreboard's slots. A removed backend drains: it gets no new requests, keeps its slot until its own
last request has ended, and is then dropped by `finalize`. Build it before forking.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.backend import Backend, Load, Role
from proxy.balancer.shared import SharedValue
from proxy.balancer.waiting_list import WaitingList

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from proxy.balancer.scoreboard import Scoreboard

_BYTES_PER_MEMBER = 512  # a host name has at most 253

Address = tuple[str, int] | tuple[str, int, int | None]
"""Host and port of a backend, and its bootstrap port if it may have one."""


@dataclass(frozen=True, slots=True)
class Member:
    """A backend and whether the operator still wants it: a draining one is not to get new requests."""

    backend: Backend
    draining: bool = False
    leaves_at: float | None = None
    """When it is to be evacuated, if it drains, in seconds of the system's monotonic clock, which all workers share;
    None: its requests may come to their end."""


class Roster:
    """Membership of all roles. Reading it is cheap; changing it takes a lock that all workers share."""

    def __init__(
        self,
        prefill: Iterable[Address],
        decode: Iterable[Address],
        scoreboard: Scoreboard,
        encode: Iterable[Address] = (),
    ) -> None:
        """The configured endpoints, which are trusted with the engine key.

        Raises ValueError when one is listed twice or there are more than the scoreboard has slots.
        """
        self.waiting = WaitingList(scoreboard.slots)
        """Who is to be a member as soon as it answers."""
        self._scoreboard = scoreboard
        self._shared = SharedValue("list of instances", capacity_bytes=scoreboard.slots * _BYTES_PER_MEMBER)
        self._read_version = -1
        self._members: tuple[Member, ...] = ()
        self._by_role: dict[Role, tuple[Member, ...]] = {}
        self._leaving: tuple[Member, ...] = ()
        self._write(())
        for role, endpoints in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.ENCODE, encode)):
            for address in endpoints:
                host, port = address[0], address[1]
                bootstrap_port = address[2] if len(address) == 3 else None
                if not self.add(role, host, port, trusted=True, bootstrap_port=bootstrap_port):
                    raise ValueError(f"{Backend(role, host, port).name} is listed twice as a {role.value} instance")

    @property
    def version(self) -> int:
        """Moves with every change, whichever worker made it."""
        return self._shared.version

    def members(self, role: Role) -> tuple[Member, ...]:
        """Those of one role, in slot order."""
        self._read()
        return self._by_role[role]

    def add(
        self, role: Role, host: str, port: int, *, trusted: bool = False, bootstrap_port: int | None = None
    ) -> bool:
        """Make a backend exist and enabled; False when it was. One that drains stays, with all it had but for a new
        bootstrap port.

        Raises ValueError when it has another role or there is no room.
        """
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, Backend(role, host, port))
            if known is None:
                backend = Backend(role, host, port, self._free_slot(members), trusted, bootstrap_port)
                self._write((*members, Member(backend)))
                return True
            _check_role(known, role)
            has_moved = bootstrap_port not in (None, known.backend.bootstrap_port)
            if known.draining or has_moved:
                newest = bootstrap_port if has_moved else known.backend.bootstrap_port
                enabled = Member(replace(known.backend, bootstrap_port=newest))
                self._write(enabled if member is known else member for member in members)
            return known.draining

    def leaving(self) -> tuple[Member, ...]:
        """Those of all roles that have a time to be evacuated."""
        self._read()
        return self._leaving

    def remove(self, role: Role, host: str, port: int, leaves_at: float | None = None) -> bool:
        """Let a backend drain, and have it evacuated at `leaves_at`, see Member; False when there is no such backend.
        For one that drains already the time is the last one given.
        """
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, Backend(role, host, port))
            if known is None or known.backend.role is not role:
                return False
            leaving = replace(known, draining=True, leaves_at=leaves_at)
            if leaving != known:
                self._write(leaving if member is known else member for member in members)
            return True

    def replace(
        self, before: Collection[Backend], after: Collection[Backend], leaves_at: float | None = None
    ) -> tuple[list[Backend], list[Backend]]:
        """Let the configured backends become `after` where they were `before`, in one step: those added, those that
        drain now, which are evacuated at `leaves_at`, see Member.

        What is in `after` exists then, enabled and trusted, whatever an administrator did to it. What is in neither,
        because an administrator added it, stays as it is. Raises ValueError, and changes nothing, when a backend has
        another role or there is no room.
        """
        with self._shared.exclusive():
            members = {member.backend: member for member in self._read()}
            gone = set(before).difference(after)
            removed = [member for member in members.values() if member.backend in gone and not member.draining]
            added = []
            for backend in after:
                known = members.get(backend)
                if known is None:
                    _check_role(_find(members.values(), backend), backend.role)
                    known = Member(replace(backend, slot=self._free_slot(members.values())), draining=True)
                if known.draining:
                    added.append(known.backend)
                members[backend] = Member(replace(known.backend, trusted=True, bootstrap_port=backend.bootstrap_port))
            members |= {member.backend: replace(member, draining=True, leaves_at=leaves_at) for member in removed}
            self._write(members.values())
            return added, [member.backend for member in removed]

    def finalize(self) -> list[Backend]:
        """Drop the draining backends whose last request has ended, in whichever worker, and return them."""
        if not any(member.draining for member in self._read()):
            return []
        with self._shared.exclusive():
            members = self._read()
            finished = [member for member in members if self._has_drained(member)]
            if finished:
                self._write(member for member in members if member not in finished)
            return [member.backend for member in finished]

    def _has_drained(self, member: Member) -> bool:
        return member.draining and self._scoreboard.requests(member.backend.slot) == 0

    def _free_slot(self, members: Iterable[Member]) -> int:
        """The lowest slot of nobody whose column is zero.

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
            self._read_version, rows = self._shared.read()
            self._members = tuple(
                Member(Backend(Role(role), host, port, slot, trusted, bootstrap_port), draining, leaves_at)
                for role, host, port, bootstrap_port, slot, trusted, draining, leaves_at in rows
            )
            self._leaving = tuple(member for member in self._members if member.leaves_at is not None)
            self._by_role = {
                role: tuple(member for member in self._members if member.backend.role is role) for role in Role
            }
        return self._members

    def _write(self, members: Iterable[Member]) -> None:
        ordered = sorted(members, key=lambda member: member.backend.slot)
        self._shared.write(
            [
                (b.role, b.host, b.port, b.bootstrap_port, b.slot, b.trusted, member.draining, member.leaves_at)
                for member in ordered
                for b in (member.backend,)
            ]
        )


def _find(members: Iterable[Member], backend: Backend) -> Member | None:
    """The member at the same place, of whatever role: one engine has only one."""
    return next((member for member in members if member.backend.place == backend.place), None)


def _check_role(known: Member | None, role: Role) -> None:
    """Raise ValueError when what is known at an endpoint has another role."""
    if known is not None and known.backend.role is not role:
        how = "still draining as" if known.draining else "already"
        raise ValueError(f"{known.backend.name} is {how} a {known.backend.role.value} instance")
