"""HTTP/1.1 connections to engines, their addresses, and the translation of transport errors.

Bytes are parsed inside `data_received` and passed to an Exchange in the same call stack, so a streamed token costs a
function call instead of a task switch. Connections are kept alive and reused per backend. Every failure leaves this
package as an UpstreamError, which shows whether the engine may have received the request. Requests that are not on the
hot path use the client of aiohttp, with the same addresses.
"""

from proxy.upstream.connection import BodySink, EngineConnection, EngineExchange, make_upstream_error
from proxy.upstream.engine_client import BufferedResponse, EngineClient, EngineRequest, EngineRequestError, read_bounded
from proxy.upstream.names import AddressProblem, AddressRules, HostNames, describe_connect_error, is_odd_literal
from proxy.upstream.response import Response
from proxy.upstream.silences import SilenceChecks
from proxy.upstream.traced import TracedUpstream
from proxy.upstream.upstream import Upstream, UpstreamOptions

__all__ = [
    "AddressProblem",
    "AddressRules",
    "BodySink",
    "BufferedResponse",
    "EngineClient",
    "EngineConnection",
    "EngineExchange",
    "EngineRequest",
    "EngineRequestError",
    "HostNames",
    "Response",
    "SilenceChecks",
    "TracedUpstream",
    "Upstream",
    "UpstreamOptions",
    "describe_connect_error",
    "is_odd_literal",
    "make_upstream_error",
    "read_bounded",
]
