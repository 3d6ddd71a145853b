"""What SGLang's clients ask besides generating, answered for all engines together.

`sglang.bench_serving`, `bench_one_batch_server` and routers expect the shapes of SGLang's own router (mini_lb.py). Of
an engine's configuration only what such clients read is shown: SGLang tells its whole command line and environment,
its keys among them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import orjson
from aiohttp import web

from proxy.api.questions import ask, bad_answer, counted, nobody
from proxy.common.backend import Role
from proxy.common.errors import BadRequest, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from proxy.api.probes import ProbeApi
    from proxy.api.questions import QuestionParts
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend

_TIMEOUT_SECONDS: Final = 10.0
_INFO_PATHS: Final = ("/server_info", "/get_server_info")
"""As engines of today call it, and as those before 0.5.4 did."""

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

_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class SglangApi:
    """The routes of connector sglang_bootstrap. `pools` are those of both roles."""

    def __init__(self, parts: QuestionParts, pools: Mapping[Role, Pool], probes: ProbeApi) -> None:
        self._pools = pools
        self._client = parts.client
        self._engine_keys = parts.engine_keys
        self._client_keys = parts.client_keys
        self._probes = probes
        self._metrics = parts.metrics

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            *(web.get(path, self._counted(self._server_info)) for path in _INFO_PATHS),
            web.get("/v1/loads", self._counted(self._loads)),
            # Engines pass a health check by generating a token: an instance that is ready has just done so.
            web.get("/health_generate", self._probes.ready),
        ]

    def _counted(
        self, answer: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        return counted("sglang", answer, self._client_keys, self._metrics)

    async def _server_info(self, request: web.Request) -> web.Response:
        """Of each engine what is shown. `internal_states` are the decoders', which is where clients look for speed."""
        infos = await self._ask_all(request, self._info, "its configuration")
        shown = {role: [_shown(info) for _, info in infos[role]] for role in self._pools}
        states = [state for info in shown[Role.DECODE] for state in info["internal_states"]]
        return _json({"internal_states": states, "prefill": shown[Role.PREFILL], "decode": shown[Role.DECODE]})

    async def _loads(self, request: web.Request) -> web.Response:
        """The load of every data-parallel rank of all engines, numbered through."""
        for name, value in request.query.items():
            if name != "include" and (name, value) != ("format", "json"):
                raise BadRequest(f"/v1/loads of all engines together has no {name} {value!r}", param=name)
        include = request.query.get("include")
        path = "/v1/loads" + (f"?{urlencode({'include': include})}" if include is not None else "")

        async def of_one(backend: Backend, credential: str | None) -> Any:
            return await self._ask(backend, path, credential, "tell its load")

        answers = await self._ask_all(request, of_one, "its load")
        told = [(backend, answer) for role in self._pools for backend, answer in answers[role]]
        ranks = [(backend, rank) for backend, answer in told for rank in _objects(answer, "loads")]
        loads = [{**rank, "dp_rank": number, "role": backend.role} for number, (backend, rank) in enumerate(ranks)]
        newest = max(str(answer.get("timestamp", "")) for _, answer in told)
        return _json({"timestamp": newest, "version": told[0][1].get("version"), "loads": loads})

    async def _ask_all(
        self,
        request: web.Request,
        ask_one: Callable[[Backend, str | None], Awaitable[Any]],
        what: str,
    ) -> Mapping[Role, Sequence[tuple[Backend, dict[str, Any]]]]:
        """What the engines answer that do, at least one of each role. Raises GatewayError when none of a role does."""
        credential = self._client_keys.credential(request)
        backends = [backend for role in self._pools for backend in self._pools[role].eligible()]
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
            raise nobody(errors, what)
        return found

    async def _info(self, backend: Backend, credential: str | None) -> Any:
        new, old = _INFO_PATHS
        what = "tell its configuration"
        try:
            return await self._ask(backend, new, credential, what)
        except UpstreamError as error:
            if error.engine_status != 404:
                raise
        return await self._ask(backend, old, credential, what)

    async def _ask(self, backend: Backend, path: str, credential: str | None, what: str) -> dict[str, Any]:
        """One engine's answer, which is a JSON object. Raises UpstreamError."""
        headers = self._engine_keys.headers(backend, credential)
        answer = await ask(self._client, backend, path, headers, _TIMEOUT_SECONDS, what)
        if not isinstance(answer, dict):
            raise bad_answer(backend, what)
        return answer


def _shown(info: dict[str, Any]) -> dict[str, Any]:
    """What clients are shown of an engine's configuration, and of each of its ranks."""
    states = [
        {name: value for name, value in state.items() if name in _SHOWN_OF_A_RANK}
        for state in _objects(info, "internal_states")
    ]
    return {**{name: value for name, value in info.items() if name in _SHOWN}, "internal_states": states}


def _objects(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in a list that may be of any shape."""
    listed = answer.get(name)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
