"""The trace of a sampled request: its place among other traces, and the legs that were sent for it.

This module does not know how traces are exported: `proxy.observe.tracing` makes spans of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError

TRACEPARENT: Final = "traceparent"
"""The header with the trace context of a request (W3C Trace Context)."""

# 00-<32 digits of the trace id>-<16 digits of the span id>-<flags>
_SPAN_ID: Final = slice(36, 52)


class TracedLeg:
    """One request to one engine, sent for a sampled request."""

    __slots__ = ("backend", "began", "ended", "error", "is_whole", "path", "request_id", "span_id", "status")

    def __init__(self, span_id: int, backend: Backend, path: str, request_id: str | None, began: float) -> None:
        self.span_id = span_id
        self.backend = backend
        self.path = path
        self.request_id = request_id
        """X-Request-Id that the engine was sent; None if there was none."""
        self.began = began
        self.ended: float | None = None
        """Clock seconds of the end; None while it runs."""
        self.status = 0
        """Status of the engine's answer; 0 if there is none."""
        self.is_whole = False
        """Whether the whole answer has arrived. If not, and there is no error, the gateway stopped reading."""
        self.error: UpstreamError | None = None


class Trace:
    """The trace of one sampled request."""

    def __init__(self, traceparent: str, clock: Callable[[], float], new_span_id: Callable[[], int]) -> None:
        """Start the trace. `traceparent`: value of this header on the request's calls. `clock`: clock of the record."""
        self.traceparent = traceparent
        self.legs: list[TracedLeg] = []
        self._clock = clock
        self._new_span_id = new_span_id

    @property
    def id(self) -> str:
        """Return the trace id as 32 hexadecimal digits, the form that people search for."""
        return self.traceparent[3:35]

    def leg(self, backend: Backend, path: str, headers: Mapping[str, str]) -> TracedLeg:
        """Note the start of a leg. `headers` have lower-case names."""
        leg = TracedLeg(self._new_span_id(), backend, path, headers.get("x-request-id"), self._clock())
        self.legs.append(leg)
        return leg

    def end_leg(self, leg: TracedLeg, status: int, *, is_whole: bool) -> None:
        """Note the end of a leg; see TracedLeg."""
        leg.ended, leg.status, leg.is_whole = self._clock(), status, is_whole

    def child(self, leg: TracedLeg) -> str:
        """Return the header with which the engine continues this trace, below this leg."""
        return f"{self.traceparent[: _SPAN_ID.start]}{leg.span_id:016x}{self.traceparent[_SPAN_ID.stop :]}"


if TYPE_CHECKING:
    Traces = dict[str, Trace]
    """Traces of the running sampled requests, by `traceparent`."""
