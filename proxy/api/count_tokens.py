"""Counts the tokens of a prompt with the tokenizer of the engines.

The routes are POST /v1/messages/count_tokens and /v1/responses/input_tokens. The request is turned into a chat, and
engines count its tokens at `/tokenize`. SGLang before 0.5.12 serves the first of these routes instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.questions import make_counted_route
from proxy.common.errors import Failure, GatewayError, NoBackendAvailable, UpstreamError
from proxy.dialects.adjustments import ModelNames, SystemMessageJoiner
from proxy.dialects.messages import Messages
from proxy.dialects.requests import parse_body
from proxy.dialects.responses import Responses
from proxy.listener.body import read_json
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.credentials import KeyAuth
    from proxy.common.backend import Backend
    from proxy.dialects.translated import TranslatedDialect
    from proxy.gateway.lanes import Lane, Lanes
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings
    from proxy.upstream import Upstream

_TOKENIZE: Final = "/tokenize"
_ENGINES_ASKED: Final = 2
_NO_SUCH_ROUTE: Final = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class _Counter:
    """A route that counts the tokens of requests in one dialect."""

    path: str
    dialect: TranslatedDialect
    answer: Mapping[str, Any]
    """Members of the answer besides the count."""
    is_in_old_sglang: bool = False
    """Whether SGLang before 0.5.12 serves this route."""


_COUNTERS: Final = (
    _Counter(f"{Messages.path}/count_tokens", Messages(), {}, is_in_old_sglang=True),
    _Counter(f"{Responses.path}/input_tokens", Responses(), {"object": "response.input_tokens"}),
)


class CountTokensApi:
    """The routes that count tokens. They take no lease: counting is no load, and does not show whether engines work."""

    def __init__(
        self,
        lanes: Lanes,
        upstream: Upstream,
        client_keys: KeyAuth,
        settings: Callable[[], Settings],
        metrics: Metrics,
    ) -> None:
        self._lanes = lanes
        self._upstream = upstream
        self._client_keys = client_keys
        self._metrics = metrics
        self._settings = settings

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes that count tokens for the application."""
        return [
            web.post(
                counter.path,
                make_counted_route("tokenizer", partial(self._count, counter), self._client_keys, self._metrics),
            )
            for counter in _COUNTERS
        ]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        return {counter.path: counter.dialect.error_body for counter in _COUNTERS}

    def request_id_headers(self) -> Mapping[str, str]:
        return {counter.path: counter.dialect.request_id_header for counter in _COUNTERS}

    async def _count(self, counter: _Counter, request: web.Request) -> web.Response:
        with self._lanes.whole.service.admission.buffers.hold(0) as held:
            document = parse_body(await read_json(request, self._settings().listen, held.resize))
        values = dict(document.values)
        if isinstance(name := values.get("model"), str):
            values["model"] = ModelNames(self._settings().models.aliases).engine_name(name)
        credential = self._client_keys.credential(request)
        headers = {} if credential is None else {"authorization": credential}
        tokens = await self._ask(counter, values, headers)
        return web.Response(
            body=orjson.dumps({**counter.answer, "input_tokens": tokens}), content_type="application/json"
        )

    async def _ask(self, counter: _Counter, values: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        """Return the count of one engine, or of another one if it fails. Raises NoBackendAvailable, UpstreamError."""
        chat = counter.dialect.make_prompt(values)
        body = dumps(chat | SystemMessageJoiner(self._settings().models.system_first).changed_chat_members(chat))
        failed: list[Backend] = []
        lane = await self._lanes.find(values.get("model"))
        backend = _pick(lane, failed)
        while True:
            try:
                return await self._ask_one(counter, backend, values, body, headers)
            except UpstreamError as error:
                failed.append(backend)
                if error.is_fault_of_client or len(failed) == _ENGINES_ASKED:
                    raise
                try:
                    backend = _pick(lane, failed)
                except NoBackendAvailable:
                    # The error of the instance tells the client more than its absence.
                    raise error from None

    async def _ask_one(
        self,
        counter: _Counter,
        backend: Backend,
        values: Mapping[str, Any],
        body: bytes,
        headers: Mapping[str, str],
    ) -> int:
        """Return the count of one engine. It is requested at `/tokenize` or at the route of old SGLang."""
        try:
            return await self._request_count(backend, _TOKENIZE, body, headers, "count")
        except UpstreamError as error:
            is_sglang = self._settings().connector_traits.engine != "vLLM"
            is_refused = error.is_fault_of_client or error.failure is Failure.BAD_ANSWER
            if not (is_sglang and counter.is_in_old_sglang and is_refused):
                raise
        return await self._request_count(backend, counter.path, dumps(values), headers, "input_tokens")

    async def _request_count(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], member: str
    ) -> int:
        """Return the count in a member of an engine's answer. Raises UpstreamError."""
        seconds = self._settings().timeouts.prefill_seconds
        response, answer = await self._upstream.fetch(
            backend, path, body, headers, answer_seconds=seconds, resend_if_stale=True
        )
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError:
            parsed = None
        if response.status in _NO_SUCH_ROUTE and not (isinstance(parsed, dict) and "error" in parsed):
            raise response.make_failure(
                Failure.BAD_ANSWER, f"does not count tokens ({path} answered with status {response.status})"
            )
        if response.status != 200:
            raise response.make_refusal(
                f"answered with status {response.status}", response.status, answer, response.headers
            )
        count = parsed.get(member) if isinstance(parsed, dict) else None
        if not isinstance(count, int):
            raise response.make_failure(
                Failure.BAD_ANSWER, f"did not count the tokens ({path} answered without `{member}`)"
            )
        return count


def _pick(lane: Lane, avoid: Sequence[Backend]) -> Backend:
    """Return an instance of the first role that a prompt passes and that has one. Raises NoBackendAvailable."""
    for pool in lane.all_pools:
        if not set(pool.eligible()) <= set(avoid):
            return pool.pick(avoid)
    with lane.explaining():
        return lane.first.pick(avoid)
