"""Which backends have stopped sending, while others of their role go on. Pure: the caller has the clock.

A stuck engine keeps its connections open and answers health checks, so only its silence gives it away. Silence alone
says little, though: the cause may be the gateway itself, or the network. So a backend is compared with its peers, and
with how long it has been silent before and went on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.backend import Backend


_REMEMBERED_SECONDS: Final = 600.0
_PATIENCE: Final = 3.0
"""How many times as long as the longest silence it came back from a backend may be silent without suspicion."""


@dataclass(slots=True)
class _Watched:
    seen_at: float
    silent_since: float
    moved_at: float = -math.inf
    silences: deque[tuple[float, float]] = field(default_factory=deque)
    """When one ended, and how many seconds it had lasted; only those that matter."""
    is_told: bool = False


class StreamProgress:
    """Watches the backends with streams under way."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._watched: dict[Backend, _Watched] = {}

    def configure(self, stall_seconds: float) -> None:
        """Change how long a silence has to be."""
        self._stall_seconds = stall_seconds

    def observe(self, now: float, moving: Mapping[Backend, bool], *, lost_seconds: float = 0.0) -> list[Backend]:
        """Take in one look at all streams; the backends that are found stalled by it, each once per silence.

        `moving` has the backends with streams under way: whether any of these got bytes since the last look.
        `lost_seconds`: how much of the time since then the gateway itself did not read; it does not count.
        """
        for backend, moves in moving.items():
            self._note(backend, moves, now, lost_seconds)
        for backend in [backend for backend, watched in self._watched.items() if watched.seen_at < now]:
            self._rest(backend, now)
        stalled = [backend for backend, moves in moving.items() if not moves and self._is_stalled(backend, now)]
        for backend in stalled:
            self._watched[backend].is_told = True
        return stalled

    def _note(self, backend: Backend, moves: bool, now: float, lost_seconds: float) -> None:
        watched = self._watched.get(backend)
        if watched is None:
            watched = self._watched[backend] = _Watched(now, now)
        watched.seen_at = now
        watched.silent_since = min(watched.silent_since + lost_seconds, now)
        if moves:
            silence_seconds = now - watched.silent_since
            if silence_seconds * _PATIENCE > self._stall_seconds:
                watched.silences.append((now, silence_seconds))
            watched.silent_since = watched.moved_at = now
            watched.is_told = False

    def _rest(self, backend: Backend, now: float) -> None:
        """A backend without streams: when it has some again, its silence begins anew."""
        watched = self._watched[backend]
        if now - watched.seen_at > _REMEMBERED_SECONDS:
            del self._watched[backend]
            return
        watched.silent_since, watched.moved_at, watched.is_told = math.inf, -math.inf, False

    def _is_stalled(self, backend: Backend, now: float) -> bool:
        watched = self._watched[backend]
        if watched.is_told:
            return False
        while watched.silences and now - watched.silences[0][0] > _REMEMBERED_SECONDS:
            watched.silences.popleft()
        longest_seconds = max((seconds for _, seconds in watched.silences), default=0.0)
        if now - watched.silent_since <= max(self._stall_seconds, _PATIENCE * longest_seconds):
            return False
        # A peer that fell silent just after it may have fallen silent for the same reason.
        recently = now - self._stall_seconds / 2
        return any(peer.moved_at > recently and other.role is backend.role for other, peer in self._watched.items())


_PACE_SECONDS: Final = 3600.0
"""Seconds of all answers together, of which the older half counts half."""


class Pace:
    """The usual time between two parts of an answer of one backend: a mean that forgets."""

    __slots__ = ("_parts", "_seconds")

    def __init__(self) -> None:
        self._parts = 0.0
        self._seconds = 0.0

    def saw(self, parts: int, seconds: float) -> None:
        """Take in that so many parts came in so many seconds, summed over answers."""
        self._parts += parts
        self._seconds += seconds
        if self._seconds > _PACE_SECONDS:
            self._parts /= 2
            self._seconds /= 2

    @property
    def gap_seconds(self) -> float:
        """The usual time between two parts; 0 as long as nothing is known."""
        return self._seconds / self._parts if self._parts else 0.0
