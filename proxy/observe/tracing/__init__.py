"""Spans for OpenTelemetry: requests, attempts and legs. Needs the extra `otel`.

`tracer` makes the spans of sampled requests after their end; `spans` defines their contents; `collector` exports them
through OpenTelemetry's SDK, which never delays a request.
"""

from proxy.observe.tracing.collector import exporting
from proxy.observe.tracing.spans import TracedGateway
from proxy.observe.tracing.tracer import Tracer

__all__ = ["TracedGateway", "Tracer", "exporting"]
