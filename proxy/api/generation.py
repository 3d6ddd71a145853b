"""The routes that generate, one for each dialect: bytes in, Call, gateway, answer"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.api.debug_headers import RECORD
from proxy.call import CONTEXT_HEADERS, FIRST_TOKEN_HEADER, PRIORITY_HEADER, SESSION_HEADER
from proxy.dialects.model_names import ModelNames
from proxy.dialects.priorities import bounded
from proxy.dialects.requests import read
from proxy.dialects.system_first import SystemFirst
from proxy.dialects.translated import Translated
from proxy.errors import ClientStalled, GatewayError
from proxy.flow.client import ClientStream
from proxy.listener.body import memory_bytes, read_json
from proxy.listener.replies import REQUEST_ID, count_rejection
from proxy.wire.weight import LONG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.key_auth import KeyAuth
    from proxy.call import Call
    from proxy.dialects.base import Dialect
    from proxy.flow.gateway import Gateway
    from proxy.flow.lanes import Lanes
    from proxy.listener.drain import Drain
    from proxy.observe.observers import Observers
    from proxy.observe.record import RequestRecord
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

# Request headers that mean the same to the engines, beside the client's credential. Everything else is rebuilt or
# dropped: hop-by-hop headers, and those that steer an engine, such as X-data-parallel-rank, which an endpoint per rank
# answers with 400.
PASSED_ON: Final = (*CONTEXT_HEADERS, FIRST_TOKEN_HEADER, PRIORITY_HEADER, SESSION_HEADER)


class GenerationApi:
    """The routes that go through the connector."""

    def __init__(
        self,
        dialects: Sequence[Dialect],
        lanes: Lanes,
        keys: KeyAuth,
        drain: Drain,
        settings: Settings,
        observers: Observers,
        is_news: Callable[[str, str], bool],
    ) -> None:
        """`dialects`: those that the engines can serve. `is_news`: whether no worker has logged this of a subject."""
        self._dialects = dialects
        self._lanes = lanes
        self._keys = keys
        self._drain = drain
        self._observers = observers
        self._is_news = is_news
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self._settings = settings
        self._names = ModelNames(settings.models.aliases)
        self._system_first = SystemFirst(settings.models.system_first)

    def routes(self) -> Sequence[web.RouteDef]:
        """One for each dialect and method."""
        return [
            web.route(method, dialect.path, partial(self._serve, dialect))
            for dialect in self._dialects
            for method in dialect.methods
        ]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        """What each route says in place of OpenAI's error bodies; see replies.ERROR_BODIES."""
        return {dialect.path: dialect.error_body for dialect in self._dialects}

    def request_id_headers(self) -> Mapping[str, str]:
        """See replies.REQUEST_ID_HEADERS."""
        return {dialect.path: dialect.request_id_header for dialect in self._dialects}

    async def _serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """One access line and one set of observations per request, however it ends."""
        record = request[RECORD] = self._observers.begin(dialect.label, request[REQUEST_ID], request.headers)
        try:
            with self._drain:
                return await self._answer(dialect, request, record)
        except BaseException as error:
            record.error = error
            raise
        finally:
            self._observers.end(record)

    async def _answer(self, dialect: Dialect, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        key = self._keys.identify(request)
        record.key = key.name
        admission = self._lanes.whole.gateway.admission
        admission.check(key.name)  # what will be refused anyhow is not read first
        with self._keys.enter(key), admission.hold(0) as held:
            listen = self._settings.listen
            readings = 2 if isinstance(dialect, Translated) else 1
            raw = await read_json(request, listen, held.resize, readings=readings)
            is_long = len(raw) > LONG_BYTES
            document = read(raw)
            if is_long:
                await asyncio.sleep(0)  # tokens of others have come meanwhile
            call = dialect.parse(document, self._settings.cost, self._passed_on(request))
            held.resize(memory_bytes(raw, document.read_values))
            del raw, document  # the call has what it needs of them, which may be another document
            if record.context is not None:
                call = call.in_context(record.context)
            if key.slot is not None:
                call = bounded(call, key.priority, lower_first=self._settings.connector_traits.lower_priority_first)
            call = self._names.translated(call)
            if isinstance(dialect, Translated):
                call = self._system_first.arranged(call)
            if call.left_out:
                self._log_left_out(dialect.path, key.name, call.left_out)
            if is_long:
                await asyncio.sleep(0)  # the legs' bodies cost time, too
            record.stream, record.model = call.stream, call.model
            lane = await self._lanes.find(call.served_model)
            record.served_model = self._lanes.known(call.served_model)
            with lane.explaining():
                if call.stream:
                    return await self._stream(dialect, call, request, record, lane.gateway)
                body = await lane.gateway.complete(dialect, call, record)
            return web.Response(body=body, content_type="application/json")

    def _log_left_out(self, path: str, key: str, kinds: Sequence[str]) -> None:
        """Log once for each client key what its requests contain that no engine can serve."""
        for kind in kinds:
            if self._is_news(f"{path} {key} {kind}", "left out"):
                logger.warning(
                    "left out of requests to %s by client key %s: %s, which no engine can serve; logged once",
                    *(path, key, kind),
                )

    def _passed_on(self, request: web.Request) -> dict[str, str]:
        """The headers that reach the engines."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        credential = self._keys.credential(request)
        return headers if credential is None else {"authorization": credential, **headers}

    async def _stream(
        self, dialect: Dialect, call: Call, request: web.Request, record: RequestRecord, gateway: Gateway
    ) -> web.StreamResponse:
        settings, headers = self._settings, {"X-Request-Id": record.request_id}
        client = ClientStream(
            request, headers, settings.listen.write_timeout_seconds, settings.stream, dialect.keep_alive
        )
        try:
            try:
                with self._drain:
                    await gateway.stream(dialect, call, client, record)
            except GatewayError as error:
                if not client.has_output:
                    raise
                # What decoders wrote counts as sent, so it is, even if the answer broke off in the same moment.
                await client.attend()
                record.error = error
                if not client.has_answer:
                    count_rejection(gateway.metrics, error)
                client.break_off(error)
        except ClientStalled as stalled:
            record.error = stalled
        finally:
            client.close()
            record.committed = client.is_committed
        return client.response
