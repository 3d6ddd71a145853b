"""Routes that one engine answers alone: an allow-list, because engines also serve routes no client should reach.

One lease, one exchange; the body goes out and the answer comes back byte for byte. The client's body is read before a
backend is leased, so that a slow sender occupies no engine, the cost is known, and a second try costs nothing. What is
tried again elsewhere, how often, and how long a restart is waited for, is what holds for generation, too. An engine's
limit is not: what is passed through waits for no room.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web
from multidict import CIMultiDict

from proxy.api.role_queue import RoleQueues
from proxy.balancer.blame import Blame
from proxy.balancer.engines import without_key
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load
from proxy.common.errors import Failure, GatewayError, NoBackendAvailable, Overloaded, UpstreamError
from proxy.gateway.retry import RetryPermit, backoff_seconds, may_retry
from proxy.listener import replies
from proxy.listener.body import read_body
from proxy.listener.replies import REQUEST_ID
from proxy.observe.logs import access_line
from proxy.upstream import EngineRequestError, read_bounded, upstream_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping, Sequence

    import aiohttp

    from proxy.api.questions import QuestionParts
    from proxy.api.role_queue import RoleQueue
    from proxy.common.backend import Backend
    from proxy.gateway.lanes import Lanes
    from proxy.listener.drain import DrainManager
    from proxy.settings import Settings


ROUTES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "tokenizer": (
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        *(("POST", f"/v1/{api}/render") for api in ("chat/completions", "completions", "messages", "responses")),
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
    "sglang": (
        ("GET", "/model_info"),
        ("GET", "/get_model_info"),
    ),
}
"""Method and path by group, as vLLM and SGLang serve them. The group is the metric label `api`."""

_RUN_THE_MODEL: Final = frozenset(path for _, path in ROUTES["pooling"])

_PASSED_ON: Final = ("Content-Type", "Accept", "traceparent", "tracestate")


# About one connection (RFC 9110 7.6.1) or set by the gateway itself; the length is kept apart.
_NOT_PASSED_BACK: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "server", "date", "x-request-id"),
    }
)
# Nobody waits for more: not for an answer, and not for an engine to say why there is none.
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
_MAX_REFUSAL_BYTES: Final = 1024 * 1024
_MESSAGES: Final = {
    Failure.BROKEN: "the engine closed the connection in the middle of its answer",
    Failure.RESET: "the engine closed the connection without an answer",
    Failure.BAD_ANSWER: "the engine's answer is not valid HTTP",
}


@contextmanager
def _paused(deadline: asyncio.Timeout) -> Iterator[None]:
    """Time spent in here is not the engine's."""
    loop, when = asyncio.get_running_loop(), deadline.when()
    assert when is not None
    left_seconds = when - loop.time()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(loop.time() + left_seconds)


def passed_back(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The engine's headers without those that are about its connection to us."""
    named = {name.strip().lower() for line in answer.headers.getall("Connection", ()) for name in line.split(",")}
    left_out = _NOT_PASSED_BACK | named
    return CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in left_out and replies.can_be_sent(name, value)
    )


async def _refusal(backend: Backend, answer: aiohttp.ClientResponse) -> UpstreamError:
    """The error for an answer that is none: the engine's own words, or a redirect, which is not followed."""
    message = f"{backend.role} instance answered with status {answer.status}"
    if answer.status < 400:
        return UpstreamError(Failure.BAD_ANSWER, backend, message)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    body = without_key(await read_bounded(answer, _MAX_REFUSAL_BYTES), answer.request_info.headers.get("Authorization"))
    return UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=headers)


def _too_large(backend: Backend) -> UpstreamError:
    return upstream_error(Failure.BAD_ANSWER, backend, "the engine's answer is too large")


def _failed(backend: Backend, error: EngineRequestError | TimeoutError) -> UpstreamError:
    """Return the error for an exchange that failed; TimeoutError: it took too long."""
    if isinstance(error, TimeoutError):
        return upstream_error(Failure.TIMEOUT, backend, "the engine did not answer in time")
    message = str(error) if error.failure is Failure.CONNECT else _MESSAGES[error.failure]
    return upstream_error(error.failure, backend, message)


@dataclass(slots=True)
class _Record:
    """What becomes of one request, for the access line and the metrics."""

    key: str = "-"
    status: int = 499  # until there is an answer, only the client's leaving can end the request
    instance: str = "-"
    bytes_sent: int = 0
    has_reached_engines: bool = False
    is_committed: bool = False
    broken: tuple[str, str] | None = ("client", "left")  # side and reason, None when the answer is complete


