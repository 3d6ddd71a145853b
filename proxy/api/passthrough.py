"""Passes requests to one engine and its answers back to the client, byte for byte.

The routes are an allow-list, because engines also serve routes that no client should reach. The body of the client is
read before a backend is leased. So a slow client occupies no engine, the cost is known, and a retry costs nothing.

Retries and the wait for a restart follow the rules for generation. The limits of engines do not apply here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from proxy.balancer.blame import Blame
from proxy.balancer.engines import without_key
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import BadRequest, Failure, GatewayError, NoBackendAvailable, Overloaded, UpstreamError
from proxy.dialects.adjustments import ModelNames, limit_priority_member
from proxy.dialects.requests import parse_body
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.retry import RetryPermit, backoff_seconds, may_retry
from proxy.listener import replies
from proxy.listener.body import read_body
from proxy.listener.replies import REQUEST_ID
from proxy.observe.logs import access_line
from proxy.upstream import EngineRequestError, read_bounded, upstream_error
from proxy.wire.document import join_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    import aiohttp

    from proxy.api.questions import QuestionParts
    from proxy.gateway.api_keys import ApiKey
    from proxy.gateway.lanes import Lane, Lanes
    from proxy.listener.drain import DrainManager
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.settings.live import LiveSettings


class RoleQueue:
    """The first role of a lane, and a queue for the time in which all its instances restart or reject requests."""

    def __init__(self, lane: Lane, settings: Settings, metrics: Metrics) -> None:
        self.lane = lane
        self.pool = lane.first
        parts = AdmissionParts(has_room=self._has_room, metrics=metrics, absent=self._absent_role)
        self.admission = AdmissionQueue(parts, settings.admission)

    def _has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return not self.pool.is_restarting() and not self.pool.refuse_all()

    def _absent_role(self) -> Role | None:
        return self.pool.role if self.pool.is_gone() else None


class _Body(msgspec.Struct):
    """The members of a request body that passing it through needs."""

    model: object = None
    priority: object = None


_read = msgspec.json.Decoder(_Body).decode


def _parse(body: bytes) -> _Body:
    """Return the model and priority of a body. Both are None if engines would reject the body."""
    try:
        return _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # engines accept more than this parser
    try:
        values = parse_body(body).values
    except BadRequest:
        return _Body()
    return _Body(values.get("model"), values.get("priority"))


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


# Headers of one connection (RFC 9110 7.6.1), and those that the gateway sets.
_NOT_PASSED_BACK: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "server", "date", "x-request-id"),
    }
)
# Longer answers are broken off. The body of an error is cut.
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
_MAX_REFUSAL_BYTES: Final = 1024 * 1024
_MESSAGES: Final = {
    Failure.BROKEN: "the engine closed the connection in the middle of its answer",
    Failure.RESET: "the engine closed the connection without an answer",
    Failure.BAD_ANSWER: "the engine's answer is not valid HTTP",
}


@contextmanager
def _pause_deadline(deadline: asyncio.Timeout) -> Iterator[None]:
    """Pause a deadline of the engine while the block runs."""
    loop, when = asyncio.get_running_loop(), deadline.when()
    assert when is not None
    left_seconds = when - loop.time()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(loop.time() + left_seconds)


def client_headers(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """Return the engine's headers for the client, without those that concern only the engine's connection."""
    named = {name.strip().lower() for line in answer.headers.getall("Connection", ()) for name in line.split(",")}
    left_out = _NOT_PASSED_BACK | named
    return CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in left_out and replies.can_be_sent(name, value)
    )


async def _make_refusal(backend: Backend, answer: aiohttp.ClientResponse) -> UpstreamError:
    """Return the error for a status that is not 2xx. Redirects are not followed."""
    message = f"{backend.role} instance answered with status {answer.status}"
    if answer.status < 400:
        return UpstreamError(Failure.BAD_ANSWER, backend, message)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    body = without_key(await read_bounded(answer, _MAX_REFUSAL_BYTES), answer.request_info.headers.get("Authorization"))
    return UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=headers)


def _make_too_large_error(backend: Backend) -> UpstreamError:
    return upstream_error(Failure.BAD_ANSWER, backend, "the engine's answer is too large")


def _make_exchange_error(backend: Backend, error: EngineRequestError | TimeoutError) -> UpstreamError:
    """Return the error for a failed exchange. A TimeoutError means that it took too long."""
    if isinstance(error, TimeoutError):
        return upstream_error(Failure.TIMEOUT, backend, "the engine did not answer in time")
    message = str(error) if error.failure is Failure.CONNECT else _MESSAGES[error.failure]
    return upstream_error(error.failure, backend, message)


@dataclass(slots=True)
class _Record:
    """The outcome of one request, for the access log and the metrics."""

    key: str = "-"
    """The name of the client key."""
    status: int = 499
    """The status of the answer. 499: the client disconnected before there was an answer."""
    instance: str = "-"
    """The instance of the last attempt."""
    bytes_sent: int = 0
    """Bytes of the answer that were sent to the client."""
    has_reached_engines: bool = False
    """Whether an engine may have received the request."""
    is_committed: bool = False
    """Whether the status and headers were sent to the client."""
    broken: tuple[str, str] | None = ("client", "left")
    """The side that broke off the answer, and the reason. None: the answer is complete."""


class _ClientLost(Exception):
    """The client of a passed-through request cannot receive more bytes."""

    def __init__(self, reason: str) -> None:
        """Store the reason, which is a label of the metric."""
        super().__init__(reason)
        self.reason = reason


class PassthroughApi:
    """The routes of the configured groups. The first role of each lane answers them."""

    def __init__(self, parts: QuestionParts, lanes: Lanes, drain: DrainManager, live: LiveSettings) -> None:
        settings = live.settings
        self._live = live
        self._client = parts.client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.client_keys
        self._drain = drain
        self._bodies = lanes.whole.service.admission.buffers
        self._groups: list[str] = [*settings.passthrough]
        if settings.connector_traits.has_sglang_routes:
            self._groups.append("sglang")
        self._metrics = parts.metrics
        self._lanes = lanes
        self._whole_queue = RoleQueue(lanes.whole, settings, parts.metrics)
        self._queues: dict[Lane, RoleQueue] = {}
        """The queues of lanes of single models."""
        self._names = ModelNames(settings.models.aliases)
        live.call_on_change(self._on_change)

    def _on_change(self, settings: Settings) -> None:
        self._names = ModelNames(settings.models.aliases)
        for queue in (self._whole_queue, *self._queues.values()):
            queue.admission.configure(settings.admission)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the passed-through routes for the application."""
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
                return web.Response(status=499)  # is not sent
            finally:
                self._observe(group, path, request, record, time.monotonic() - started)

    async def _answer(self, path: str, request: web.Request, record: _Record) -> web.StreamResponse:
        key = self._client_keys.identify(request)
        record.key = key.name
        with self._client_keys.enter(key), self._bodies.hold(0) as held:
            body = await read_body(request, self._live.settings.listen, held.resize)
            body, model = self._adapt_body_for_engines(request, body, key)
            queue = await self._queue_of(model)
            with queue.lane.explaining():
                return await self._try_admitted(queue, path, request, body, record)

    async def _queue_of(self, model: object) -> RoleQueue:
        """Return the queue for a model, which has the engines' name. Raises the errors of Lanes.find."""
        lanes = self._lanes
        if not lanes.models.is_mixed:
            return self._whole_queue
        lane = await lanes.find(model)
        if lane is lanes.whole:
            return self._whole_queue
        queue = self._queues.get(lane)
        if queue is None:
            # Some lanes may be gone.
            self._queues = {other: queue for other, queue in self._queues.items() if other in lanes.all}
            queue = self._queues[lane] = RoleQueue(lane, self._live.settings, self._metrics)
        return queue

    def _adapt_body_for_engines(self, request: web.Request, body: bytes, key: ApiKey) -> tuple[bytes, object]:
        """Return the body for engines, and the engines' name of the model or None.

        The body has the engines' name of the model, and a priority that the client key allows. If there is no body, the
        query may name the model. The body is not parsed if nothing in it can matter.

        Raises:
            BadRequest: The body must be changed and is not valid JSON.
        """
        is_bounded = key.slot is not None
        if not body:
            requested = request.query.get("model")
            return body, None if requested is None else self._names.engine_name(requested)
        if not (is_bounded or self._names.has_aliases or self._lanes.models.is_mixed):
            return body, None
        parsed = _parse(body)
        changes: dict[str, object] = {}
        name = parsed.model
        if isinstance(name, str) and (served := self._names.engine_name(name)) != name:
            changes["model"] = name = served
        if is_bounded and parsed.priority is not None:
            lower_first = self._live.settings.connector_traits.lower_priority_first
            changes.update(limit_priority_member(parsed.priority, key.priority, lower_first=lower_first))
        return join_body(parse_body(body).make_changed_body(changes)) if changes else body, name

    async def _try_admitted(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _Record
    ) -> web.StreamResponse:
        """Try to serve a request until it succeeds or the longest wait is over.

        Try again after a restart if no engine was reached, and again if all instances have rejected the request.
        """
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._live.settings.admission.wait_seconds
        rejection: UpstreamError | None = None
        while True:
            try:
                async with queue.admission.admit(record.key):
                    return await self._try_backends(queue, path, request, body, record)
            except Overloaded as error:
                raise error if rejection is None else rejection from None
            except (NoBackendAvailable, UpstreamError) as error:
                if loop.time() >= waits_until:
                    raise
                if isinstance(error, UpstreamError) and error.is_refusal:
                    if record.is_committed or self._live.settings.retry.max_attempts < 2 or not queue.pool.refuse_all():
                        raise
                    rejection = error
                    continue
                is_unreached = isinstance(error, NoBackendAvailable) or error.failure is Failure.CONNECT
                if not is_unreached or record.has_reached_engines or not queue.pool.is_restarting():
                    raise

    async def _try_backends(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _Record
    ) -> web.StreamResponse:
        """Try backends one after the other, within the limits for retries."""
        load = Load(compute_tokens=len(body) // self._live.settings.cost.bytes_per_token + 1)
        pick_request = PickRequest.of(load, proves_generation=path in _RUN_THE_MODEL)
        failed: list[Backend] = []
        attempts = 0
        with (
            Blame() as blame,
            RetryPermit(queue.lane.service.budget) as permit,
            queue.pool.lease(pick_request) as lease,
        ):
            while True:
                try:
                    return await self._exchange(path, request, body, lease.backend, record)
                except UpstreamError as error:
                    record.has_reached_engines |= error.failure is not Failure.CONNECT
                    failed.append(error.backend)
                    blame.note_failure(error)
                    if error.is_refusal and not record.is_committed and self._live.settings.retry.max_attempts > 1:
                        # This attempt does not count if another backend would accept the request.
                        if not queue.pool.would_accept(failed):
                            raise
                    else:
                        attempts += 1
                        await self._await_retry(error, attempts, permit, record)
                    try:
                        lease.move(failed, because=error)
                    except NoBackendAvailable as absence:
                        # Report the error of the engine, unless the engine was not reached.
                        raise absence if error.failure is Failure.CONNECT else error from None
                    self._metrics.retries_total.labels(queue.pool.role, error.failure).inc()
                await asyncio.sleep(backoff_seconds(self._live.settings.retry, max(1, attempts)))

    async def _await_retry(self, error: UpstreamError, attempts: int, permit: RetryPermit, record: _Record) -> None:
        """Wait for a permit to retry the request. Raises the error if it must not be retried."""
        max_attempts = self._live.settings.retry.max_attempts
        if not may_retry(error, sent_to_client=record.is_committed, attempts=attempts, max_attempts=max_attempts):
            raise error
        is_free = error.failure is Failure.CONNECT
        if not is_free and not await permit.acquire(self._live.settings.retry.budget_wait_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error

    async def _exchange(
        self, path: str, request: web.Request, body: bytes, backend: Backend, record: _Record
    ) -> web.StreamResponse:
        record.instance = backend.name
        passed_on = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        key = self._engine_keys.headers(backend, self._client_keys.credential(request))
        connect_seconds = self._live.settings.timeouts.connect_seconds
        exchange = self._client.stream(request.method, backend.url, path, body, {**passed_on, **key}, connect_seconds)
        try:
            async with asyncio.timeout(self._live.settings.timeouts.prefill_seconds) as deadline, exchange as answer:
                if not 200 <= answer.status < 300:
                    raise await _make_refusal(backend, answer)
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    raise _make_too_large_error(backend)
                return await self._relay(request, answer, backend, record, deadline)
        except (EngineRequestError, TimeoutError) as error:
            raise _make_exchange_error(backend, error) from None

    async def _relay(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        backend: Backend,
        record: _Record,
        deadline: asyncio.Timeout,
    ) -> web.StreamResponse:
        """Copy the engine's answer to the client as it arrives.

        A slow client slows the engine down, and extends its deadline.
        """
        response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
        response.content_length = answer.content_length
        record.status, record.is_committed = answer.status, True
        await self._to_client(response.prepare(request))
        async for chunk in answer.content.iter_any():
            with _pause_deadline(deadline):
                await self._to_client(response.write(chunk))
            record.bytes_sent += len(chunk)
            if record.bytes_sent > MAX_ANSWER_BYTES:
                raise _make_too_large_error(backend)
        await self._to_client(response.write_eof())
        record.broken = None
        return response

    async def _to_client(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._live.settings.listen.write_timeout_seconds):
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
