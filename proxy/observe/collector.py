"""OpenTelemetry's SDK, with one log line if the collector is gone, slow, or refuses spans.

The SDK sends in a thread, gives up after OTEL_EXPORTER_OTLP_TIMEOUT, and drops spans that do not fit into its queue. It
would log each of these; `_ExportReports` logs them once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from uuid import uuid4

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from proxy import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from proxy.settings import Tracing

logger = logging.getLogger("proxy.tracing.collector")

# Limit for sending the last spans.
_FLUSH_SECONDS: Final = 2.0
# Maximum time that the event loop waits for the interpreter lock while the exporting thread encodes spans. With
# Python's default of 5 ms, timers were 14 ms late during exports; with this value, 1 ms.
_SWITCH_SECONDS: Final = 0.0005


class SpanIds(RandomIdGenerator):
    """Random span ids, except for spans whose id engines know already."""

    next_span_id: int | None = None
    """Id of the next span; None: a random one."""

    def generate_span_id(self) -> int:
        given, self.next_span_id = self.next_span_id, None
        return super().generate_span_id() if given is None else given


@asynccontextmanager
async def export_spans(
    settings: Tracing, is_news: Callable[[str, str], bool] = lambda subject, word: True
) -> AsyncIterator[tuple[TracerProvider, SpanIds]]:
    """Export finished spans to the collector of the settings inside this context.

    Leaving sends the rest, with a time limit. `is_news`: see LogOnce.
    """
    assert settings.endpoint is not None
    ids = SpanIds()
    reports = _ExportReports(asyncio.get_running_loop(), settings.endpoint, is_news)
    session = None if settings.endpoint.startswith("https:") else _session_without_proxy()
    exporter = _ReportingExporter(OTLPSpanExporter(endpoint=settings.endpoint, session=session), reports)
    provider = TracerProvider(
        sampler=None if settings.sample_ratio is None else ParentBasedTraceIdRatio(settings.sample_ratio),
        resource=_make_resource(),
        id_generator=ids,
        shutdown_on_exit=False,
    )
    sdk_logger = logging.getLogger("opentelemetry")
    # For good, and with a handler: an abandoned thread may still complain, and Python would print that.
    sdk_logger.propagate = False
    sdk_logger.handlers[:] = [logging.NullHandler(), reports]
    provider.add_span_processor(BatchSpanProcessor(exporter))
    switched_seconds = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield provider, ids
    finally:
        await _send_rest(provider, exporter)
        sys.setswitchinterval(switched_seconds)
        sdk_logger.removeHandler(reports)


def _session_without_proxy() -> requests.Session:
    """Return a session that ignores http_proxy.

    A collector without TLS is in this network. One with TLS may be a service behind a company's proxy.
    """
    session = requests.Session()
    session.trust_env = False
    return session


def _make_resource() -> Resource:
    """Return OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, with defaults of the gateway."""
    configured = Resource.create()
    own = Resource({"service.version": __version__, "service.instance.id": str(uuid4())})
    if str(configured.attributes["service.name"]).startswith("unknown_service"):
        configured = configured.merge(Resource({"service.name": "pdproxy"}))
    return own.merge(configured)


async def _send_rest(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Send the rest in a thread, and wait at most the limit."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()

    def end() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=end, name="traces", daemon=True).start()
    try:
        await asyncio.wait_for(is_over.wait(), _FLUSH_SECONDS)
    except TimeoutError:
        exporter.shutdown()  # the SDK does not retry any more


class _ExportReports(logging.Handler):
    """Complaints of the SDK, from any thread, and their end; each is logged once, in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: str, is_news: Callable[[str, str], bool]) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        parts = urlsplit(endpoint)
        self._collector_address = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        self._is_news = is_news
        self._is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter"):
            self.on_spans_refused(record.getMessage())

    def on_spans_refused(self, why: str) -> None:
        """Note that spans were refused. May be called in any thread. Callers check for earlier refusals."""
        self._call_in_loop(self._log_failure, why)

    def on_spans_accepted(self) -> None:
        """Note that spans were accepted. May be called in any thread."""
        if self._is_failing:
            self._call_in_loop(self._log_recovery)

    def _call_in_loop(self, method: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(method, *arguments)

    def _log_failure(self, why: str) -> None:
        if not self._is_failing and self._is_news("collector", "lost"):
            logger.warning(
                "tracing: the collector refuses spans, which are dropped: %s: %s", self._collector_address, why
            )
        self._is_failing = True

    def _log_recovery(self) -> None:
        if self._is_failing and self._is_news("collector", "back"):
            logger.info("tracing: the collector accepts spans again: %s", self._collector_address)
        self._is_failing = False


class _ReportingExporter(SpanExporter):
    """Notes whether spans are accepted. The SDK's own exporter logs or raises the reason."""

    def __init__(self, exporter: SpanExporter, reports: _ExportReports) -> None:
        self._span_exporter = exporter
        self._export_reports = reports

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._span_exporter.export(spans)
        except Exception as error:
            self._export_reports.on_spans_refused(f"{type(error).__name__}: {error}")
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._export_reports.on_spans_accepted()
        else:
            self._export_reports.on_spans_refused("no reason was given")
        return result

    def shutdown(self) -> None:
        self._span_exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._span_exporter.force_flush(timeout_millis)