class _ClientLost(Exception):
    """The client can be sent no more; `reason` is the metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PassthroughApi:
    """The routes of the configured groups, on the backends of one role."""

    def __init__(self, parts: QuestionParts, lanes: Lanes, drain: DrainManager, settings: Settings) -> None:
        self._client = parts.client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.client_keys
        self._drain = drain
        self._bodies = lanes.whole.service.admission.buffers
        self._groups: list[str] = [*settings.passthrough]
        if settings.connector_traits.has_sglang_routes:
            self._groups.append("sglang")
        self._metrics = parts.metrics
        self._queues = RoleQueues(lanes, settings, parts.metrics)
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on. The routes stay what they were."""
        self._settings = settings
        self._queues.configure(settings)

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
                with self._drain:
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
        key = self._client_keys.identify(request)
        record.key = key.name
        with self._client_keys.enter(key), self._bodies.hold(0) as held:
            body = await read_body(request, self._settings.listen, held.resize)
            body, model = self._queues.for_engines(request, body, key)
            queue = await self._queues.of(model)
            with queue.lane.explaining():
                return await self._try_admitted(queue, path, request, body, record)

    async def _try_admitted(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _Record
    ) -> web.StreamResponse:
        """Once, and again after a restart, if connections were refused and nothing else has come of it; and again if
        all instances refused it.
        """
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._settings.admission.wait_seconds
        refusal: UpstreamError | None = None
        while True:
            try:
                async with queue.admission.admit(record.key):
                    return await self._try(queue, path, request, body, record)
            except Overloaded as error:
                raise error if refusal is None else refusal from None
            except (NoBackendAvailable, UpstreamError) as error:
                if loop.time() >= waits_until:
                    raise
                if isinstance(error, UpstreamError) and error.is_refusal:
                    if record.is_committed or self._settings.retry.max_attempts < 2 or not queue.pool.refuse_all():
                        raise
                    refusal = error
                    continue
                is_unreached = isinstance(error, NoBackendAvailable) or error.failure is Failure.CONNECT
                if not is_unreached or record.has_reached_engines or not queue.pool.is_restarting():
                    raise

    async def _try(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _Record
    ) -> web.StreamResponse:
        """On one backend after the other, as long as that can help."""
        load = Load(compute=len(body) // self._settings.cost.bytes_per_token + 1)
        wanted = PickRequest.of(load, proves_generation=path in _RUN_THE_MODEL)
        failed: list[Backend] = []
        attempts = 0
        with (
            Blame() as blame,
            RetryPermit(queue.lane.service.budget) as permit,
            queue.pool.lease(wanted) as lease,
        ):
            while True:
                try:
                    return await self._exchange(path, request, body, lease.backend, record)
                except UpstreamError as error:
                    record.has_reached_engines |= error.failure is not Failure.CONNECT
                    failed.append(error.backend)
                    blame.failed(error)
                    if error.is_refusal and not record.is_committed and self._settings.retry.max_attempts > 1:
                        # It counts for nothing as long as others would take the request.
                        if not queue.pool.would_accept(failed):
                            raise
                    else:
                        attempts += 1
                        await self._await_retry(error, attempts, permit, record)
                    try:
                        lease.move(failed, because=error)
                    except NoBackendAvailable as nobody:
                        # What the engine said is more to the point, except that it could not be reached.
                        raise nobody if error.failure is Failure.CONNECT else error from None
                    self._metrics.retries_total.labels(queue.pool.role, error.failure).inc()
                await asyncio.sleep(backoff_seconds(self._settings.retry, max(1, attempts)))

    async def _await_retry(self, error: UpstreamError, attempts: int, permit: RetryPermit, record: _Record) -> None:
        """Wait until the request may be tried again. Raises the error if it must not be."""
        most = self._settings.retry.max_attempts
        if not may_retry(error, sent_to_client=record.is_committed, attempts=attempts, max_attempts=most):
            raise error
        is_free = error.failure is Failure.CONNECT
        if not is_free and not await permit.acquire(self._settings.retry.budget_wait_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error

    async def _exchange(
        self, path: str, request: web.Request, body: bytes, backend: Backend, record: _Record
    ) -> web.StreamResponse:
        record.instance = backend.name
        passed_on = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        key = self._engine_keys.headers(backend, self._client_keys.credential(request))
        connect_seconds = self._settings.timeouts.connect_seconds
        asked = self._client.stream(request.method, backend.url, path, body, {**passed_on, **key}, connect_seconds)
        try:
            async with asyncio.timeout(self._settings.timeouts.prefill_seconds) as deadline, asked as answer:
                if not 200 <= answer.status < 300:
                    raise await _refusal(backend, answer)
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    raise _too_large(backend)
                return await self._relay(request, answer, backend, record, deadline)
        except (EngineRequestError, TimeoutError) as error:
            raise _failed(backend, error) from None

    async def _relay(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        backend: Backend,
        record: _Record,
        deadline: asyncio.Timeout,
    ) -> web.StreamResponse:
        """Copy the answer as it comes; a slow client holds the engine back, and its deadline."""
        response = web.StreamResponse(status=answer.status, headers=passed_back(answer))
        response.content_length = answer.content_length
        record.status, record.is_committed = answer.status, True
        await self._to_client(response.prepare(request))
        async for chunk in answer.content.iter_any():
            with _paused(deadline):
                await self._to_client(response.write(chunk))
            record.bytes_sent += len(chunk)
            if record.bytes_sent > MAX_ANSWER_BYTES:
                raise _too_large(backend)
        await self._to_client(response.write_eof())
        record.broken = None
        return response

    async def _to_client(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._settings.listen.write_timeout_seconds):
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
                "key": record.key,
                "api": group,
                "path": path,
                "code": record.status,
                "instance": record.instance,
                "dur": duration_seconds,
                "bytes": record.bytes_sent,
            }
        )
