"""How many tokens a prompt has, as the engines' tokenizer counts them.

POST /v1/messages/count_tokens and /v1/responses/input_tokens. Engines count the tokens of a chat at `/tokenize`, which
is asked for the chat that the request would become. SGLang before 0.5.12 has the first of these routes instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.questions import counted
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.dialects.adjustments import ModelNames, SystemFirst
from proxy.dialects.messages import Messages
from proxy.dialects.requests import read
from proxy.dialects.responses import Responses
from proxy.listener.body import read_json
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.key_auth import KeyAuth
    from proxy.common.backend import Backend
    from proxy.common.errors import GatewayError
    from proxy.dialects.translated import Translated
    from proxy.gateway.lanes import Lane, Lanes
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.upstream import Upstream

_TOKENIZE: Final = "/tokenize"
_ENGINES_ASKED: Final = 2
_NO_SUCH_ROUTE: Final = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class _Counter:
    """A route that counts the tokens of requests in the words of one dialect."""

    path: str
    dialect: Translated
    answer: Mapping[str, Any]
    """Members of the answer besides the count."""
    is_in_old_sglang: bool = False
    """SGLang before 0.5.12 serves it."""


_COUNTERS: Final = (
    _Counter(f"{Messages.path}/count_tokens", Messages(), {}, is_in_old_sglang=True),
    _Counter(f"{Responses.path}/input_tokens", Responses(), {"object": "response.input_tokens"}),
)


class CountTokensApi:
    """Asks without a lease: counting is no load, and says nothing about an engine's health."""

    def __init__(
        self,
        lanes: Lanes,
        upstream: Upstream,
        client_keys: KeyAuth,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._lanes = lanes
        self._upstream = upstream
        self._client_keys = client_keys
        self._metrics = metrics
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self._settings = settings
        self._names = ModelNames(settings.models.aliases)
        self._system_first = SystemFirst(settings.models.system_first)

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.post(
                counter.path, counted("tokenizer", partial(self._count, counter), self._client_keys, self._metrics)
            )
            for counter in _COUNTERS
        ]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        """See replies.ERROR_BODIES."""
        return {counter.path: counter.dialect.error_body for counter in _COUNTERS}

    def request_id_headers(self) -> Mapping[str, str]:
        """See replies.REQUEST_ID_HEADERS."""
        return {counter.path: counter.dialect.request_id_header for counter in _COUNTERS}

    async def _count(self, counter: _Counter, request: web.Request) -> web.Response:
        with self._lanes.whole.service.admission.buffers.hold(0) as held:
            document = read(await read_json(request, self._settings.listen, held.resize))
        values = dict(document.values)
        if isinstance(said := values.get("model"), str):
            values["model"] = self._names.served(said)
        credential = self._client_keys.credential(request)
        headers = {} if credential is None else {"authorization": credential}
        tokens = await self._ask(counter, values, headers)
        return web.Response(
            body=orjson.dumps({**counter.answer, "input_tokens": tokens}), content_type="application/json"
        )

    async def _ask(self, counter: _Counter, values: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        """Ask one engine, and another one if it fails. Raises NoBackendAvailable, UpstreamError."""
        chat = counter.dialect.prompt(values)
        body = dumps(chat | self._system_first.changes(chat))
        failed: list[Backend] = []
        lane = await self._lanes.find(values.get("model"))
        backend = _pick(lane, failed)
        while True:
            try:
                return await self._ask_one(counter, backend, values, body, headers)
            except UpstreamError as error:
                failed.append(backend)
                if error.is_clients_fault or len(failed) == _ENGINES_ASKED:
                    raise
                try:
                    backend = _pick(lane, failed)
                except NoBackendAvailable:
                    # The instance is there, and what it answered is the reason.
                    raise error from None

    async def _ask_one(
        self,
        counter: _Counter,
        backend: Backend,
        values: Mapping[str, Any],
        body: bytes,
        headers: Mapping[str, str],
    ) -> int:
        """Ask one engine, in the one way or the other."""
        try:
            return await self._counted(backend, _TOKENIZE, body, headers, "count")
        except UpstreamError as error:
            is_sglang = self._settings.connector_traits.engine != "vLLM"
            is_refused = error.is_clients_fault or error.failure is Failure.BAD_ANSWER
            if not (is_sglang and counter.is_in_old_sglang and is_refused):
                raise
        return await self._counted(backend, counter.path, dumps(values), headers, "input_tokens")

    async def _counted(self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], member: str) -> int:
        seconds = self._settings.timeouts.prefill_seconds
        response, answer = await self._upstream.fetch(
            backend, path, body, headers, answer_seconds=seconds, resend_if_stale=True
        )
        try:
            told = orjson.loads(answer)
        except orjson.JSONDecodeError:
            told = None
        if response.status in _NO_SUCH_ROUTE and not (isinstance(told, dict) and "error" in told):
            raise response.fail(
                Failure.BAD_ANSWER, f"does not count tokens ({path} answered with status {response.status})"
            )
        if response.status != 200:
            raise response.refuse(f"answered with status {response.status}", response.status, answer, response.headers)
        count = told.get(member) if isinstance(told, dict) else None
        if not isinstance(count, int):
            raise response.fail(Failure.BAD_ANSWER, f"did not count the tokens ({path} answered without `{member}`)")
        return count


def _pick(lane: Lane, avoid: Sequence[Backend]) -> Backend:
    """An instance, of the role that sees prompts first if there is one. Raises NoBackendAvailable."""
    for pool in lane.all_pools:
        if not set(pool.eligible()) <= set(avoid):
            return pool.pick(avoid)
    with lane.explaining():
        return lane.first.pick(avoid)
