"""Which backends exist, for all workers: any of them may add or remove one, all of them see it.

The roster owns the scoreboard's slots. A removed backend drains: it gets no new requests, keeps its slot until its own
last request has ended, and is then dropped by `finalize`. Build it before forking.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from proxy.balancer.backend import Backend, Load, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.balancer.scoreboard import Scoreboard

_BYTES_PER_MEMBER = 512  # a host name has at most 253


@dataclass(frozen=True, slots=True)
class Member:
    """A backend and whether the operator still wants it: a draining one is not to get new requests."""

    backend: Backend
    draining: bool = False


class Roster:
    """Membership of both roles. Reading it is cheap; changing it takes a lock that all workers share."""

    def __init__(
        self, prefill: Sequence[tuple[str, int]], decode: Sequence[tuple[str, int]], scoreboard: Scoreboard
    ) -> None:
        """The configured endpoints, which are trusted with the engine key.

        Raises ValueError when one is listed twice or there are more than the scoreboard has slots.
        """
        self._scoreboard = scoreboard
        self._shared = _SharedValue(capacity_bytes=scoreboard.slots * _BYTES_PER_MEMBER)
        self._read_version = -1
        self._members: tuple[Member, ...] = ()
        self._by_role: dict[Role, tuple[Member, ...]] = {}
        self._write(())
        for role, endpoints in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for host, port in endpoints:
                if not self.add(role, host, port, trusted=True):
                    raise ValueError(f"{Backend(role, host, port).name} is listed twice as a {role.value} instance")

    @property
    def version(self) -> int:
        """Moves with every change, whichever worker made it."""
        return self._shared.version

    def members(self, role: Role) -> tuple[Member, ...]:
        """Those of one role, in slot order."""
        self._read()
        return self._by_role[role]

    def add(self, role: Role, host: str, port: int, *, trusted: bool = False) -> bool:
        """Make a backend exist and enabled; False when it was. One that drains stays, with all it had.

        Raises ValueError when it has the other role or there is no room.
        """
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, host, port)
            if known is None:
                backend = Backend(role, host, port, self._free_slot(members), trusted)
                self._write((*members, Member(backend)))
                return True
            if known.backend.role is not role:
                how = "still draining as" if known.draining else "already"
                raise ValueError(f"{known.backend.name} is {how} a {known.backend.role.value} instance")
            if known.draining:
                self._write(replace(member, draining=False) if member is known else member for member in members)
            return known.draining

    def remove(self, role: Role, host: str, port: int) -> bool:
        """Let a backend drain; False when there is no such backend."""
        with self._shared.exclusive():
            members = self._read()
            known = _find(members, host, port)
            if known is None or known.backend.role is not role:
                return False
            if not known.draining:
                self._write(replace(member, draining=True) if member is known else member for member in members)
            return True

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

    def _free_slot(self, members: Sequence[Member]) -> int:
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
                Member(Backend(Role(role), host, port, slot, trusted), draining)
                for role, host, port, slot, trusted, draining in rows
            )
            self._by_role = {
                role: tuple(member for member in self._members if member.backend.role is role) for role in Role
            }
        return self._members

    def _write(self, members: Iterator[Member] | Sequence[Member]) -> None:
        ordered = sorted(members, key=lambda member: member.backend.slot)
        self._shared.write(
            [
                (m.backend.role, m.backend.host, m.backend.port, m.backend.slot, m.backend.trusted, m.draining)
                for m in ordered
            ]
        )


class _SharedValue:
    """A versioned JSON value in memory that forked processes share.

    There are two places and the version's parity says which one counts. A writer fills the other place and then moves
    the version, so a writer that dies half-way harms nobody and readers never wait. Each place carries its version and
    a checksum: a reader that was overtaken, or sees the stores out of order as aarch64 allows, notices and looks again.

    Writers exclude each other with a POSIX record lock, because the kernel releases it when its holder dies; the lock
    belongs to the process, so forked ones may use the inherited descriptor. It guards an anonymous memory file: nothing
    to name, to clean up or to be refused by a read-only disk.
    """

    _HEAD_CELLS = 5  # version, then length and checksum of each place

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._memory = mmap.mmap(-1, 8 * self._HEAD_CELLS + 2 * capacity_bytes)
        self._head = memoryview(self._memory)[: 8 * self._HEAD_CELLS].cast("q")
        self._lock = os.memfd_create("roster-lock")
        weakref.finalize(self, os.close, self._lock)

    @property
    def version(self) -> int:
        return self._head[0]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the writers' lock, for as long as it takes to read, decide and write."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def read(self) -> tuple[int, Any]:
        """The version and the value that belongs to it."""
        while True:
            version = self.version
            place = version % 2
            start = self._start(place)
            text = self._memory[start : start + self._head[1 + 2 * place]]
            if zlib.crc32(text) == self._head[2 + 2 * place]:
                written_version, value = orjson.loads(text)
                if written_version == version:
                    return version, value

    def write(self, value: Any) -> None:
        """Replace the value; the caller holds the lock. Raises ValueError when it does not fit."""
        version = self.version + 1
        place = version % 2
        start = self._start(place)
        text = orjson.dumps((version, value))
        if len(text) > self._capacity:
            raise ValueError("the list of instances is too long")
        self._memory[start : start + len(text)] = text
        self._head[1 + 2 * place] = len(text)
        self._head[2 + 2 * place] = zlib.crc32(text)
        self._head[0] = version

    def _start(self, place: int) -> int:
        return 8 * self._HEAD_CELLS + place * self._capacity


def _find(members: Sequence[Member], host: str, port: int) -> Member | None:
    """The member with this endpoint, of either role: one engine cannot be both."""
    return next((m for m in members if m.backend.host == host and m.backend.port == port), None)
