"""A HttpListener with a small application, and clients that send it bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from proxy.listener import replies
from proxy.listener.body import read_body
from proxy.listener.http_listener import HttpListener
from proxy.observe.metrics import Metrics
from proxy.settings import Listen
from tests.asking import until
from tests.clock import Clock

PATH = "/v1/chat/completions"
HEAD = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\n"
CLEAN = HEAD + b"Content-Length: 2\r\n\r\n{}"


@dataclass(frozen=True)
class Reply:
    """One answer, parsed by hand."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        error = orjson.loads(self.body)["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-pdproxy-error-code"] == error["code"]
        return error

    @property
    def code(self) -> str:
        return str(self.error["code"])

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> Reply:
        """Read the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        assert first.startswith(("HTTP/1.1 ", "HTTP/1.0 "))
        pairs = [line.partition(":")[::2] for line in lines]
        headers = {name.lower(): value.strip() for name, value in pairs}
        assert len(headers) == len(pairs)
        body = await self.reader.readexactly(int(headers["content-length"]))
        assert headers["server"] == "pdproxy"
        assert headers["x-request-id"]
        return Reply(int(first.split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Wait for the end; True when nothing came before it."""
        return await self.reader.read() == b""

    def leave(self) -> None:
        self.writer.close()


@dataclass
class Site:
    """A HttpListener, the application behind it, and those who connect to it. Time passes when a test says so."""

    listen: Listen
    metrics: Metrics = field(default_factory=Metrics)
    clock: Clock = field(default_factory=Clock)
    front: HttpListener = field(init=False)
    port: int = 0
    clients: list[Client] = field(default_factory=list)
    seen: list[tuple[str, str, bytes]] = field(default_factory=list)
    """Method, path and body of every request that a route has read."""
    begun: int = 0
    """Requests that a route has begun to read."""
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """What `/hold` waits for."""

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes) -> Client:
        """Connect a client, and send bytes."""
        client = await self.connect()
        client.send(data)
        return client

    async def serves(self) -> bool:
        """Whether a clean request on a new connection is answered."""
        client = await self.ask(CLEAN)
        reply = await client.reply()
        client.leave()
        return reply.status == 200

    async def begins(self, count: int) -> None:
        """Wait until this number of requests has begun."""
        await until(lambda: self.begun == count, f"{count} requests to begin")

    def count(self, name: str, **labels: str) -> float:
        """Return the value of a metric, or 0 without one."""
        return next(
            (
                sample.value
                for family in self.metrics.collect()
                for sample in family.samples
                if sample.name == name and sample.labels == labels
            ),
            0.0,
        )

    def rejected(self, reason: str) -> float:
        return self.count("pdproxy_rejected_total", reason=reason)

    # Routes

    async def read(self, request: web.Request) -> web.Response:
        self.begun += 1
        body = await read_body(request, self.listen)
        self.seen.append((request.method, request.path, body))
        return web.Response(text=request.path)

    async def ignore(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path, b""))
        return web.Response(text="ok")

    async def hold(self, request: web.Request) -> web.Response:
        self.begun += 1
        await self.let_go.wait()
        return web.Response(text="held")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 4
        await response.prepare(request)
        await response.write(b"ab")
        self.begun += 1
        await self.let_go.wait()
        await response.write(b"cd")
        return response

    async def fail(self, request: web.Request) -> web.Response:
        raise ValueError(f"cannot read {await request.text()}")


@asynccontextmanager
async def serving(tick_seconds: float = 3600.0, **listen: Any) -> AsyncIterator[Site]:
    """Serve with these settings. At the end all clients disconnect, and no connection may be left."""
    site = Site(Listen(**listen))
    app = web.Application()
    replies.install_replies(app, site.metrics)
    app.add_routes(
        [
            web.post(PATH, site.read),
            web.get("/livez", site.ignore),
            web.post("/ignore", site.ignore),
            web.get("/hold", site.hold),
            web.get("/stream", site.stream),
            web.post("/fail", site.fail),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    site.port = listener.getsockname()[1]
    async with HttpListener(app, site.listen, site.metrics, tick_seconds=tick_seconds, clock=site.clock) as site.front:
        await site.front.listen_on(listener)
        yield site
        for client in site.clients:
            client.leave()
        await until(lambda: not site.front.connection_count, "all connections to be closed")
        assert site.count("pdproxy_connections") == 0.0
