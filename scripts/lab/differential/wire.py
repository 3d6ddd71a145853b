"""Just enough of HTTP/1.1 for an engine that writes everything down: read a request, write an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Heard:
    """A request as it arrived. Header names are in lower case."""

    role: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """JSON, or a stream of events."""

    status: int = 200
    payload: object = None
    events: Sequence[str] | None = None


async def read(role: str, reader: asyncio.StreamReader) -> Heard | None:
    """The next request of a connection; None when it has ended, or when it does not speak HTTP/1.1."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, version = rest.partition(" ")
    if version != "HTTP/1.1":  # a router looks whether gRPC is spoken here
        return None
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Heard(role, method, urlsplit(path).path, headers, body)


def encoded(answer: Answer) -> bytes:
    """The bytes of an answer."""
    head = f"HTTP/1.1 {answer.status} Whatever\r\n"
    if answer.events is None:
        body = b"" if answer.payload is None else json.dumps(answer.payload).encode()
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    head += "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    events = [f"data: {event}\n\n".encode() for event in answer.events]
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body
