"""HTTP out: raw HTTP/1.1 connections to the engines, where these are, and the only place that knows transport errors.

Bytes are parsed inside `data_received` and handed to an Exchange in the same call stack, so a streamed
token costs a function call and not a task switch. Connections are kept alive and reused per backend. Every failure
leaves this package as an UpstreamError that says whether the engine can have seen the request. What is not hot goes
through aiohttp's client, to the same addresses.
"""

from proxy.upstream.connection import EngineConnection, Exchange, Sink, upstream_error
from proxy.upstream.engine_client import BufferedResponse, EngineClient, EngineRequest, EngineRequestError, read_bounded
from proxy.upstream.names import AddressProblem, AddressRules, Names, connect_problem, is_odd_literal
from proxy.upstream.response import Response
from proxy.upstream.silences import SilenceChecks
from proxy.upstream.traced import TracedUpstream
from proxy.upstream.upstream import Upstream, UpstreamOptions

__all__ = [
    "AddressProblem",
    "AddressRules",
    "BufferedResponse",
    "EngineClient",
    "EngineConnection",
    "EngineRequest",
    "EngineRequestError",
    "Exchange",
    "Names",
    "Response",
    "SilenceChecks",
    "Sink",
    "TracedUpstream",
    "Upstream",
    "UpstreamOptions",
    "connect_problem",
    "is_odd_literal",
    "read_bounded",
    "upstream_error",
]
