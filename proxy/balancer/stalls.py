"""Detection of backends that have stopped sending while others of their role go on. The caller has the clock.

A stuck engine keeps its connections open and answers health checks, so only its silence shows that it is stuck. But the
gateway or the network may also cause a silence. So a backend is compared with its peers, and with the silences from
which it has recovered before.
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
"""A backend may be silent for this multiple of the longest silence from which it has recovered."""


@dataclass(slots=True)
class _WatchedStreams:
    seen_at: float
    silent_since: float
    last_output_at: float = -math.inf
    past_silences: deque[tuple[float, float]] = field(default_factory=deque)
    """End and duration of each silence that is long enough to matter."""
    is_reported: bool = False
    """Whether the present silence was reported as a stall."""


class StallDetector:
    """Finds stalled backends among those with open streams."""

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        """Minimum duration of a silence that is a stall. It may be changed."""
        self._watched_backends: dict[Backend, _WatchedStreams] = {}

    def find_stalled_backends(
        self, now: float, backends_with_progress: Mapping[Backend, bool], *, lost_seconds: float = 0.0
    ) -> list[Backend]:
        """Record one look at all streams, and return the backends that it finds stalled, each once per silence.

        Args:
            now: Clock seconds.
            backends_with_progress: The backends with open streams, and whether any of these got bytes since the last
                look.
            lost_seconds: Time since the last look in which the gateway itself did not read. It does not count.
        """
        for backend, moves in backends_with_progress.items():
            self._record_look(backend, moves, now, lost_seconds)
        for backend in [backend for backend, watched in self._watched_backends.items() if watched.seen_at < now]:
            self._end_silence(backend, now)
        stalled = [
            backend
            for backend, moves in backends_with_progress.items()
            if not moves and self._is_backend_stalled(backend, now)
        ]
        for backend in stalled:
            self._watched_backends[backend].is_reported = True
        return stalled

    def _record_look(self, backend: Backend, moves: bool, now: float, lost_seconds: float) -> None:
        watched = self._watched_backends.get(backend)
        if watched is None:
            watched = self._watched_backends[backend] = _WatchedStreams(now, now)
        watched.seen_at = now
        watched.silent_since = min(watched.silent_since + lost_seconds, now)
        if moves:
            silence_seconds = now - watched.silent_since
            if silence_seconds * _PATIENCE > self.stall_seconds:
                watched.past_silences.append((now, silence_seconds))
            watched.silent_since = watched.last_output_at = now
            watched.is_reported = False

    def _end_silence(self, backend: Backend, now: float) -> None:
        """End the silence of a backend that has no streams. It starts again with the next stream."""
        watched = self._watched_backends[backend]
        if now - watched.seen_at > _REMEMBERED_SECONDS:
            del self._watched_backends[backend]
            return
        watched.silent_since, watched.last_output_at, watched.is_reported = math.inf, -math.inf, False

    def _is_backend_stalled(self, backend: Backend, now: float) -> bool:
        watched = self._watched_backends[backend]
        if watched.is_reported:
            return False
        while watched.past_silences and now - watched.past_silences[0][0] > _REMEMBERED_SECONDS:
            watched.past_silences.popleft()
        longest_seconds = max((seconds for _, seconds in watched.past_silences), default=0.0)
        if now - watched.silent_since <= max(self.stall_seconds, _PATIENCE * longest_seconds):
            return False
        # A peer that became silent shortly after it may have the same reason.
        recently = now - self.stall_seconds / 2
        return any(
            peer.last_output_at > recently and other.role is backend.role
            for other, peer in self._watched_backends.items()
        )


_PACE_SECONDS: Final = 3600.0
"""Total time of all answers at which the counts are halved, so that older answers count less."""


class StreamPace:
    """Moving average of the time between two parts of an answer from one backend."""

    def __init__(self) -> None:
        self._part_count = 0.0
        self._total_seconds = 0.0

    def add_parts(self, part_count: int, seconds: float) -> None:
        """Add a number of parts and the time in which they came, both summed over answers."""
        self._part_count += part_count
        self._total_seconds += seconds
        if self._total_seconds > _PACE_SECONDS:
            self._part_count /= 2
            self._total_seconds /= 2

    @property
    def mean_gap_seconds(self) -> float:
        """Average time between two parts. 0: none was added yet."""
        return self._total_seconds / self._part_count if self._part_count else 0.0
