"""The routes that generate text. They serve the requests that aiohttp parses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from aiohttp import HttpVersion11, web

from proxy.balancer.pick import pick_reason
from proxy.common.endpoints import find_client_address
from proxy.dialects.call import FORWARDED_HEADERS
from proxy.dialects.requests import parse_body
from proxy.gateway.request import Request
from proxy.listener.body import body_memory_bytes, read_json
from proxy.listener.replies import REQUEST_ID
from proxy.observe.record import RequestRecord, longest_stage_seconds
from proxy.wire.weight import LONG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from proxy.api.cors import Cors
    from proxy.api.credentials import Administrators, KeyAuth
    from proxy.balancer.pick import Pick
    from proxy.common.errors import GatewayError
    from proxy.dialects.base import Dialect
    from proxy.gateway.intake import Intake
    from proxy.gateway.lanes import Lanes
    from proxy.listener.connection import AiohttpConnection
    from proxy.listener.drain import DrainManager
    from proxy.observe.observers import RequestObservers
    from proxy.settings import Listen


ASKS: Final = "X-PDProxy-Debug"


def debug_fields(record: RequestRecord) -> Iterator[tuple[str, str]]:
    """Yield the debug headers of an answer, whose values are also in the access log.

    The instances are those of the last attempt at the first unit. The stages are the longest of all units.
    """
    timelines = record.timelines
    if timelines:
        first = timelines[0]
        yield from _choice_headers("Prefill", first.prefiller, first.prefill_id, first.prefill_pick)
        yield from _choice_headers("Decode", first.decoder, first.decode_id, first.decode_pick)
    yield "X-PDProxy-Attempts", str(sum(timeline.attempts for timeline in timelines))
    seconds = longest_stage_seconds([timeline.seconds_by_stage for timeline in timelines])
    durations = {stage.label: spent for stage, spent in seconds.items()} | {"total": record.clock() - record.started}
    # Milliseconds, as https://www.w3.org/TR/server-timing/ has them.
    yield "Server-Timing", ", ".join(f"{name};dur={1000 * spent:.1f}" for name, spent in durations.items())


def _choice_headers(role: str, instance: str, leg_id: str, backend_pick: Pick | None) -> Iterator[tuple[str, str]]:
    if instance != "-":
        why = "" if backend_pick is None else f"; reason={pick_reason(backend_pick)}"
        yield f"X-PDProxy-{role}", f"{instance}; id={leg_id}{why}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerationParts:
    """The parts of one worker for the routes that generate text."""

    lanes: Lanes
    """The lanes. Each has the instances for the same models, and the queues in front of them."""
    key_auth: KeyAuth
    """Keys of clients, and their limits."""
    drain_manager: DrainManager
    """Counts the requests in flight."""
    request_observers: RequestObservers
    """Receive the record of each request when it has ended."""
    get_cors: Callable[[], Cors]
    """Returns the rules for pages of other origins."""
    administrators: Administrators
    """Decides which clients may request the debug headers, which describe how a request was served."""


class GenerationApi:
    """The routes whose requests a connector serves on prefillers and decoders."""

    def __init__(self, parts: GenerationParts, dialects: Sequence[Dialect], listen: Callable[[], Listen]) -> None:
        """Create the generation api.

        Args:
            parts: The parts of the worker.
            dialects: The APIs that the engines can serve.
            listen: Returns the present settings of the listener.
        """
        self.request_intake: Intake
        """Reads and checks requests. It must be set before the first request."""
        self._dialects = dialects
        self._lanes = parts.lanes
        self._key_auth = parts.key_auth
        self._drain_manager = parts.drain_manager
        self._request_observers = parts.request_observers
        self._get_cors = parts.get_cors
        self._administrators = parts.administrators
        self._listen = listen

    def routes(self) -> Sequence[web.RouteDef]:
        """Return one route for each dialect and HTTP method."""
        return [
            web.route(method, dialect.path, partial(self._serve_request, dialect))
            for dialect in self._dialects
            for method in dialect.methods
        ]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        """Return the functions that write the error bodies of each route. See replies.ERROR_BODIES."""
        return {dialect.path: dialect.error_body for dialect in self._dialects}

    def request_id_headers(self) -> Mapping[str, str]:
        return {dialect.path: dialect.request_id_header for dialect in self._dialects}

    async def _serve_request(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Serve a request, and record its outcome once, after success, failure or a disconnect."""
        record = self._request_observers.begin_record(dialect.label, request[REQUEST_ID], request.headers)
        forwarded = request.headers.getall("X-Forwarded-For", ())
        record.client = find_client_address(request.remote or "-", forwarded, self._listen().trusted_proxies)
        client = _AiohttpClient(request, partial(self._additional_headers, request, record))
        try:
            with self._drain_manager:
                await self._parse_and_serve(dialect, request, client, record)
        except BaseException as error:
            if not client.has_begun:
                record.error = error
                self._request_observers.end_record(record)
            raise
        return client.response

    async def _parse_and_serve(
        self, dialect: Dialect, request: web.Request, client: _AiohttpClient, record: RequestRecord
    ) -> None:
        """Parse a request, and serve it. Raises the errors that occur before its Request has begun."""
        key = self._key_auth.find_client_key(request)
        record.key = key.key_name
        admission = self._lanes.whole_lane.request_service.admission_queue
        admission.check_queue_room(key.key_name)  # before the body is read, because a rejected body is not needed
        client.shows_debug = ASKS in request.headers and await self._administrators.is_administrator(request)
        with self._key_auth.count_in_flight(key), admission.buffers.hold_body(0) as held:
            readings = 1 if dialect.uses_engine_format else 2
            raw = await read_json(request, self._listen(), held.set_body_size, parse_count=readings)
            is_long = len(raw) > LONG_BYTES
            document = parse_body(raw)
            if is_long:
                await asyncio.sleep(0)  # let other requests send the tokens that have arrived
            call = self.request_intake.parse_call(dialect, document, self._select_engine_headers(request), key)
            held.set_body_size(body_memory_bytes(raw, document.read_values))
            del raw, document  # the call keeps what it needs
            record.stream, record.model = call.stream, call.model
            if is_long:
                await asyncio.sleep(0)  # writing the bodies for engines takes time, too
            lane = await self._lanes.find_lane(call.served_model)
            task = asyncio.current_task()
            assert task is not None
            with self._drain_manager.exclude_task(task):
                await client.serve_until_over(
                    Request(self.request_intake.request_parts, lane, client, dialect, call, key), record
                )

    def _additional_headers(
        self, request: web.Request, record: RequestRecord, shows_debug: bool
    ) -> Iterable[tuple[str, str]]:
        """Return the additional headers of the answer to a request."""
        return [*self._get_cors().make_headers(request), *(debug_fields(record) if shows_debug else ())]

    def _select_engine_headers(self, request: web.Request) -> dict[str, str]:
        """Return the client's headers that engines get."""
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        credential = self._key_auth.credential_for_engines(request)
        return headers if credential is None else {"authorization": credential, **headers}


