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

from proxy.balancer.blame import FailureBlame
from proxy.balancer.engines import mask_credential
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import BadRequest, Failure, GatewayError, NoBackendAvailable, Overloaded, UpstreamError
from proxy.dialects.adjustments import ModelNames, limit_priority_member
from proxy.dialects.requests import parse_body
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.gateway.engine_room import EngineRoom
from proxy.gateway.retry import RetryPermit, backoff_seconds, may_retry
from proxy.listener import replies
from proxy.listener.body import read_body
from proxy.listener.replies import REQUEST_ID
from proxy.observe.logs import access_line
from proxy.upstream import EngineRequestError, make_upstream_error, read_bounded
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


class RoleQueue(EngineRoom):
    """The first role of a lane, and a queue for the time in which all its instances restart or reject requests."""

    def __init__(self, lane: Lane, settings: Settings, metrics: Metrics) -> None:
        self.lane = lane
        self.first_pool = lane.first_pool
        parts = AdmissionParts(engine_room=self, metrics=metrics)
        self.admission_queue = AdmissionQueue(parts, settings.admission)

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return not self.first_pool.are_all_restarting() and not self.first_pool.do_all_refuse()

    def find_absent_role(self) -> Role | None:
        return self.first_pool.role if self.first_pool.are_all_gone() else None


class _Body(msgspec.Struct):
    """The members of a request body that passing it through needs."""

    model: object = None
    priority: object = None


_decode_body = msgspec.json.Decoder(_Body).decode


def _parse_model_and_priority(body: bytes) -> _Body:
    """Return the model and priority of a body. Both are None if engines would reject the body."""
    try:
        return _decode_body(body)
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
    body = mask_credential(
        await read_bounded(answer, _MAX_REFUSAL_BYTES), answer.request_info.headers.get("Authorization")
    )
    return UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=headers)


def _make_too_large_error(backend: Backend) -> UpstreamError:
    return make_upstream_error(Failure.BAD_ANSWER, backend, "the engine's answer is too large")


def _make_exchange_error(backend: Backend, error: EngineRequestError | TimeoutError) -> UpstreamError:
    """Return the error for a failed exchange. A TimeoutError means that it took too long."""
    if isinstance(error, TimeoutError):
        return make_upstream_error(Failure.TIMEOUT, backend, "the engine did not answer in time")
    message = str(error) if error.failure_kind is Failure.CONNECT else _MESSAGES[error.failure_kind]
    return make_upstream_error(error.failure_kind, backend, message)


@dataclass(slots=True)
class _PassthroughRecord:
    """The outcome of one request, for the access log and the metrics."""

    client_key_name: str = "-"
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
    broken_stream_labels: tuple[str, str] | None = ("client", "left")
    """The side that broke off the answer, and the reason. None: the answer is complete."""


class _ClientLost(Exception):
    """The client of a passed-through request cannot receive more bytes."""

    def __init__(self, reason: str) -> None:
        """Store the reason, which is a label of the metric."""
        super().__init__(reason)
        self.reason_label = reason


