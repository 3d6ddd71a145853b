"""What a sampled request's trace has beside its record: who it is to others, and the legs that were sent for it.

Nothing here knows how traces are told: `proxy.observe.tracing` makes spans of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError

TRACEPARENT: Final = "traceparent"
"""The header by which a request is known to those who trace it (W3C Trace Context)."""

# 00-<32 digits of the trace id>-<16 of the span's>-<flags>
_SPAN_ID: Final = slice(36, 52)


class TracedLeg:
    """One request to one engine, sent for a sampled one."""

    __slots__ = ("backend", "began", "ended", "error", "is_whole", "path", "request_id", "span_id", "status")

    def __init__(self, span_id: int, backend: Backend, path: str, request_id: str | None, began: float) -> None:
        self.span_id = span_id
        self.backend = backend
        self.path = path
        self.request_id = request_id
        """What the engine was sent as X-Request-Id; None: nothing."""
        self.began = began
        self.ended: float | None = None
        """The clock's second; None: it is under way."""
        self.status = 0
        """Of the engine's answer; 0: it has not answered."""
        self.is_whole = False
        """All of the answer has arrived. If it has not, and there is no error, nobody waited for the rest."""
        self.error: UpstreamError | None = None


class Trace:
    """Of one sampled request."""

    def __init__(self, traceparent: str, clock: Callable[[], float], new_span_id: Callable[[], int]) -> None:
        """`traceparent`: what its calls have as the header of that name. `clock`: the record's."""
        self.traceparent = traceparent
        self.legs: list[TracedLeg] = []
        self._clock = clock
        self._new_span_id = new_span_id

    @property
    def id(self) -> str:
        """As people look for it: 32 hexadecimal digits."""
        return self.traceparent[3:35]

    def leg(self, backend: Backend, path: str, headers: Mapping[str, str]) -> TracedLeg:
        """One is sent now. `headers` have lower-case names."""
        leg = TracedLeg(self._new_span_id(), backend, path, headers.get("x-request-id"), self._clock())
        self.legs.append(leg)
        return leg

    def end_leg(self, leg: TracedLeg, status: int, *, is_whole: bool) -> None:
        """It is over. See TracedLeg."""
        leg.ended, leg.status, leg.is_whole = self._clock(), status, is_whole

    def child(self, leg: TracedLeg) -> str:
        """The header with which the engine goes on with this trace, below this leg."""
        return f"{self.traceparent[: _SPAN_ID.start]}{leg.span_id:016x}{self.traceparent[_SPAN_ID.stop :]}"


if TYPE_CHECKING:
    Traces = dict[str, Trace]
    """Those of the sampled requests under way, by their `traceparent`."""
