"""Connections that record the legs of sampled requests as spans.

The `traceparent` of a call identifies its request. If the request is sampled, the leg is recorded in its trace, and the
engine receives the `traceparent` of the leg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.observe.record import TRACEPARENT
from proxy.upstream.connection import EngineConnection, Exchange
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError
    from proxy.observe.record import Trace, TracedLeg, Traces
    from proxy.wire.document import Body


class TracedUpstream(Upstream):
    """An Upstream whose connections record legs for traces."""

    def __init__(self, traces: Traces, *given: Any, **named: Any) -> None:
        """Store the traces of the running sampled requests. Upstream describes the other arguments."""
        super().__init__(*given, **named)
        self._traces = traces

    def give_back(self, connection: EngineConnection) -> None:
        assert isinstance(connection, TracedConnection)
        connection.end_leg()
        super().give_back(connection)

    def _new_connection(self, backend: Backend, address: str | None) -> EngineConnection:
        render, clock = self._heads.render, self._clock
        return TracedConnection(self._traces, backend, self._loop, self.give_back, render, clock, address)


class TracedConnection(EngineConnection):
    """An EngineConnection whose exchange may be a leg of a sampled request."""

    def __init__(self, traces: Traces, *given: Any) -> None:
        super().__init__(*given)
        self._traces = traces
        self._trace: Trace | None = None
        self._leg: TracedLeg | None = None
        """The running leg. It and `_trace` are None unless the exchange is a leg of a sampled request."""

    def begin(
        self, exchange: Exchange, path: str, body: Body, headers: Mapping[str, str], *, answer_seconds: float
    ) -> None:
        trace = self._traces.get(headers.get(TRACEPARENT, ""))
        if trace is not None:
            self._trace, self._leg = trace, trace.leg(self.backend, path, headers)
            headers = {**headers, TRACEPARENT: trace.child_header(self._leg)}
        super().begin(exchange, path, body, headers, answer_seconds=answer_seconds)

    def end_leg(self) -> None:
        """End the leg, if there is one. May be called again."""
        if self._trace is not None and self._leg is not None:
            answered = self._has_head
            self._trace.end_leg(
                self._leg, self.reader.status if answered else 0, is_whole=answered and self.reader.is_complete
            )
        self._trace = self._leg = None

    def _end(self, error: UpstreamError | None) -> None:
        if self._leg is not None:
            self._leg.error = error
        super()._end(error)
