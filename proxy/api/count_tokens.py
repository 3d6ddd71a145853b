"""POST /v1/messages/count_tokens: how many tokens a prompt has, of whom the engines' tokenizer is asked.

Engines count the tokens of a chat at `/tokenize`, which is asked for the chat that the message would become. SGLang
before 0.5.12 has this very route instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.questions import counted
from proxy.dialects.messages import Messages
from proxy.dialects.model_names import ModelNames
from proxy.dialects.requests import read
from proxy.dialects.system_first import SystemFirst
from proxy.errors import Failure, UpstreamError
from proxy.listener.body import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.key_auth import KeyAuth
    from proxy.backend import Backend
    from proxy.errors import GatewayError
    from proxy.flow.lanes import Lanes
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.upstream import Upstream

PATH: Final = Messages.path + "/count_tokens"
_TOKENIZE: Final = "/tokenize"
_ENGINES_ASKED: Final = 2


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
        return [web.post(PATH, counted("tokenizer", self._count, self._client_keys, self._metrics))]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        """See replies.ERROR_BODIES."""
        return {PATH: Messages().error_body}

    async def _count(self, request: web.Request) -> web.Response:
        with self._lanes.whole.gateway.admission.hold(0) as held:
            document = read(await read_json(request, self._settings.listen, held.resize))
        values = dict(document.values)
        if isinstance(said := values.get("model"), str):
            values["model"] = self._names.served(said)
        credential = self._client_keys.credential(request)
        headers = {} if credential is None else {"authorization": credential}
        tokens = await self._ask(values, headers)
        return web.Response(body=orjson.dumps({"input_tokens": tokens}), content_type="application/json")

    async def _ask(self, values: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        """Raises NoBackendAvailable, UpstreamError."""
        chat = Messages().prompt(values)
        body = orjson.dumps(chat | self._system_first.changes(chat))
        failed: list[Backend] = []
        lane = self._lanes.of(values.get("model"))
        while True:
            with lane.explaining():
                backend = lane.first.pick(failed)
            try:
                return await self._ask_one(backend, values, body, headers)
            except UpstreamError as error:
                failed.append(backend)
                if error.is_clients_fault or len(failed) == _ENGINES_ASKED:
                    raise

    async def _ask_one(
        self, backend: Backend, values: Mapping[str, Any], body: bytes, headers: Mapping[str, str]
    ) -> int:
        """One engine, in the one way or the other."""
        try:
            return await self._counted(backend, _TOKENIZE, body, headers, "count")
        except UpstreamError as error:
            if not error.is_clients_fault or self._settings.connector_traits.engine == "vLLM":
                raise
        return await self._counted(backend, PATH, orjson.dumps(values), headers, "input_tokens")

    async def _counted(self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], member: str) -> int:
        seconds = self._settings.timeouts.prefill_seconds
        response, answer = await self._upstream.fetch(
            backend, path, body, headers, answer_seconds=seconds, resend_if_stale=True
        )
        if response.status != 200:
            raise response.refuse(f"answered with status {response.status}", response.status, answer, response.headers)
        try:
            count = orjson.loads(answer)[member]
        except (orjson.JSONDecodeError, LookupError, TypeError):
            count = None
        if not isinstance(count, int):
            raise response.fail(Failure.BAD_ANSWER, "did not count the tokens")
        return count
