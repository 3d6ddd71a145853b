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
class _TokenCountRoute:
    """A route that counts the tokens of requests in one dialect."""

    route_path: str
    dialect: TranslatedDialect
    answer_members: Mapping[str, Any]
    """Members of the answer besides the count."""
    is_supported_by_old_sglang: bool = False
    """Whether SGLang before 0.5.12 serves this route."""


_COUNTERS: Final = (
    _TokenCountRoute(f"{Messages.path}/count_tokens", Messages(), {}, is_supported_by_old_sglang=True),
    _TokenCountRoute(f"{Responses.path}/input_tokens", Responses(), {"object": "response.input_tokens"}),
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
                counter.route_path,
                make_counted_route("tokenizer", partial(self._count_tokens, counter), self._client_keys, self._metrics),
            )
            for counter in _COUNTERS
        ]

    def error_bodies(self) -> Mapping[str, Callable[[GatewayError], bytes | None]]:
        return {counter.route_path: counter.dialect.error_body for counter in _COUNTERS}

    def request_id_headers(self) -> Mapping[str, str]:
        return {counter.route_path: counter.dialect.request_id_header for counter in _COUNTERS}

    async def _count_tokens(self, counter: _TokenCountRoute, request: web.Request) -> web.Response:
        with self._lanes.whole_lane.request_service.admission_queue.buffers.hold_body(0) as held:
            document = parse_body(await read_json(request, self._settings().listen, held.set_body_size))
        values = dict(document.values)
        if isinstance(name := values.get("model"), str):
            values["model"] = ModelNames(self._settings().models.aliases).engine_name(name)
        credential = self._client_keys.credential_for_engines(request)
        headers = {} if credential is None else {"authorization": credential}
        tokens = await self._ask_engines(counter, values, headers)
        return web.Response(
            body=orjson.dumps({**counter.answer_members, "input_tokens": tokens}), content_type="application/json"
        )

    async def _ask_engines(
        self, counter: _TokenCountRoute, values: Mapping[str, Any], headers: Mapping[str, str]
    ) -> int:
        """Return the count of one engine, or of another one if it fails. Raises NoBackendAvailable, UpstreamError."""
        chat = counter.dialect.make_prompt(values)
        body = dumps(chat | SystemMessageJoiner(self._settings().models.system_first).changed_chat_members(chat))
        failed: list[Backend] = []
        lane = await self._lanes.find_lane(values.get("model"))
        backend = _pick_instance(lane, failed)
        while True:
            try:
                return await self._ask_engine(counter, backend, values, body, headers)
            except UpstreamError as error:
                failed.append(backend)
                if error.is_fault_of_client or len(failed) == _ENGINES_ASKED:
                    raise
                try:
                    backend = _pick_instance(lane, failed)
                except NoBackendAvailable:
                    # The error of the instance tells the client more than its absence.
                    raise error from None

    async def _ask_engine(
        self,
        counter: _TokenCountRoute,
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
            if not (is_sglang and counter.is_supported_by_old_sglang and is_refused):
                raise
        return await self._request_count(backend, counter.route_path, dumps(values), headers, "input_tokens")

    async def _request_count(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], member: str
    ) -> int:
        """Return the count in a member of an engine's answer. Raises UpstreamError."""
        seconds = self._settings().timeouts.prefill_seconds
        response, answer = await self._upstream.post_and_read_body(
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


def _pick_instance(model_lane: Lane, avoided_backends: Sequence[Backend]) -> Backend:
    """Return an instance of the first role that a prompt passes and that has one. Raises NoBackendAvailable."""
    for pool in model_lane.all_pools:
        if not set(pool.eligible_backends()) <= set(avoided_backends):
            return pool.pick_backend(avoided_backends)
    with model_lane.explain_errors():
        return model_lane.first_pool.pick_backend(avoided_backends)
