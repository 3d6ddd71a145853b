"""Heads that the fast path accepts are read in the same way by aiohttp, llhttp and our guards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import httptools
import pytest
from aiohttp import HttpVersion, HttpVersion11, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser
from hypothesis import event, example, given
from hypothesis import strategies as st
from multidict import CIMultiDictProxy

from proxy.gateway.intake import MAX_HEAD_BYTES, RequestHead, is_one_request, read_head
from proxy.listener.connection import find_refusal
from tests.fuzz.cutting import words

PATH = b"/v1/chat/completions"
LINE = b"POST " + PATH + b" HTTP/1.1\r\n"
PLAIN = LINE + b"Host: x\r\nContent-Length: 2\r\n\r\n"
SECOND = LINE + b"Host: second\r\nContent-Length: 0\r\n\r\n"
LONGEST_TRIED = 5000
LOOP = asyncio.new_event_loop()


def any_of(text: str) -> st.SearchStrategy[bytes]:
    """One of these words, spelled as in Python, or none."""
    return st.sampled_from((*words(text), b""))


METHODS = any_of(r"POST GET post POST\x20 \x20POST \r\nPOST PRI")
TARGETS = any_of(
    r"""
    /v1/chat/completions /v1/chat/completions?a=b /v1/chat/completions#f http://x/v1/chat/completions //x/v1 * /V1/Chat
    /v1/%63hat /a/../b /v1/chat\x20completions /v1/ch\xc3\xa4t /a*64
    """
)
VERSIONS = any_of(r"HTTP/1.1 HTTP/1.0 HTTP/1.2 HTTP/2.0 http/1.1 HTTP/1.1\x20")
ENDINGS = any_of(r"\r\n \n \r \r\r\n \r\n\x20 \r\n\t \n\n \0\r\n \r\n\r\n")
COLONS = any_of(r":\x20 : :\t :\x20\x20\t\x20 \x20: \t: :: :\x0b")
LENGTHS = any_of(
    r"""
    0 1 2 17 002 00000000000000002 +2 -2 2,\x202 2,2 0x2 2\x202 2; \xc2\xb2 99999999999999 9999999999999999
    18446744073709551618 2\t 2e0 2_0 2.0
    """
)
NAMES = any_of(
    r"""
    Host host Content-Length content-length CONTENT-LENGTH Content-Type Authorization X-Api-Key X-Admin-Key Connection
    Keep-Alive Transfer-Encoding Expect Upgrade TE Trailer Content-Encoding Cookie X-A x-a Content_Length
    Content-Length\x20 X\x20A X\0A X-\xc3\xa4 (x) x*64 x*65 Proxy-Connection HTTP2-Settings Origin
    """
)
VALUES = st.one_of(
    LENGTHS,
    any_of(
        r"""
        x x:8000 [::1]:80 a\x20b a/b a,b "x" close keep-alive Keep-Alive upgrade keep-alive,\x20close chunked identity
        gzip,\x20chunked 100-continue h2c trailers \xff \xc3\xa4 a\x0bb a\x7fb a\tb a\rb a\nb a\0b \x20 v*4096 v*4097
        """
    ),
    st.binary(max_size=12),
)
FIELDS = st.tuples(NAMES, COLONS, VALUES, ENDINGS).map(b"".join)
PLAIN_FIELDS = st.sampled_from(
    words(
        r"""
        Content-Type:\x20application/json Authorization:\x20Bearer\x20k Accept:\x20*/* Connection:\x20keep-alive X-A:
        Cookie:\x20a=b;\x20c="d" User-Agent:\x20a/1\x20(b;\x20c) x-request-id:\tr-1\x20\t traceparent:\x2000-ab-cd-01
        """
    )
)
PARTS = ("method", "target", "version", "line", "host", "length", "end", "field", "field")


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads of which one part or two may be odd."""
    odd = draw(st.lists(st.sampled_from(PARTS), max_size=2))

    def part(name: str, plain: bytes, strategy: st.SearchStrategy[bytes]) -> bytes:
        return draw(strategy) if name in odd else plain

    line = b"%b %b %b%b" % (
        part("method", b"POST", METHODS),
        part("target", PATH, TARGETS),
        part("version", b"HTTP/1.1", VERSIONS),
        part("line", b"\r\n", ENDINGS),
    )
    host = b"Host%b%b\r\n" % (part("host", b": ", COLONS), part("host", b"x", VALUES))
    length = b"Content-Length%b%b\r\n" % (part("length", b": ", COLONS), part("length", b"2", LENGTHS))
    plain = [field + b"\r\n" for field in draw(st.lists(PLAIN_FIELDS, max_size=4, unique=True))]
    fields = [host, length, *plain, *(draw(FIELDS) for name in odd if name == "field")]
    return line + b"".join(draw(st.permutations(fields))) + part("end", b"\r\n", ENDINGS)


@st.composite
def nearly_plain(draw: st.DrawFn) -> bytes:
    """Plain heads, of which some bytes are others, gone, or there twice."""
    data = bytearray(PLAIN[:-2] + b"".join(draw(st.lists(FIELDS, max_size=1))) + b"\r\n")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


@dataclass
class Read:
    """A whole request as another parser has read it, for `find_refusal`."""

    method: str
    raw_path: str
    headers: CIMultiDictProxy[str]
    version: HttpVersion
    keeps_alive: bool
    body: bytes


def read_by_aiohttp(data: bytes) -> list[Read]:
    parser = HttpRequestParser(BaseProtocol(LOOP), LOOP, 2**16, auto_decompress=False)
    messages, is_upgraded, _ = parser.feed_data(data)
    assert not is_upgraded
    return [
        Read(
            one.method,
            one.path,
            one.headers,
            one.version,
            not one.should_close,
            body.read_nowait(),
        )
        for one, body in messages
        if body.is_eof()
    ]


@dataclass
class Llhttp:
    """The requests that llhttp finds in some bytes."""

    heads: list[tuple[bytes, bytes, str, bool]] = field(default_factory=list)
    fields: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    is_whole: int = 0

    def on_message_begin(self) -> None:
        self.fields.append({})
        self.bodies.append(b"")

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert name.decode().lower() not in self.fields[-1]
        self.fields[-1][name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        parser = self.parser
        self.heads.append((parser.get_method(), self.url, parser.get_http_version(), parser.should_keep_alive()))

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.is_whole += 1

    def read(self, data: bytes) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)


def check(data: bytes) -> RequestHead | None:
    """Whatever is read as a plain head is the same request to everybody else, and so is the one behind it."""
    head = read_head(data)
    if head is None:
        return None
    assert data[head.head_size_bytes - 4 : head.head_size_bytes] == b"\r\n\r\n"
    if head.body_bytes > LONGEST_TRIED:
        return head
    body = b"{" + b"x" * (head.body_bytes - 2) + b"}" if head.body_bytes > 1 else b"x" * head.body_bytes
    whole = data[: head.head_size_bytes] + body + SECOND

    first, second = read_by_aiohttp(whole)
    assert second.headers["host"] == "second"
    assert (first.method, first.raw_path, first.version) == ("POST", head.request_path, HttpVersion11)
    assert (first.body, first.keeps_alive) == (body, True)
    assert {name.lower(): value for name, value in first.headers.items()} == head.header_fields
    assert len(first.headers) == len(head.header_fields)
    assert find_refusal(cast("web.BaseRequest", first)) is None

    seen = Llhttp()
    seen.read(whole)
    assert seen.is_whole == 2
    assert seen.heads[0] == (b"POST", head.request_path.encode(), "1.1", True)
    assert {name: value.strip(" \t") for name, value in seen.fields[0].items()} == head.header_fields
    assert seen.bodies == [body, b""]
    return head


@example(PLAIN)
@example(LINE + b"Host:x\r\nContent-Length:\t2 \r\nX-A:\r\nconnection: Keep-Alive\r\n\r\n")
@given(heads())
def test_plain_head_is_read_alike_by_all_parsers(data: bytes) -> None:
    event("plain" if check(data) else "not plain")


@given(nearly_plain())
def test_mutated_head_is_read_alike_by_all_parsers(data: bytes) -> None:
    event("plain" if check(data) else "not plain")


@given(heads(), st.integers(0, 400), st.binary(max_size=20))
def test_head_has_its_exact_length(data: bytes, at: int, behind: bytes) -> None:
    head = read_head(data)
    if head is not None:
        assert read_head(data[: min(at, head.head_size_bytes - 1)]) is None
        assert read_head(data[: head.head_size_bytes] + behind) == head


@example(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"")
@example(b"DELETE /v1/x?y=z HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", b"{}")
@given(
    st.one_of(heads(), heads().map(lambda data: b"GET" + data.removeprefix(b"POST")), nearly_plain()),
    st.sampled_from((b"", b"{}", b"x" * 17, b"{}\r\n", b"2\r\n{}\r\n0\r\n\r\n")),
)
def test_one_request_is_read_alike_by_all_parsers(data: bytes, behind: bytes) -> None:
    data += behind
    event("one request" if is_one_request(data) else "not certainly")
    if is_one_request(data):
        first, second = read_by_aiohttp(data + SECOND)
        assert second.headers["host"] == "second"
        assert first.keeps_alive
        seen = Llhttp()
        seen.read(data + SECOND)
        assert seen.is_whole == 2
        assert seen.heads[1] == (b"POST", PATH, "1.1", True)


@pytest.mark.parametrize("behind", [b"", b"{", b"{}P", b"{}\r\n", b"{}" + PLAIN])
def test_incomplete_or_several_requests_are_not_one_request(behind: bytes) -> None:
    assert is_one_request(PLAIN + b"{}")
    assert not is_one_request(PLAIN + behind)


@example(PLAIN, LINE + b"Host: x\r\nContent-Length: 17\r\n\r\n")
@example(PLAIN, LINE + b"Host: x\r\nContent-Length: 2 \r\n\r\n")
@example(PLAIN, LINE + b"Host: x\r\nContent-Length: \r\n\r\n")
@given(heads(), st.one_of(heads(), nearly_plain()))
def test_head_does_not_depend_on_the_one_before(first: bytes, second: bytes) -> None:
    assert read_head(second, read_head(first)) == read_head(second)


@pytest.mark.parametrize(
    "value",
    [b"0", b"3", b"17", b"002", b"9" * 15, b"9" * 16, b"", b"2 ", b"+2", b"2, 2", b"0x2", b"\xb2", b"2\r\nX: y"],
)
@given(heads())
def test_only_the_length_may_differ_from_the_head_before(value: bytes, first: bytes) -> None:
    head = read_head(first)
    if head is not None:
        for rest in (b"", b"{}", b"7\r\n\r\n"):
            second = head.bytes_before_length + value + head.bytes_after_length + rest
            assert read_head(second, head) == read_head(second)


def test_head_that_grows_too_long_is_not_plain() -> None:
    field = b"X-A: " + b"v" * 4090 + b"\r\n"
    left = MAX_HEAD_BYTES - len(with_fields(field, b"X-B: \r\n"))
    longest = with_fields(field, b"X-B: " + b"v" * left + b"\r\n")
    head = read_head(longest)
    assert head is not None
    assert head.head_size_bytes == MAX_HEAD_BYTES
    assert read_head(head.bytes_before_length + b"17" + head.bytes_after_length, head) is None


def with_fields(*lines: bytes, host: bytes = b"Host: x\r\n", length: bytes = b"Content-Length: 2\r\n") -> bytes:
    return LINE + host + length + b"".join(lines) + b"\r\n"


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        with_fields(
            b"Content-Type: application/json\r\n", b"Authorization: Bearer k\r\n", b"User-Agent: a/1 (b; c)\r\n"
        ),
        with_fields(b"Accept: */*\r\n", b"Accept-Encoding: gzip, deflate, br\r\n", b"Connection: keep-alive\r\n"),
        with_fields(length=b"content-length: 00\r\n"),
        with_fields(host=b"HOST: [::1]:8000\r\n"),
    ],
)
def test_heads_of_common_clients_are_plain(data: bytes) -> None:
    assert check(data) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PLAIN.replace(b"POST", b"GET"),
        PLAIN.replace(PATH, PATH + b"?a=b"),
        PLAIN.replace(PATH, b"http://x" + PATH),
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"\r\n", b"\n"),
        b"\r\n" + PLAIN,
        with_fields(b"Host: y\r\n"),
        with_fields(b"content-length: 2\r\n"),
        with_fields(b"X-A: 1\r\n", b"x-a: 2\r\n"),
        with_fields(b"X-A: 1\r\n 2\r\n"),
        with_fields(b"X-A : 1\r\n"),
        with_fields(b"X-A: \xc3\xa4\r\n"),
        with_fields(b"X-A: a\x7f\r\n"),
        with_fields(b"Transfer-Encoding: chunked\r\n"),
        with_fields(b"Transfer-Encoding: chunked\r\n", length=b""),
        with_fields(b"Expect: 100-continue\r\n"),
        with_fields(b"Upgrade: h2c\r\n", b"Connection: upgrade\r\n"),
        with_fields(b"Content-Encoding: gzip\r\n"),
        with_fields(b"Connection: close\r\n"),
        with_fields(length=b""),
        with_fields(length=b"Content-Length: \r\n"),
        with_fields(length=b"Content-Length: +2\r\n"),
        with_fields(length=b"Content-Length: 2, 2\r\n"),
        with_fields(length=b"Content-Length: 9999999999999999\r\n"),
        with_fields(host=b""),
        with_fields(host=b"Host:\r\n"),
        with_fields(host=b"Host: a/b\r\n"),
        with_fields(*(b"X-%d: 1\r\n" % number for number in range(63))),
        with_fields(b"X-A: " + b"v" * 4000 + b"\r\n", b"X-B: " + b"v" * MAX_HEAD_BYTES + b"\r\n"),
    ],
)
def test_unusual_heads_are_not_plain(data: bytes) -> None:
    assert read_head(data) is None