class _AiohttpClient:
    """The ClientConnection of a request that aiohttp has parsed."""

    def __init__(self, request: web.Request, fields: Callable[[bool], Iterable[tuple[str, str]]]) -> None:
        """`fields`: returns additional headers of the answer. Its argument says whether debug headers are included."""
        self._connection = cast("AiohttpConnection", request.protocol)
        self._make_additional_headers = fields
        self._end_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closes_after_answer = False
        """Whether the gateway closes the connection after the answer, and announces this to the client."""
        self.shows_debug = False
        """Whether the answer has the debug headers."""
        self.has_begun = False
        """Whether a Request already serves the client."""
        self.transport = self._connection.client_transport
        self.supports_chunked_encoding = request.version >= HttpVersion11
        self.response = _WrittenResponse(keeps_alive=bool(request.keep_alive))

    async def serve_until_over(self, served: Request, record: RequestRecord) -> None:
        """Start a client's request, and wait until it is over."""
        self.has_begun = True
        served.start_serving(record)
        try:
            await self._end_future
        except asyncio.CancelledError:
            served.on_disconnect()
            raise

    @property
    def is_writing_paused(self) -> bool:
        return self._connection.writing_paused

    @property
    def on_write_buffer_full(self) -> Callable[[], None] | None:
        return self._connection.on_full

    @on_write_buffer_full.setter
    def on_write_buffer_full(self, called: Callable[[], None] | None) -> None:
        self._connection.on_full = called

    @property
    def additional_header_lines(self) -> bytes:
        fields = [*self._make_additional_headers(self.shows_debug)]
        if self.response.keep_alive and not self.supports_chunked_encoding:
            fields.append(("Connection", "keep-alive"))
        elif not self.response.keep_alive and self.supports_chunked_encoding and not self._closes_after_answer:
            fields.append(("Connection", "close"))
        return b"".join(f"{name}: {value}\r\n".encode("utf-8", "surrogateescape") for name, value in fields)

    async def wait_until_drained(self) -> None:
        await self._connection.drained()

    def end_after_answer(self) -> None:
        self._closes_after_answer = True
        self.response.force_close()

    def finish_request(self, now: float) -> None:
        self._connection.on_full = None
        if not self._end_future.done():
            self._end_future.set_result(None)


class _WrittenResponse(web.StreamResponse):
    """An answer for aiohttp whose bytes a Request has already written to the connection."""

    def __init__(self, *, keeps_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keeps_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing, because the answer has been written."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing, because the answer has been written."""
