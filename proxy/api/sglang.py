"""Answers queries of SGLang's clients with the combined data of all engines.

`sglang.bench_serving`, `bench_one_batch_server` and routers expect the format of SGLang's router (mini_lb.py). Only the
members that such clients read are shown, because SGLang reports its whole command line and environment with its keys.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from aiohttp import web

from proxy.api.questions import (
    QuestionParts,
    ask_engine,
    make_bad_answer_error,
    make_counted_route,
    make_no_answer_error,
)
from proxy.common.backend import Backend, Role
from proxy.common.errors import BadRequest, UpstreamError
from proxy.listener.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from proxy.api.probes import ProbeApi
    from proxy.balancer.pool import Pool

_TIMEOUT_SECONDS: Final = 10.0
_INFO_PATHS: Final = ("/server_info", "/get_server_info")
"""The path that engines serve, and the path that engines before 0.5.4 serve."""

_SHOWN: Final = frozenset(
    {
        *("version", "model_path", "served_model_name", "tokenizer_path", "disaggregation_mode", "context_length"),
        *("tp_size", "pp_size", "dp_size", "ep_size", "max_total_num_tokens", "max_running_requests"),
        *("speculative_algorithm", "disable_cuda_graph"),
    }
)
_SHOWN_OF_A_RANK: Final = frozenset(
    {
        *("dp_size", "attn_dp_size", "effective_max_running_requests_per_dp", "memory_usage"),
        *("last_gen_throughput", "avg_spec_accept_length"),
    }
)


class SglangApi:
    """The routes of the connector sglang_bootstrap."""

    def __init__(self, parts: QuestionParts, pools: Mapping[Role, Pool], probes: ProbeApi) -> None:
        """Prepare the routes. `pools`: the pools of both roles. Other parameters: see their classes."""
        self._pools = pools
        self._engine_client = parts.engine_client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.key_auth
        self._probe_api = probes
        self._metrics = parts.metrics

    def routes(self) -> Sequence[web.RouteDef]:
        """Return SGLang's own routes for the application."""
        return [
            *(web.get(path, self._make_route(self._answer_server_info)) for path in _INFO_PATHS),
            web.get("/v1/loads", self._make_route(self._answer_loads)),
            # A ready instance has just generated a token for its health check.
            web.get("/health_generate", self._probe_api.answer_readiness),
        ]

    def _make_route(
        self, answer: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        return make_counted_route("sglang", answer, self._client_keys, self._metrics)

    async def _answer_server_info(self, request: web.Request) -> web.Response:
        """Answer with the configuration of all engines. Its member `internal_states` describes only the decoders."""
        infos = await self._ask_all_engines(request, self._ask_server_info, "its configuration")
        shown = {role: [_public_members(info) for _, info in infos[role]] for role in self._pools}
        states = [state for info in shown[Role.DECODE] for state in info["internal_states"]]
        return json_response({"internal_states": states, "prefill": shown[Role.PREFILL], "decode": shown[Role.DECODE]})

    async def _answer_loads(self, request: web.Request) -> web.Response:
        """Answer with the loads of all data-parallel ranks of all engines, numbered consecutively."""
        for name, value in request.query.items():
            if name != "include" and (name, value) != ("format", "json"):
                raise BadRequest(f"/v1/loads of all engines together has no {name} {value!r}", param=name)
        include = request.query.get("include")
        path = "/v1/loads" + (f"?{urlencode({'include': include})}" if include is not None else "")

        async def loads_of_backend(backend: Backend, credential: str | None) -> Any:
            return await self._ask_engine(backend, path, credential, "tell its load")

        answers = await self._ask_all_engines(request, loads_of_backend, "its load")
        all_answers = [(backend, answer) for role in self._pools for backend, answer in answers[role]]
        ranks = [(backend, rank) for backend, answer in all_answers for rank in _object_list(answer, "loads")]
        loads = [{**rank, "dp_rank": number, "role": backend.role} for number, (backend, rank) in enumerate(ranks)]
        newest = max(str(answer.get("timestamp", "")) for _, answer in all_answers)
        return json_response({"timestamp": newest, "version": all_answers[0][1].get("version"), "loads": loads})

    async def _ask_all_engines(
        self,
        request: web.Request,
        ask_one: Callable[[Backend, str | None], Awaitable[Any]],
        what: str,
    ) -> Mapping[Role, Sequence[tuple[Backend, dict[str, Any]]]]:
        """Return the answers of all engines that answer. Raises GatewayError if a role has no engine that answers."""
        credential = self._client_keys.credential_for_engines(request)
        backends = [backend for role in self._pools for backend in self._pools[role].eligible_backends()]
        answers = await asyncio.gather(*(ask_one(backend, credential) for backend in backends), return_exceptions=True)
        found: dict[Role, list[tuple[Backend, dict[str, Any]]]] = {role: [] for role in self._pools}
        errors: list[UpstreamError] = []
        for backend, answer in zip(backends, answers, strict=True):
            if isinstance(answer, UpstreamError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[backend.role].append((backend, answer))
        if not all(found.values()):
            raise make_no_answer_error(errors, what)
        return found

    async def _ask_server_info(self, backend: Backend, credential: str | None) -> Any:
        new, old = _INFO_PATHS
        what = "tell its configuration"
        try:
            return await self._ask_engine(backend, new, credential, what)
        except UpstreamError as error:
            if error.engine_status != 404:
                raise
        return await self._ask_engine(backend, old, credential, what)

    async def _ask_engine(self, backend: Backend, path: str, credential: str | None, what: str) -> dict[str, Any]:
        """Return the JSON object with which one engine answers. Raises UpstreamError."""
        headers = self._engine_keys.credential_headers(backend, credential)
        answer = await ask_engine(self._engine_client, backend, path, headers, _TIMEOUT_SECONDS, what)
        if not isinstance(answer, dict):
            raise make_bad_answer_error(backend, what)
        return answer


def _public_members(server_info: dict[str, Any]) -> dict[str, Any]:
    """Return the members of an engine's configuration and of its ranks that clients may see."""
    states = [
        {name: value for name, value in state.items() if name in _SHOWN_OF_A_RANK}
        for state in _object_list(server_info, "internal_states")
    ]
    return {**{name: value for name, value in server_info.items() if name in _SHOWN}, "internal_states": states}


def _object_list(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects in a member that should be a list."""
    listed = answer.get(name)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
