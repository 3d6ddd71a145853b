"""A collector: takes traces by OTLP over HTTP, as one of OpenTelemetry's would, and keeps them as they came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.asking import until

ERROR = trace_pb2.Status.STATUS_CODE_ERROR
KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True)
class Received:
    """One span."""

    span: trace_pb2.Span
    resource: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def kind(self) -> str:
        return KINDS[self.span.kind]

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Empty: it has none."""
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)

    @property
    def error(self) -> str | None:
        """`error.type` of a span that has failed; None: it has not."""
        return self.attributes["error.type"] if self.span.status.code == ERROR else None


@dataclass
class Collector:
    """Keeps the spans that it accepts. A trace has arrived completely when the span of its request has."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers; 200 if none are left."""
    headers: list[dict[str, str]] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        status = self.answers.pop(0) if self.answers else 200
        body = await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if status == 200:
            message = ExportTraceServiceRequest.FromString(body)
            self.received += [
                Received(span, _values(spans.resource.attributes))
                for spans in message.resource_spans
                for scope in spans.scope_spans
                for span in scope.spans
            ]
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(status=status, body=answer, content_type="application/x-protobuf")

    @property
    def requests(self) -> list[Received]:
        """Return the spans of requests."""
        return [span for span in self.received if span.kind == "server"]

    async def has(self, requests: int) -> None:
        """Wait for the spans of this number of requests."""
        await until(lambda: len(self.requests) >= requests, f"the spans of {requests} requests")

    def below(self, parent: Received) -> list[Received]:
        """Return the children of a span, in the order of their start."""
        found = [span for span in self.received if span.parent_id == parent.id and span.trace_id == parent.trace_id]
        return sorted(found, key=lambda one: one.span.start_time_unix_nano)

    def tree(self, parent: Received) -> list[Any]:
        """Return the names below a span, each with those below it."""
        return [(span.name, below) if (below := self.tree(span)) else span.name for span in self.below(parent)]


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    """Run a collector inside this context."""
    collector = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", collector.take)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def _values(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    return getattr(value, str(value.WhichOneof("value")))
