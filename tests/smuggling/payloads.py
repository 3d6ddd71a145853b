"""The payloads: bytes of one connection, and the requests that the gateway serves without a proxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

PATH: Final = b"/v1/completions"
OUTER, INNER = "outer", "inner"
"""Users that requests name: of a request that the client means to send, and of one that hides in another."""


@dataclass(frozen=True)
class Payload:
    """Bytes that a client writes on one connection.

    `served`: users of the requests that the gateway serves if it gets these bytes directly; () if it must reject them;
    None: it may do either, if both ends agree.
    """

    name: str
    raw: bytes
    served: tuple[str, ...] | None = ()


def content(user: str) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "user": user})


def head(
    *lines: bytes, request_line: bytes = b"POST %b HTTP/1.1" % PATH, host: bytes | None = b"Host: gateway"
) -> bytes:
    return b"\r\n".join([request_line, *([host] if host is not None else []), *lines, b"", b""])


def request(user: str, *lines: bytes) -> bytes:
    """Return an unambiguous request."""
    body = content(user)
    return head(b"Content-Length: %d" % len(body), *lines) + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


BODY: Final = content(OUTER)
LENGTH: Final = b"Content-Length: %d" % len(BODY)
CHUNKED: Final = b"Transfer-Encoding: chunked"
CLOSE: Final = b"Connection: close"
HIDDEN: Final = request(INNER, CLOSE)


def _length_of(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def _whole(
    name: str, *lines: bytes, body: bytes = BODY, served: tuple[str, ...] | None = (), **options: Any
) -> Payload:
    """Create a payload of one request with these header lines and this body."""
    return Payload(name, head(*lines, CLOSE, **options) + body, served)


ONE: Final = (OUTER,)

SANE: Final = [
    Payload("plain", request(OUTER, CLOSE), ONE),
    _whole("chunked", CHUNKED, body=chunked(BODY), served=ONE),
    Payload("two, one after the other", request(OUTER) + request(OUTER, CLOSE), (OUTER, OUTER)),
    Payload("three in a row", request(OUTER) * 2 + request(OUTER, CLOSE), (OUTER,) * 3),
    Payload("one refused, then a good one", request(OUTER).replace(b'"max_', b" max_") + request(OUTER, CLOSE), ONE),
    _whole(
        "a request in a body",
        LENGTH.replace(str(len(BODY)).encode(), b"%d" % (len(BODY) + len(HIDDEN))),
        body=HIDDEN + BODY,
    ),
    _whole("http/1.0", LENGTH, request_line=b"POST %b HTTP/1.0" % PATH, served=ONE),
    _whole("white space around a length", b"Content-Length: \t %d \t" % len(BODY), served=ONE),
    _whole("names in any case", b"cONTENT-lENGTH: %d" % len(BODY), served=ONE),
    _whole("codings in any case", b"Transfer-Encoding: ChuNKed", body=chunked(BODY), served=ONE),
    _whole("expects a continuation", LENGTH, b"Expect: 100-continue", served=ONE),
    Payload("an empty line before", b"\r\n" + request(OUTER, CLOSE), None),
    Payload("an empty line between", request(OUTER) + b"\r\n" + request(OUTER, CLOSE), None),
    Payload("an empty line behind", request(OUTER, CLOSE) + b"\r\n", ONE),
    _whole("a whole url", LENGTH, request_line=b"POST http://gateway%b HTTP/1.1" % PATH, served=None),
]

LENGTHS: Final = [
    _whole("two equal lengths", LENGTH, LENGTH, served=None),
    _whole("two different lengths", LENGTH, b"Content-Length: 0", body=BODY + HIDDEN),
    _whole("two lengths, the other way round", b"Content-Length: 0", LENGTH, body=BODY + HIDDEN),
    _whole("two lengths in one", b"Content-Length: %d, %d" % (len(BODY), len(BODY)), served=None),
    _whole("two different ones in one", b"Content-Length: 0, %d" % len(BODY)),
    *(
        _whole(f"length {spelling!r}", b"Content-Length: " + spelling % len(BODY), body=BODY)
        for spelling in (
            b"+%d",
            b"-%d",
            b"%d.0",
            b"0x%x",
            b"%d 0",
            b"%de0",
            b'"%d"',
            b"%d;",
            b"\x0b%d",
            b"%d\x0c",
            b"_%d",
        )
    ),
    _whole("length of another script", b"Content-Length: \xd9\xa5"),
    _whole("no length", b"Content-Length:"),
    _whole("leading zeros", b"Content-Length: 0000%d" % len(BODY), served=None),
    _whole("length beyond 64 bits", b"Content-Length: 18446744073709551617", body=HIDDEN),
    _whole("space before the colon", b"Content-Length : %d" % len(BODY), body=BODY + HIDDEN),
    _whole("space before the name", b"X: y", b" Content-Length: %d" % len(BODY)),
    _whole("underscore for a dash", b"Content_Length: %d" % len(BODY), body=BODY + HIDDEN, served=None),
]

ODD_CODINGS: Final = (
    *(
        b" xchunked",
        b" chunked, identity",
        b" identity, chunked",
        b" chunked, chunked",
        b" chunked;q=1",
        b" \x0bchunked",
    ),
    *(b" chunked\x0b", b" chunked,", b' "chunked"', b"\r\n chunked", b"", b" gzip", b" chun\x00ked", b" cow, chunked"),
    *(b" \xa0chunked", b" chun\xe2\x84\xaaed"),
)

CODINGS: Final = [
    _whole("cl.te", _length_of(b"0\r\n\r\n" + HIDDEN), CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    _whole("te.cl", CHUNKED, b"Content-Length: 4", body=chunked(HIDDEN)),
    _whole("te.cl with a length of zero", CHUNKED, b"Content-Length: 0", body=chunked(BODY)),
    _whole("te.te", CHUNKED, b"Transfer-Encoding: identity", body=chunked(BODY) + HIDDEN),
    _whole("te.te, the same", CHUNKED, CHUNKED, body=chunked(BODY), served=None),
    *(
        _whole(f"coding {coding!r}", b"Transfer-Encoding:" + coding, body=chunked(BODY) + HIDDEN)
        for coding in ODD_CODINGS
    ),
    *(
        _whole(f"length, and coding {coding!r}", LENGTH, b"Transfer-Encoding:" + coding, body=b"0\r\n\r\n" + HIDDEN)
        for coding in (*ODD_CODINGS, b"chunked", b"\tchunked")
    ),
    *(
        _whole(f"name {line!r}", LENGTH, line + b" chunked", body=b"0\r\n\r\n" + HIDDEN)
        for line in (
            *(b"Transfer-Encoding :", b"Transfer-Encoding\t:", b"Transfer-Encoding\x00:", b" Transfer-Encoding:"),
            *(
                b"X: y\nTransfer-Encoding:",
                b"X: y\rTransfer-Encoding:",
                b"X: y\x00\r\nTransfer-Encoding:",
                b"Transfer-Encoding::",
            ),
            *(b"\x0bTransfer-Encoding:", b"Transfer\xadEncoding:"),
        )
    ),
    _whole("name with an underscore", LENGTH, b"Transfer_Encoding: chunked", body=BODY, served=None),
    _whole(
        "http/1.0 in chunks", CHUNKED, body=chunked(BODY) + HIDDEN, request_line=b"POST %b HTTP/1.0" % PATH, served=None
    ),
    _whole("gzip, and then in chunks", b"Transfer-Encoding: gzip, chunked", body=chunked(BODY)),
]

CHUNKS: Final = [
    *(
        _whole(
            f"chunk of size {size!r}",
            CHUNKED,
            body=size.replace(b"%x", b"%x" % len(BODY)) + b"\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
        )
        for size in (b"0x%x", b"+%x", b"-%x", b"%xh", b" %x", b"%x g", b"\t%x", b"%x\x0b", b"_%x", b"%x,", b"", b'"%x"')
    ),
    _whole("size beyond 64 bits", CHUNKED, body=b"1%016x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n" + HIDDEN),
    _whole("size with leading zeros", CHUNKED, body=b"00000%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), served=None),
    _whole("extension", CHUNKED, body=b"%x;a=b\r\n%b\r\n0;c\r\n\r\n" % (len(BODY), BODY), served=None),
    _whole("extension with a line feed", CHUNKED, body=b"%x;a\nb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    _whole("extension with a carriage return", CHUNKED, body=b"%x;a\rb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    _whole(
        "extension that hides a chunk", CHUNKED, body=b"%x;\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), len(BODY), BODY)
    ),
    _whole("line feeds only", CHUNKED, body=chunked(BODY).replace(b"\r\n", b"\n")),
    _whole("carriage returns only", CHUNKED, body=chunked(BODY).replace(b"\r\n", b"\r")),
    _whole("line feed behind the size", CHUNKED, body=b"%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    _whole("line feed behind the data", CHUNKED, body=b"%x\r\n%b\n0\r\n\r\n" % (len(BODY), BODY)),
    _whole("nothing behind the data", CHUNKED, body=b"%x\r\n%b0\r\n\r\n" % (len(BODY), BODY)),
    _whole("two bytes that are no line end", CHUNKED, body=b"%x\r\n%bXX0\r\n\r\n" % (len(BODY), BODY) + HIDDEN),
    _whole("more data than it says", CHUNKED, body=b"%x\r\n%b!!\r\n0\r\n\r\n" % (len(BODY), BODY)),
    _whole("last chunk of many zeros", CHUNKED, body=b"%x\r\n%b\r\n0000\r\n\r\n" % (len(BODY), BODY), served=None),
    _whole("last chunk and a line feed", CHUNKED, body=b"%x\r\n%b\r\n0\n\n" % (len(BODY), BODY) + HIDDEN),
    _whole("no end", CHUNKED, body=b"%x\r\n%b\r\n" % (len(BODY), BODY)),
    *(
        _whole(f"trailer {line!r}", CHUNKED, body=b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(BODY), BODY, line), served=None)
        for line in (
            b"X: y",
            b"Content-Length: 99",
            b"Transfer-Encoding: chunked",
            b"Host: evil",
            b"Authorization: k",
            b"X : y",
            b"X",
        )
    ),
    _whole("trailer that hides a request", CHUNKED, body=b"%x\r\n%b\r\n0\r\nX: y\n\n" % (len(BODY), BODY) + HIDDEN),
]

LINES: Final = [
    Payload("line feeds everywhere", request(OUTER, CLOSE).replace(b"\r\n", b"\n")),
    Payload("line feed behind one line", request(OUTER, CLOSE).replace(b"close\r\n", b"close\n")),
    Payload("line feeds end the head", request(OUTER, CLOSE).replace(b"\r\n\r\n", b"\n\n")),
    _whole("no host", LENGTH, host=None),
    _whole("two hosts", LENGTH, b"Host: other"),
    _whole("host with a path", LENGTH, host=b"Host: gateway/x", served=None),
    _whole("a folded line", LENGTH, b"X: y\r\n\tz"),
    _whole("nul in a value", LENGTH, b"X: \x00"),
    _whole("carriage return in a value", LENGTH, b"X: y\rz"),
    _whole("delete in a value", LENGTH, b"X: \x7f", served=None),
    _whole("no colon", LENGTH, b"X"),
    _whole("no name", LENGTH, b": y"),
    _whole("a name of odd characters", LENGTH, b"X(y): z"),
    _whole("a value of 100,000 bytes", LENGTH, b"X: " + b"y" * 100_000),
    _whole("300 lines", LENGTH, *(b"X%d: y" % number for number in range(300))),
    *(
        _whole(f"request line {line!r}", LENGTH, request_line=line % PATH)
        for line in (
            *(b"post %b HTTP/1.1", b"POST\t%b HTTP/1.1", b"POST %b HTTP/1.1 "),
            *(b"POST %b HTTP/2.0", b"POST %b HTTP/0.9", b"POST %b HTTP/1.10", b"POST %b HTTP/11", b"POST %b http/1.1"),
            *(b"POST %b", b"POST %b x HTTP/1.1", b" POST %b HTTP/1.1", b"POST\x00 %b HTTP/1.1", b"PO(ST %b HTTP/1.1"),
        )
    ),
    _whole("two spaces before the path", LENGTH, request_line=b"POST  %b HTTP/1.1" % PATH, served=None),
    _whole("two spaces behind the path", LENGTH, request_line=b"POST %b  HTTP/1.1" % PATH, served=None),
    _whole("http/1.2", LENGTH, request_line=b"POST %b HTTP/1.2" % PATH, served=None),
    _whole("connect", LENGTH, request_line=b"CONNECT gateway:80 HTTP/1.1", body=BODY + HIDDEN),
    Payload(
        "get with a body", head(LENGTH, request_line=b"GET %b HTTP/1.1" % PATH) + BODY + request(OUTER, CLOSE), ONE
    ),
    Payload("head", head(request_line=b"HEAD %b HTTP/1.1" % PATH) + request(OUTER, CLOSE), ONE),
]

MEANINGS: Final = [
    *(
        _whole(f"connection: {names.decode()}", LENGTH, b"Connection: close, " + names, served=None)
        for names in (b"Content-Length", b"Transfer-Encoding", b"Host", b"Authorization", b"X-Request-Id, keep-alive")
    ),
    _whole(
        "upgrade to h2c",
        LENGTH,
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQAAP__",
        served=None,
    ),
    _whole(
        "upgrade to a web socket",
        LENGTH,
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: x",
        body=BODY + HIDDEN,
        served=None,
    ),
    _whole("expects an unknown thing", LENGTH, b"Expect: the-unexpected", served=None),
    _whole("expects twice", LENGTH, b"Expect: 100-continue", b"Expect: 100-continue", served=None),
    Payload(
        "expects, and hides a request in its body",
        head(_length_of(HIDDEN), b"Expect: 100-continue") + HIDDEN + request(OUTER, CLOSE),
        ONE,
    ),
    Payload(
        "refused, and a request in its body",
        head(_length_of(HIDDEN), request_line=b"POST /nowhere HTTP/1.1") + HIDDEN + request(OUTER, CLOSE),
        ONE,
    ),
    Payload(
        "too large, and a request in its body",
        head(b"Content-Length: 999999999", request_line=b"POST %b HTTP/1.1" % PATH) + HIDDEN,
    ),
    Payload(
        "in chunks to nowhere, and a request in its body",
        head(CHUNKED, request_line=b"POST /nowhere HTTP/1.1") + chunked(HIDDEN) + request(OUTER, CLOSE),
        ONE,
    ),
    Payload("ended early, and a request behind it", head(LENGTH, CLOSE) + BODY + HIDDEN, None),
    Payload(
        "http/1.0, and a request behind it", head(LENGTH, request_line=b"POST %b HTTP/1.0" % PATH) + BODY + HIDDEN, None
    ),
    Payload("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))),
    Payload("http/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
]

PAYLOADS: Final = [*SANE, *LENGTHS, *CODINGS, *CHUNKS, *LINES, *MEANINGS]
