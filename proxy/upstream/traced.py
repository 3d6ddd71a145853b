"""Connections that record the legs of sampled requests as spans.

The `traceparent` of a call identifies its request. If the request is sampled, the leg is recorded in its trace, and the
engine receives the `traceparent` of the leg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.observe.record import TRACEPARENT
from proxy.upstream.connection import EngineConnection, EngineExchange
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.backend import Backend
    from proxy.common.errors import UpstreamError
    from proxy.observe.record import RequestTrace, TracedLeg, Traces
    from proxy.wire.document import Body


class TracedUpstream(Upstream):
    """An Upstream whose connections record legs for traces."""

    def __init__(self, traces: Traces, *given: Any, **named: Any) -> None:
        """Store the traces of the running sampled requests. Upstream describes the other arguments."""
        super().__init__(*given, **named)
        self._running_traces = traces

    def return_connection(self, connection: EngineConnection) -> None:
        assert isinstance(connection, TracedConnection)
        connection.end_traced_leg()
        super().return_connection(connection)

    def _new_connection(self, backend: Backend, address: str | None) -> EngineConnection:
        render, clock = self._request_heads.render_head, self._clock
        return TracedConnection(
            self._running_traces, backend, self._loop, self.return_connection, render, clock, address
        )


class TracedConnection(EngineConnection):
    """An EngineConnection whose exchange may be a leg of a sampled request."""

    def __init__(self, traces: Traces, *given: Any) -> None:
        super().__init__(*given)
        self._running_traces = traces
        self._request_trace: RequestTrace | None = None
        self._traced_leg: TracedLeg | None = None
        """The running leg. It and `_request_trace` are None unless the exchange is a leg of a sampled request."""

    def begin_exchange(
        self, exchange: EngineExchange, path: str, body: Body, headers: Mapping[str, str], *, answer_seconds: float
    ) -> None:
        trace = self._running_traces.get(headers.get(TRACEPARENT, ""))
        if trace is not None:
            self._request_trace, self._traced_leg = trace, trace.begin_leg(self.backend, path, headers)
            headers = {**headers, TRACEPARENT: trace.make_child_header(self._traced_leg)}
        super().begin_exchange(exchange, path, body, headers, answer_seconds=answer_seconds)

    def end_traced_leg(self) -> None:
        """End the leg, if there is one. May be called again."""
        if self._request_trace is not None and self._traced_leg is not None:
            answered = self._has_head
            self._request_trace.end_leg(
                self._traced_leg, self.reader.status if answered else 0, is_whole=answered and self.reader.is_complete
            )
        self._request_trace = self._traced_leg = None

    def _end_exchange(self, error: UpstreamError | None) -> None:
        if self._traced_leg is not None:
            self._traced_leg.error = error
        super()._end_exchange(error)
