"""Requests under which engines went down, remembered for a while and by all workers, so that the same request sent
again does not begin anew. Only a keyed digest of the request is kept, and the key stays in memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Final

from proxy.balancer.shared.memory import SharedValue
from proxy.wire.document import length_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.document import Body

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
