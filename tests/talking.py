"""Clients of a gateway that write and read the bytes of their connections themselves."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tests.asking import api_of, until
from tests.deployment import Deployment

_READ_BYTES: Final = 65536
_LENGTH: Final = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
_INTERIM: Final = re.compile(rb"HTTP/1\.1 1\d\d ")


@dataclass
class Line:
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: list[tuple[str, str, str]]
    """Head, body and end of each answer."""
    _unread: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self, body: dict[str, Any], **headers: str) -> None:
        """Send a request, and read its answer."""
        self.send(raw(body, **headers))
        await self.answer()

    async def answer(self) -> None:
        """Read an answer to its end, which may be `whole` or `cut`."""
        head, body, ending = b"", bytearray(), "whole"
        try:
            head = await self._until(b"\r\n\r\n")
            if (length := _LENGTH.search(head)) is not None:
                body += await self._exactly(int(length[1]))
            elif b"Transfer-Encoding: chunked" in head:
                await self._chunks(body)
            elif not _INTERIM.match(head):
                body += await self._rest()
        except EOFError:
            ending = "cut"
        self.received.append((head.decode(), body.decode(), ending))

    async def is_closed(self) -> None:
        """Read the end of the connection, and the bytes before it."""
        self.received.append(("", (await self._rest()).decode(), "closed"))

    async def has(self, data: bytes) -> None:
        """Wait until these bytes have come. They stay part of the answer."""
        while data not in self._unread:
            await self._read()

    def leave(self) -> None:
        self.writer.transport.abort()

    async def _chunks(self, body: bytearray) -> None:
        while size := int(await self._until(b"\r\n"), 16):
            body += (await self._exactly(size + 2))[:-2]
        assert await self._exactly(2) == b"\r\n"

    async def _until(self, end: bytes) -> bytes:
        while (at := self._unread.find(end)) < 0:
            await self._read()
        return self._take(at + len(end))

    async def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            await self._read()
        return self._take(count)

    async def _rest(self) -> bytes:
        with suppress(EOFError):
            while True:
                await self._read()
        return self._take(len(self._unread))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    async def _read(self) -> None:
        """Read what comes next. Raises EOFError at the end of the connection."""
        data = b""
        with suppress(ConnectionError):
            data = await self.reader.read(_READ_BYTES)
        if not data:
            raise EOFError("the connection has ended")
        self._unread += data


def raw(body: dict[str, Any] | bytes, path: str = "", **headers: str) -> bytes:
    """Return a request as most clients send it."""
    if isinstance(body, dict):
        path = path or api_of(body).path
        body = orjson.dumps(body)
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n{lines}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Clients:
    """The clients of one gateway."""

    gateway: Deployment
    lines: list[Line] = field(default_factory=list)

    async def connect(self) -> Line:
        host, port = self.gateway.url.removeprefix("http://").split(":")
        line = Line(*await asyncio.open_connection(host, int(port)), [])
        self.lines.append(line)
        return line

    def leave(self) -> None:
        """Close all connections."""
        for line in self.lines:
            line.leave()

    async def rest(self) -> None:
        """Wait until the gateway has nothing to do."""
        await until(lambda: not self.gateway.leaks(), "the gateway to rest")
