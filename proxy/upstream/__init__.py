"""HTTP out: raw HTTP/1.1 connections to the engines, and the only place that knows transport errors.

Bytes are parsed by httptools inside `data_received` and handed to a Sink in the same call stack, so a streamed token
costs a function call and not a task switch. Connections are kept alive and reused per backend. Every failure leaves
this package as an UpstreamError that says whether the engine can have seen the request.
"""

from proxy.upstream.response import Response, Sink, upstream_error
from proxy.upstream.upstream import Upstream, connect_problem

__all__ = ["Response", "Sink", "Upstream", "connect_problem", "upstream_error"]
