"""Routes that one engine answers alone: an allow-list, because engines also serve routes no client should reach.

One lease, one exchange; the body goes out and the answer comes back byte for byte. The client's body is read before a
backend is leased, so that a slow sender occupies no engine, the cost is known, and a second try costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from proxy.api.replies import REQUEST_ID
from proxy.balancer.backend import Load
from proxy.errors import Failure, GatewayError, NoBackendAvailable, UpstreamError
from proxy.logs import access_line
from proxy.upstream import connect_problem, upstream_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping, Sequence

    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.pool import Pool
    from proxy.metrics import Metrics
    from proxy.settings import Cost, Timeouts

ROUTES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "tokenizer": (
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/completions/render"),
    ),
    "pooling": (
        ("POST", "/v1/embeddings"),
        ("POST", "/pooling"),
        ("POST", "/classify"),
        ("POST", "/score"),
        ("POST", "/v1/score"),
        ("POST", "/rerank"),
        ("POST", "/v1/rerank"),
        ("POST", "/v2/rerank"),
    ),
}
"""Method and path by group, as vLLM serves them. The group is the metric label `api`."""

_PASSED_ON: Final = ("Content-Type", "Content-Encoding", "Accept", "traceparent", "tracestate")
# About one connection (RFC 9110 7.6.1) or set by the gateway itself; the length is kept apart.
_NOT_PASSED_BACK: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "server", "date", "x-request-id"),
    }
)


@dataclass(slots=True)
class _Record:
    """What becomes of one request, for the access line and the metrics."""

    status: int = 499  # until there is an answer, only the client's leaving can end the request
    instance: str = "-"
    bytes_sent: int = 0
    is_committed: bool = False
    broken: tuple[str, str] | None = ("client", "left")  # side and reason, None when the answer is complete


class _ClientLost(Exception):
    """The client can be sent no more; `reason` is the metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PassthroughApi:
    """The routes of the configured groups, on the backends of one pool.

    `session` must not decompress answers.
    """

    def __init__(
        self,
        pool: Pool,
        groups: Iterable[str],
        session: aiohttp.ClientSession,
        keys: EngineKeys,
        cost: Cost,
        timeouts: Timeouts,
        write_timeout_seconds: float,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._groups = tuple(groups)
        self._session = session
        self._keys = keys
        self._bytes_per_token = cost.bytes_per_token
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=timeouts.connect_seconds, sock_read=timeouts.prefill_seconds
        )
        self._write_timeout_seconds = write_timeout_seconds
        self._metrics = metrics

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.route(method, path, partial(self._serve, group, path))
            for group in self._groups
            for method, path in ROUTES[group]
        ]

    async def _serve(self, group: str, path: str, request: web.Request) -> web.StreamResponse:
        record = _Record()
        started = time.monotonic()
        with self._metrics.inflight_requests.labels(group).track_inprogress():
            try:
                return await self._answer(path, request, record)
            except (GatewayError, web.HTTPException) as error:
                if record.is_committed:
                    record.broken = ("engine", "broken")
                else:
                    record.status = error.status
                raise
            except _ClientLost as lost:
                record.broken = ("client", lost.reason)
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=499)  # written to nobody
            finally:
                self._observe(group, path, request, record, time.monotonic() - started)

    async def _answer(self, path: str, request: web.Request, record: _Record) -> web.StreamResponse:
        """On one backend, and on another if there is no connection to the first."""
        body = await request.read()
        with self._pool.lease(Load(compute=len(body) // self._bytes_per_token + 1)) as lease:
            try:
                return await self._exchange(path, request, body, lease.backend, record)
            except UpstreamError as error:
                if error.failure is not Failure.CONNECT:
                    raise
                try:
                    other = lease.move((), because=error)
                except NoBackendAvailable:
                    raise error from None
            self._metrics.retries_total.labels(self._pool.role, Failure.CONNECT).inc()
            return await self._exchange(path, request, body, other, record)

    async def _exchange(
        self, path: str, request: web.Request, body: bytes, backend: Backend, record: _Record
    ) -> web.StreamResponse:
        record.instance = backend.name
        passed_on = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        key = self._keys.headers(backend, request.headers.get("Authorization"))
        asked = self._session.request(
            request.method,
            backend.url + path,
            data=body or None,
            headers={**passed_on, **key, "Accept-Encoding": "identity"},
            skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
            timeout=self._timeout,
            allow_redirects=False,
        )
        try:
            async with asked as answer:
                if not 200 <= answer.status < 300:
                    raise await _refusal(backend, answer)
                return await self._relay(request, answer, record)
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            raise _in_our_words(backend, problem) from None

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse, record: _Record) -> web.StreamResponse:
        """Copy the answer as it comes; a slow client holds the engine back."""
        response = web.StreamResponse(status=answer.status, headers=_passed_back(answer))
        response.content_length = answer.content_length
        record.status, record.is_committed = answer.status, True
        await self._to_client(response.prepare(request))
        async for chunk in answer.content.iter_any():
            await self._to_client(response.write(chunk))
            record.bytes_sent += len(chunk)
        await self._to_client(response.write_eof())
        record.broken = None
        return response

    async def _to_client(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await sending
        except TimeoutError:
            raise _ClientLost("write_timeout") from None
        except ConnectionError:
            raise _ClientLost("left") from None

    def _observe(self, group: str, path: str, request: web.Request, record: _Record, duration_seconds: float) -> None:
        self._metrics.requests_total.labels(group, str(record.status)).inc()
        if record.is_committed and record.broken:
            self._metrics.streams_broken_total.labels(*record.broken).inc()
        access_line(
            {
                "id": request[REQUEST_ID],
                "api": group,
                "path": path,
                "code": record.status,
                "instance": record.instance,
                "dur": duration_seconds,
                "bytes": record.bytes_sent,
            }
        )


def _passed_back(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The engine's headers without those that are about its connection to us."""
    named = {name.strip().lower() for name in answer.headers.get("Connection", "").split(",")}
    left_out = _NOT_PASSED_BACK | named
    return CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in left_out)


async def _refusal(backend: Backend, answer: aiohttp.ClientResponse) -> UpstreamError:
    """The error for an answer that is none: the engine's own words, or a redirect, which is not followed."""
    message = f"{backend.role} instance answered with status {answer.status}"
    if answer.status < 400:
        return UpstreamError(Failure.BAD_ANSWER, backend, message)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return UpstreamError(
        Failure.STATUS, backend, message, engine_status=answer.status, body=await answer.read(), headers=headers
    )


def _in_our_words(backend: Backend, problem: Exception) -> UpstreamError:
    """An exception of aiohttp in our words."""
    failure, message = Failure.BAD_ANSWER, "the engine's answer is not valid HTTP"
    match problem:
        case aiohttp.ClientConnectorError():
            failure, message = Failure.CONNECT, f"cannot connect ({connect_problem(problem.os_error)})"
        case aiohttp.ConnectionTimeoutError():
            failure, message = Failure.CONNECT, "cannot connect (timed out)"
        case aiohttp.InvalidURL() | ValueError():
            failure, message = Failure.CONNECT, "cannot connect (not a host name)"
        case TimeoutError():
            failure, message = Failure.TIMEOUT, "the engine did not answer in time"
        case aiohttp.ClientPayloadError():
            failure, message = Failure.BROKEN, "the engine closed the connection in the middle of its answer"
        case aiohttp.ClientConnectionError():
            failure, message = Failure.RESET, "the engine closed the connection without an answer"
    return upstream_error(failure, backend, message)
