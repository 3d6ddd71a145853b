"""Spans for OpenTelemetry: of each sampled request, its attempts, and their legs. Needs the extra `otel`.

`tracer` hears of requests and makes their spans when they are over; `spans` says what is in them; `collector` has
OpenTelemetry's SDK send them, which never holds a request up.
"""

from proxy.observe.tracing.collector import exporting
from proxy.observe.tracing.spans import Traced
from proxy.observe.tracing.tracer import Tracer

__all__ = ["Traced", "Tracer", "exporting"]
