"""Header lines that are forwarded: from a client to an engine, and from an engine to a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import aiohttp
import h11
import httptools
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, HttpResponseParser
from aiohttp.http_writer import _serialize_headers
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.api.passthrough import client_headers
from proxy.balancer.engines import EngineKeys
from proxy.common.errors import UpstreamError
from proxy.dialects.call import FORWARDED_HEADERS
from proxy.listener.replies import _is_acceptable_id, error_response
from proxy.upstream import Response
from proxy.upstream.upstream import RequestHeads
from tests.fuzz.answers import ENGINE, LOOP, Line, connected
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    X-Request-Id:\x20 traceparent:\x20 tracestate:\x20 Authorization:\x20 Bearer\x20k Host:\x20x \r\n \r\n\r\n
    Content-Length:\x200 Content-Length:\x203 Transfer-Encoding:\x20chunked Connection:\x20close,\x20x-a
    X-A:\x20b Connection:\x20upgrade\r\nUpgrade:\x20h2c Expect:\x20100-continue
    GET\x20/x\x20HTTP/1.1\r\nHost:\x20y\r\n\r\n Content-Type:\x20text/plain Retry-After:\x203 0\r\n\r\n \r \n
    \x00 \t \x20 \x7f \x0b \xc3\xbc \xff \xe2\x80\xa8 \xc4\x8a x*200 \x85 \xa0 \xad ; , :
    """
)

_heads = RequestHeads(EngineKeys(None))
_FRAMING = {"host", "content-type", "content-length", "accept-encoding"}


def check_headers(data: bytes) -> None:
    """Check that no header begins another one, or another message."""
    data = spelled(data, WORDS)
    for headers in _of_request(b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\n" + data + b"\r\n\r\n"):
        _check_towards_engine(headers)
    status = b"HTTP/1.1 400 Bad\r\n" + data + b"\r\n\r\n"
    LOOP.run_until_complete(_check_refusal(status))
    for answer in _of_response(status):
        _check_towards_client(client_headers(cast("aiohttp.ClientResponse", answer)))


def _of_request(raw: bytes) -> list[CIMultiDictProxy[str]]:
    """Return the headers of the requests that the front parser finds."""
    parser = HttpRequestParser(BaseProtocol(LOOP), LOOP, 2**16, auto_decompress=False)
    return [message.headers for message in _messages(parser, raw)]


def _of_response(raw: bytes) -> list[Any]:
    parser = HttpResponseParser(
        BaseProtocol(LOOP), LOOP, 2**16, response_with_body=False, read_until_eof=True, auto_decompress=False
    )
    return _messages(parser, raw)


def _messages(parser: HttpRequestParser | HttpResponseParser, raw: bytes) -> list[Any]:
    try:
        messages, _, _ = parser.feed_data(raw)
    except HttpProcessingError:
        return []
    return [message for message, _ in messages]


def _check_towards_engine(headers: Mapping[str, str]) -> None:
    passed_on = {name: headers[name] for name in ("authorization", *FORWARDED_HEADERS) if name in headers}
    request_id = headers.get("X-Request-Id", "")
    if _is_acceptable_id(request_id):
        passed_on["x-request-id"] = request_id
    head = _heads.render_head(ENGINE, "/v1/completions", 0, passed_on)
    expected = sorted(_FRAMING | {name for name, value in passed_on.items() if value or name != "authorization"})
    assert sorted(name for name, _ in _read_by_llhttp(head)) == expected
    fields = _read_by_h11(head)
    assert fields is None or sorted(name for name, _ in fields) == expected


def _check_towards_client(headers: CIMultiDict[str]) -> None:
    answer = web.StreamResponse(status=200, headers=headers)
    head = _serialize_headers("HTTP/1.1 200 OK", answer.headers)
    reader = httptools.HttpResponseParser(fields := _Fields())
    reader.feed_data(head)
    assert fields.names() == sorted(name.lower() for name, _ in answer.headers.items())


async def _check_refusal(raw: bytes) -> None:
    """Check the rejection of an engine as our connection reads it."""
    connection = connected(Line())
    heads: list[UpstreamError | None] = []
    response = Response(connection, heads.append)
    connection.begin_exchange(response, "/", b"", {}, answer_seconds=1.0)
    connection.data_received(raw)
    connection.connection_lost(None)
    if heads != [None]:
        return
    error = response.make_refusal("refused", 400, b"{}", response.headers)
    _check_towards_client(error_response(error).headers)


class _Fields:
    """Callbacks of httptools' parsers."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode().lower(), value))

    def names(self) -> list[str]:
        return sorted(name for name, _ in self.fields)


def _read_by_llhttp(head: bytes) -> list[tuple[str, bytes]]:
    fields = _Fields()
    httptools.HttpRequestParser(fields).feed_data(head)
    return fields.fields


def _read_by_h11(head: bytes) -> list[tuple[str, bytes]] | None:
    """Return h11's reading, or None where h11 is stricter: it rejects bytes above 127."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(head)
    try:
        event = reader.next_event()
    except h11.RemoteProtocolError:
        return None
    assert isinstance(event, h11.Request)
    assert isinstance(reader.next_event(), h11.EndOfMessage)
    assert reader.trailing_data[0] == b""
    return [(name.decode(), value) for name, value in event.headers]
