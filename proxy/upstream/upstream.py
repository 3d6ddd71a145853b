"""A worker's connections to all backends: opened, kept alive, swept and closed here."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from proxy.errors import Failure, UpstreamError
from proxy.upstream.connection import Connection
from proxy.upstream.response import upstream_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType
    from typing import Self

    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.settings import Timeouts
    from proxy.upstream.response import Response

# Engines close an idle connection after 5 s (vLLM VLLM_HTTP_TIMEOUT_KEEP_ALIVE, SGLang SGLANG_TIMEOUT_KEEP_ALIVE).
_KEEP_ALIVE_SECONDS: Final = 3.5


class Upstream:
    """One worker's connections to all backends. `async with` it; leaving closes every connection."""

    def __init__(self, timeouts: Timeouts, keys: EngineKeys, *, sweep_seconds: float | None = None) -> None:
        """`sweep_seconds`: how often silences are looked at; by default often enough for the shortest of them."""
        self._timeouts = timeouts
        self._keys = keys
        self._sweep_seconds = sweep_seconds or _sweep_seconds(timeouts)
        self._idle: dict[Backend, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._sweep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.abort()
        self._idle.clear()

    @property
    def busy_connections(self) -> int:
        """Exchanges under way."""
        return len(self._busy)

    @asynccontextmanager
    async def open(
        self,
        backend: Backend,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        silence_seconds: float,
        resend_if_stale: bool = False,
    ) -> AsyncIterator[Response]:
        """POST a JSON body and yield the answer once its headers are there. Leaving early drops the connection.

        `headers` have lower-case names; an `authorization` among them is the client's own.
        `silence_seconds` bounds the wait for the headers and then, until `limit_silence`, every gap in the body.
        `resend_if_stale`: when a *reused* connection closes without a byte of answer, the engine most likely closed it
        while idle, and the request is sent once more on a fresh one. Not for a leg that must not be sent twice.
        Raises UpstreamError.
        """
        head = self._head(backend, path, len(body), headers)
        connection, response = await self._exchange(backend, head, body, silence_seconds, resend_if_stale)
        try:
            yield response
        finally:
            self._put_back(connection)

    async def fetch(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], *, silence_seconds: float
    ) -> tuple[Response, bytes]:
        """POST a JSON body and return the answer with its whole body. Raises UpstreamError."""
        head = self._head(backend, path, len(body), headers)
        connection, response = await self._exchange(backend, head, body, silence_seconds, resend_if_stale=True)
        try:
            return response, await response.read()
        finally:
            self._put_back(connection)

    async def _exchange(
        self, backend: Backend, head: bytes, body: bytes, silence_seconds: float, resend_if_stale: bool
    ) -> tuple[Connection, Response]:
        connection = self._take_idle(backend) or await self._connect(backend)
        while True:
            self._busy.add(connection)
            now = asyncio.get_running_loop().time()
            try:
                return connection, await connection.send(head, body, silence_seconds=silence_seconds, now=now)
            except BaseException as error:
                self._put_back(connection)
                stale = isinstance(error, UpstreamError) and error.failure is Failure.RESET and connection.exchanges > 1
                if not (stale and resend_if_stale):
                    raise
            connection = await self._connect(backend)

    async def _connect(self, backend: Backend) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                _, connection = await loop.create_connection(lambda: Connection(backend), backend.host, backend.port)
        except OSError as error:  # TimeoutError is one
            raise upstream_error(Failure.CONNECT, backend, f"cannot connect ({connect_problem(error)})") from None
        return connection

    def _head(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1\r\n",
            f"Host: {backend.name}\r\n",
            "Content-Type: application/json\r\n",
            f"Content-Length: {body_bytes}\r\n",
            "Accept-Encoding: identity\r\n",
        ]
        credentials = self._keys.headers(backend, headers.get("authorization"))
        lines += [f"{name}: {value}\r\n" for name, value in headers.items() if name != "authorization"]
        lines += [f"{name}: {value}\r\n" for name, value in credentials.items()]
        lines.append("\r\n")
        return "".join(lines).encode("utf-8", "surrogateescape")  # how aiohttp decoded a client's header

    def _take_idle(self, backend: Backend) -> Connection | None:
        idle = self._idle.get(backend, [])
        oldest = asyncio.get_running_loop().time() - _KEEP_ALIVE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _put_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection.is_reusable:
            connection.pause(False)
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault(connection.backend, []).append(connection)
        else:
            connection.abort()

    def _sweep(self) -> None:
        """One timer for all exchanges: a timer per token would cost as much as the token."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._sweeper = loop.call_later(self._sweep_seconds, self._sweep)
        for connection in list(self._busy):
            connection.check_silence(now)
        for backend, idle in list(self._idle.items()):
            kept = [c for c in idle if c.is_reusable and now - c.idle_since < _KEEP_ALIVE_SECONDS]
            for connection in set(idle).difference(kept):
                connection.abort()
            if kept:
                self._idle[backend] = kept
            else:
                del self._idle[backend]


def connect_problem(error: OSError) -> str:
    """Why there is no connection, in the system's words: `connection refused`, `name or service not known` …"""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):  # has numbers of its own
        return (error.strerror or "name not found").lower()
    # Not the error's own text, which holds the address.
    return (os.strerror(error.errno) if error.errno else type(error).__name__).lower()


def _sweep_seconds(timeouts: Timeouts) -> float:
    shortest: float = min(
        timeouts.prefill_seconds, timeouts.first_token_seconds, timeouts.answer_seconds, timeouts.idle_seconds
    )
    return max(0.01, min(1.0, shortest / 4))
