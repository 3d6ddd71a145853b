"""The routes that generate, one for each dialect: bytes in, Call, gateway, answer; and the account of how it ended."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy import call as calls
from proxy.api.body import memory_bytes, read_json
from proxy.api.drain import ShuttingDown
from proxy.api.replies import REQUEST_ID
from proxy.dialects import DIALECTS
from proxy.errors import Failure, GatewayError, UpstreamError
from proxy.flow.client import ClientStalled, ClientStream
from proxy.logs import access_line
from proxy.record import Record
from proxy.wire.weight import LONG_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api.drain import Drain
    from proxy.api.keys import ClientKeys
    from proxy.dialects.base import Dialect
    from proxy.flow.gateway import Gateway
    from proxy.metrics import Metrics
    from proxy.settings import Settings

# Request headers that mean the same to the engines, beside the client's credential. Everything else is rebuilt or
# dropped: hop-by-hop headers, and those that steer an engine, such as X-data-parallel-rank, which an endpoint per rank
# answers with 400.
_PASSED_ON: Final = ("traceparent", "tracestate", calls.FIRST_TOKEN_HEADER)


class GenerationApi:
    """The routes that go through the connector."""

    def __init__(self, gateway: Gateway, keys: ClientKeys, drain: Drain, settings: Settings, metrics: Metrics) -> None:
        self._gateway = gateway
        self._keys = keys
        self._drain = drain
        self._settings = settings
        self._metrics = metrics
        # Finding a series by its labels costs more than counting with it, and there are few.
        self._requests = cache(metrics.requests_total.labels)
        self._ends = cache(metrics.request_end_total.labels)
        self._durations = cache(metrics.request_duration_seconds.labels)
        self._first_tokens = cache(metrics.time_to_first_token_seconds.labels)
        self._stages = cache(metrics.stage_duration_seconds.labels)
        self._tokens = cache(metrics.tokens_total.labels)
        self._inflight = cache(metrics.inflight_requests.labels)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self._settings = settings

    def routes(self) -> Sequence[web.RouteDef]:
        """One for each dialect that the engines can serve."""
        return [
            web.route(method, dialect.path, partial(self._serve, dialect))
            for dialect in DIALECTS
            if self._gateway.speaks(dialect)
            for method in dialect.methods
        ]

    async def _serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """One access line and one set of observations per request, however it ends."""
        record = Record(dialect.label, request[REQUEST_ID])
        inflight = self._inflight(dialect.label)
        inflight.inc()
        try:
            with self._drain:
                return await self._answer(dialect, request, record)
        except BaseException as error:
            record.error = error
            raise
        finally:
            inflight.dec()
            self._observe(record)

    async def _answer(self, dialect: Dialect, request: web.Request, record: Record) -> web.StreamResponse:
        caller = self._keys.identify(request)
        record.caller = caller.name
        admission = self._gateway.admission
        admission.check(caller.name)  # what will be refused anyhow is not read first
        with self._keys.enter(caller), admission.hold(0) as held:
            listen = self._settings.listen
            raw = await read_json(request, listen, held.resize)
            is_long = len(raw) > LONG_BYTES
            document = calls.read(raw)
            held.add(memory_bytes(raw, document.values, listen))
            del raw  # which the document has, if it needs it
            if is_long:
                await asyncio.sleep(0)  # tokens of others have come meanwhile
            call = dialect.parse(document, self._settings.cost, self._passed_on(request))
            if is_long:
                await asyncio.sleep(0)  # the legs' bodies cost time, too
            record.stream = call.stream
            if call.stream:
                return await self._stream(dialect, call, request, record)
            body = await self._gateway.complete(dialect, call, record)
            return web.Response(body=body, content_type="application/json")

    def _passed_on(self, request: web.Request) -> dict[str, str]:
        """The headers that reach the engines."""
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        credential = self._keys.credential(request)
        return headers if credential is None else {"authorization": credential, **headers}

    async def _stream(
        self, dialect: Dialect, call: calls.Call, request: web.Request, record: Record
    ) -> web.StreamResponse:
        client = ClientStream(request, {"X-Request-Id": record.request_id}, self._settings.listen.write_timeout_seconds)
        try:
            with self._drain:
                await self._gateway.stream(dialect, call, client, record)
        except GatewayError as error:
            if not client.is_committed:
                raise
            record.error = error
            client.break_off(dialect.error_event(error))
        except ClientStalled as stalled:
            record.error = stalled
        finally:
            record.committed = client.is_committed
        return client.response

    def _observe(self, record: Record) -> None:
        metrics, api = self._metrics, record.api
        duration = record.clock() - record.started
        term, status = end_of(record)
        self._requests(api, status).inc()
        self._ends(term).inc()
        self._durations(api, "true" if record.stream else "false").observe(duration)
        if record.first_token_seconds is not None:
            self._first_tokens(api).observe(record.first_token_seconds)
        prompt, cached, completion = record.tokens()
        self._tokens("prompt").inc(prompt)
        self._tokens("cached").inc(cached)
        self._tokens("completion").inc(completion)
        for journey in record.journeys:
            for stage, seconds in journey.seconds.items():
                self._stages(stage.label).observe(seconds)
        if record.committed and isinstance(record.error, UpstreamError):
            metrics.streams_broken_total.labels("engine", _broken_reason(record.error)).inc()
        elif record.committed and isinstance(record.error, ClientStalled):
            metrics.streams_broken_total.labels("client", "write_timeout").inc()
        elif record.committed and isinstance(record.error, ShuttingDown):
            metrics.streams_broken_total.labels("gateway", "draining").inc()
        elif record.committed and record.error is not None:
            metrics.streams_broken_total.labels("client", "left").inc()
        access_line(record.fields(status, term, duration))


def end_of(record: Record) -> tuple[str, int]:
    """Who ended the request and in which stage, as a two-letter `term`, and the status for log and metrics.

    The first letter: `-` nobody, it is complete; C the client left; c the client stalled; S an engine failed; s an
    engine was too slow; P the gateway refused. The second is the stage, R while the request was being read.
    """
    error = record.error
    if error is None:
        return "--", 200
    stage = record.stage.value if record.stage else "R"
    if isinstance(error, ClientStalled):
        return "cD", 200
    if isinstance(error, ShuttingDown) and record.committed:
        return "KD", 200
    if isinstance(error, asyncio.CancelledError | ConnectionError):  # whichever of the two is noticed first
        return "C" + stage, 200 if record.committed else 499
    if isinstance(error, UpstreamError):
        who = "s" if error.failure is Failure.TIMEOUT else "S"
        return who + stage, 200 if record.committed else error.status
    status = error.status if isinstance(error, GatewayError | web.HTTPException) else 500
    return "P" + stage, status


def _broken_reason(error: UpstreamError) -> str:
    known = (Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.RECOMPUTED)
    return error.failure.value if error.failure in known else Failure.BROKEN.value