class PassthroughApi:
    """The routes of the configured groups. The first role of each lane answers them."""

    def __init__(self, parts: QuestionParts, lanes: Lanes, drain: DrainManager, live: LiveSettings) -> None:
        settings = live.settings
        self._live_settings = live
        self._engine_client = parts.engine_client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.key_auth
        self._drain_manager = drain
        self._body_buffers = lanes.whole_lane.request_service.admission_queue.buffers
        self._route_groups: list[str] = [*settings.passthrough]
        if settings.connector_traits.has_sglang_routes:
            self._route_groups.append("sglang")
        self._metrics = parts.metrics
        self._lanes = lanes
        self._whole_queue = RoleQueue(lanes.whole_lane, settings, parts.metrics)
        self._queues: dict[Lane, RoleQueue] = {}
        """The queues of lanes of single models."""
        self._names = ModelNames(settings.models.aliases)
        live.call_on_change(self._on_settings_change)

    def _on_settings_change(self, settings: Settings) -> None:
        self._names = ModelNames(settings.models.aliases)
        for queue in (self._whole_queue, *self._queues.values()):
            queue.admission_queue.set_limits(settings.admission)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the passed-through routes for the application."""
        return [
            web.route(method, path, partial(self._serve_request, group, path))
            for group in self._route_groups
            for method, path in ROUTES[group]
        ]

    async def _serve_request(self, group: str, path: str, request: web.Request) -> web.StreamResponse:
        record = _PassthroughRecord()
        started = time.monotonic()
        with self._metrics.inflight_requests.labels(group).track_inprogress():
            try:
                with self._drain_manager:
                    return await self._answer_request(path, request, record)
            except (GatewayError, web.HTTPException) as error:
                if record.is_committed:
                    record.broken_stream_labels = ("engine", "broken")
                else:
                    record.status = error.status
                raise
            except _ClientLost as lost:
                record.broken_stream_labels = ("client", lost.reason_label)
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=499)  # is not sent
            finally:
                self._record_request(group, path, request, record, time.monotonic() - started)

    async def _answer_request(self, path: str, request: web.Request, record: _PassthroughRecord) -> web.StreamResponse:
        key = self._client_keys.find_client_key(request)
        record.client_key_name = key.key_name
        with self._client_keys.count_in_flight(key), self._body_buffers.hold_body(0) as held:
            body = await read_body(request, self._live_settings.settings.listen, held.set_body_size)
            body, model = self._adapt_body_for_engines(request, body, key)
            queue = await self._queue_of(model)
            with queue.lane.explain_errors():
                return await self._serve_from_queue(queue, path, request, body, record)

    async def _queue_of(self, model: object) -> RoleQueue:
        """Return the queue for a model, which has the engines' name. Raises the errors of Lanes.find_lane."""
        lanes = self._lanes
        if not lanes.served_models.has_several_groups:
            return self._whole_queue
        lane = await lanes.find_lane(model)
        if lane is lanes.whole_lane:
            return self._whole_queue
        queue = self._queues.get(lane)
        if queue is None:
            # Some lanes may be gone.
            self._queues = {other: queue for other, queue in self._queues.items() if other in lanes.all_lanes}
            queue = self._queues[lane] = RoleQueue(lane, self._live_settings.settings, self._metrics)
        return queue

    def _adapt_body_for_engines(self, request: web.Request, body: bytes, key: ApiKey) -> tuple[bytes, object]:
        """Return the body for engines, and the engines' name of the model or None.

        The body has the engines' name of the model, and a priority that the client key allows. If there is no body, the
        query may name the model. The body is not parsed if nothing in it can matter.

        Raises:
            BadRequest: The body must be changed and is not valid JSON.
        """
        is_bounded = key.usage_slot is not None
        if not body:
            requested = request.query.get("model")
            return body, None if requested is None else self._names.engine_name(requested)
        if not (is_bounded or self._names.has_aliases or self._lanes.served_models.has_several_groups):
            return body, None
        parsed = _parse_model_and_priority(body)
        changes: dict[str, object] = {}
        name = parsed.model
        if isinstance(name, str) and (served := self._names.engine_name(name)) != name:
            changes["model"] = name = served
        if is_bounded and parsed.priority is not None:
            lower_first = self._live_settings.settings.connector_traits.lower_priority_first
            changes.update(limit_priority_member(parsed.priority, key.default_priority, lower_first=lower_first))
        return join_body(parse_body(body).make_changed_body(changes)) if changes else body, name

    async def _serve_from_queue(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _PassthroughRecord
    ) -> web.StreamResponse:
        """Try to serve a request until it succeeds or the longest wait is over.

        Try again after a restart if no engine was reached, and again if all instances have rejected the request.
        """
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._live_settings.settings.admission.wait_seconds
        rejection: UpstreamError | None = None
        while True:
            try:
                async with queue.admission_queue.make_entry(record.client_key_name):
                    return await self._try_backends(queue, path, request, body, record)
            except Overloaded as error:
                raise error if rejection is None else rejection from None
            except (NoBackendAvailable, UpstreamError) as error:
                if loop.time() >= waits_until:
                    raise
                if isinstance(error, UpstreamError) and error.is_refusal:
                    if (
                        record.is_committed
                        or self._live_settings.settings.retry.max_attempts < 2
                        or not queue.first_pool.do_all_refuse()
                    ):
                        raise
                    rejection = error
                    continue
                is_unreached = isinstance(error, NoBackendAvailable) or error.failure is Failure.CONNECT
                if not is_unreached or record.has_reached_engines or not queue.first_pool.are_all_restarting():
                    raise

    async def _try_backends(
        self, queue: RoleQueue, path: str, request: web.Request, body: bytes, record: _PassthroughRecord
    ) -> web.StreamResponse:
        """Try backends one after the other, within the limits for retries."""
        load = Load(compute_tokens=len(body) // self._live_settings.settings.cost.bytes_per_token + 1)
        pick_request = PickRequest.make_for_load(load, proves_generation=path in _RUN_THE_MODEL)
        failed: list[Backend] = []
        attempts = 0
        with (
            FailureBlame() as blame,
            RetryPermit(queue.lane.request_service.retry_budget) as permit,
            queue.first_pool.make_lease(pick_request) as lease,
        ):
            while True:
                try:
                    return await self._exchange_with_engine(path, request, body, lease.backend, record)
                except UpstreamError as error:
                    record.has_reached_engines |= error.failure is not Failure.CONNECT
                    failed.append(error.backend)
                    blame.record_failure(error)
                    if (
                        error.is_refusal
                        and not record.is_committed
                        and self._live_settings.settings.retry.max_attempts > 1
                    ):
                        # This attempt does not count if another backend would accept the request.
                        if not queue.first_pool.would_accept(failed):
                            raise
                    else:
                        attempts += 1
                        await self._await_retry(error, attempts, permit, record)
                    try:
                        lease.move_to_other_backend(failed, cause=error)
                    except NoBackendAvailable as absence:
                        # Report the error of the engine, unless the engine was not reached.
                        raise absence if error.failure is Failure.CONNECT else error from None
                    self._metrics.retries_total.labels(queue.first_pool.role, error.failure).inc()
                await asyncio.sleep(backoff_seconds(self._live_settings.settings.retry, max(1, attempts)))

    async def _await_retry(
        self, error: UpstreamError, attempts: int, permit: RetryPermit, record: _PassthroughRecord
    ) -> None:
        """Wait for a permit to retry the request. Raises the error if it must not be retried."""
        max_attempts = self._live_settings.settings.retry.max_attempts
        if not may_retry(error, sent_to_client=record.is_committed, attempt_count=attempts, max_attempts=max_attempts):
            raise error
        is_free = error.failure is Failure.CONNECT
        if not is_free and not await permit.acquire_permit(self._live_settings.settings.retry.budget_wait_seconds):
            self._metrics.retry_budget_exhausted_total.inc()
            raise error

    async def _exchange_with_engine(
        self, path: str, request: web.Request, body: bytes, backend: Backend, record: _PassthroughRecord
    ) -> web.StreamResponse:
        record.instance = backend.name
        passed_on = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        key = self._engine_keys.credential_headers(backend, self._client_keys.credential_for_engines(request))
        connect_seconds = self._live_settings.settings.timeouts.connect_seconds
        exchange = self._engine_client.stream_response(
            request.method, backend.url, path, body, {**passed_on, **key}, connect_seconds
        )
        try:
            async with (
                asyncio.timeout(self._live_settings.settings.timeouts.prefill_seconds) as deadline,
                exchange as answer,
            ):
                if not 200 <= answer.status < 300:
                    raise await _make_refusal(backend, answer)
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    raise _make_too_large_error(backend)
                return await self._relay_answer(request, answer, backend, record, deadline)
        except (EngineRequestError, TimeoutError) as error:
            raise _make_exchange_error(backend, error) from None

    async def _relay_answer(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        backend: Backend,
        record: _PassthroughRecord,
        deadline: asyncio.Timeout,
    ) -> web.StreamResponse:
        """Copy the engine's answer to the client as it arrives.

        A slow client slows the engine down, and extends its deadline.
        """
        response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
        response.content_length = answer.content_length
        record.status, record.is_committed = answer.status, True
        await self._send_to_client(response.prepare(request))
        async for chunk in answer.content.iter_any():
            with _pause_deadline(deadline):
                await self._send_to_client(response.write(chunk))
            record.bytes_sent += len(chunk)
            if record.bytes_sent > MAX_ANSWER_BYTES:
                raise _make_too_large_error(backend)
        await self._send_to_client(response.write_eof())
        record.broken_stream_labels = None
        return response

    async def _send_to_client(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._live_settings.settings.listen.write_timeout_seconds):
                await sending
        except TimeoutError:
            raise _ClientLost("write_timeout") from None
        except ConnectionError:
            raise _ClientLost("left") from None

    def _record_request(
        self, group: str, path: str, request: web.Request, record: _PassthroughRecord, duration_seconds: float
    ) -> None:
        self._metrics.requests_total.labels(group, str(record.status)).inc()
        if record.is_committed and record.broken_stream_labels:
            self._metrics.streams_broken_total.labels(*record.broken_stream_labels).inc()
        access_line(
            {
                "id": request[REQUEST_ID],
                "key": record.client_key_name,
                "api": group,
                "path": path,
                "code": record.status,
                "instance": record.instance,
                "dur": duration_seconds,
                "bytes": record.bytes_sent,
            }
        )
