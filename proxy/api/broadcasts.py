"""Sends a request of an administrator to many engines: to empty prefix caches, to profile, to sleep and to wake up.

Each engine gets the query and body of the administrator. Only the success of its answer matters. The parameters
`?role=decode` and `?instance=host:port` select engines, and may be repeated. Engines do not get them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.api.credentials import Administrators, author_of_change
from proxy.common.errors import BadRequest
from proxy.listener.body import read_body
from proxy.listener.replies import json_response
from proxy.settings import Listen
from proxy.upstream import EngineClient, EngineRequest, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp.typedefs import Handler
    from multidict import MultiMapping

    from proxy.api.instances import InstanceParts
    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend

logger = logging.getLogger(__name__)

RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
"""The gateway's route, which has the same name in vLLM."""
START_PROFILE: Final = "/start_profile"
STOP_PROFILE: Final = "/stop_profile"
"""Routes of vLLM and SGLang. vLLM must have been started with a profiler. SGLang takes options in the body."""
_SLEEP: Final = ("/sleep", "/release_memory_occupation")
_WAKE: Final = ("/wake_up", "/resume_memory_occupation")
"""Routes of vLLM (with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode) and SGLang (with --enable-memory-saver)."""

_SELECTORS: Final[Mapping[str, Callable[[Backend], str]]] = {
    "role": lambda backend: backend.role.value,
    "instance": lambda backend: backend.name,
}

# SGLang can wait until it is idle before it empties its cache, and its benchmark lets it wait for 60 s. Engines write
# their profile before they answer, which takes minutes.
_TIMEOUT_SECONDS: Final = {START_PROFILE: 600.0, STOP_PROFILE: 600.0}
_CACHE_TIMEOUT_SECONDS: Final = 90.0
_CONNECT_SECONDS: Final = 5.0
_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)


@dataclass(frozen=True, slots=True)
class _BroadcastMessage:
    """The request that a broadcast sends to each engine."""

    engine_path: str
    """The path at the engine."""
    query_parameters: Sequence[tuple[str, str]]
    """The query, without the parameters that select engines."""
    request_body: bytes
    """The body of the administrator."""
    content_type: str
    """The Content-Type of the body. Empty: none."""

    @property
    def is_partial_wake_up(self) -> bool:
        """Whether an engine wakes up only partially, such as its weights before its KV cache."""
        return any(name == "tags" for name, _ in self.query_parameters) or b'"tags"' in self.request_body


class BroadcastApi:
    """The routes that send a request to all engines or to selected ones, in any state of health.

    An instance is disabled before it sleeps, and gets the request to sleep after its last answer. It is enabled when it
    has woken up completely.
    """

    def __init__(
        self,
        parts: InstanceParts,
        client: EngineClient,
        keys: EngineKeys,
        administrators: Administrators,
        cache_path: str = RESET_PREFIX_CACHE,
    ) -> None:
        """Create the broadcast api.

        Args:
            parts: The parts of the routes on instances.
            client: Client for engines.
            keys: Credentials for engines.
            administrators: Restricts the routes to administrators.
            cache_path: The route of the engines that empties their prefix caches. Administrators may use it, too.
        """
        self._pools = parts.pools
        self._roster = parts.roster
        self._scoreboard = parts.scoreboard
        self._engine_client = client
        self._engine_keys = keys
        self._administrators = administrators
        self._cache_path = cache_path

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes of broadcasts for the application."""
        engines_paths = {path: path for path in (START_PROFILE, STOP_PROFILE, *_SLEEP, *_WAKE)}
        engines_paths |= dict.fromkeys((RESET_PREFIX_CACHE, self._cache_path), self._cache_path)
        return [web.post(path, self._make_handler(engines_path)) for path, engines_path in engines_paths.items()]

    def _make_handler(self, path: str) -> Handler:
        async def send_to_all(request: web.Request) -> web.Response:
            body = await read_body(request, _BODY, size_option=None)
            backends = self._select_backends(request.query)
            count = "all" if len(backends) == len(self._all_backends()) else len(backends)
            logger.info(
                "broadcast: sent to %s instances: %s", count, path, extra={"fields": {"by": author_of_change(request)}}
            )
            query = [(name, value) for name, value in request.query.items() if name not in _SELECTORS]
            message = _BroadcastMessage(path, query, body, request.headers.get(hdrs.CONTENT_TYPE, ""))
            done = await asyncio.gather(*(self._send_message(backend, message) for backend in backends))
            failed = [backend for backend, ok in zip(backends, done, strict=True) if not ok]
            if not failed:
                return web.Response()
            answer = {"failed": [backend.url for backend in failed]}
            if path in _SLEEP or path in _WAKE:
                answer["disabled"] = [backend.url for backend in failed if self._is_backend_disabled(backend)]
            return json_response(answer, status=500)

        return self._administrators.require_administrator(send_to_all)

    def _all_backends(self) -> list[Backend]:
        return [backend for pool in self._pools.values() for backend in pool.all_backends()]

    def _select_backends(self, query: MultiMapping[str]) -> list[Backend]:
        """Return the backends that a query selects. Raises BadRequest for an unknown role or instance."""
        backends = self._all_backends()
        for name, of in _SELECTORS.items():
            selected = query.getall(name, [])
            if unknown := sorted({*selected}.difference(map(of, backends))):
                raise BadRequest(f"there is no instance with {name} {unknown[0]!r}", param=name)
            backends = [backend for backend in backends if not selected or of(backend) in selected]
        return backends

    async def _send_message(self, backend: Backend, message: _BroadcastMessage) -> bool:
        """Send a message to an engine. Return whether the engine has carried it out."""
        member = backend.role, backend.host, backend.port
        is_disabled_here = False
        if message.engine_path in _SLEEP:
            if not self._is_backend_disabled(backend):  # a disabled one keeps its time of evacuation
                is_disabled_here = self._roster.disable_backend(*member)
            if under_way := self._scoreboard.open_leases(backend.slot):
                words = "is disabled, and %s was not sent: %d requests are running; repeat the request later"
                logger.warning(
                    f"broadcast: %s instance %s {words}", backend.role, backend.name, message.engine_path, under_way
                )
                return False
        status, problem = await self._post_message(backend, message)
        # An engine that has not answered may be asleep. An engine that rejects the request serves as before.
        refuses_to_sleep = is_disabled_here and status is not None and bool(problem)
        if refuses_to_sleep or (message.engine_path in _WAKE and not problem and not message.is_partial_wake_up):
            self._roster.enable_backend(*member)
        if problem:
            stays = (
                " and stays disabled"
                if message.engine_path in (*_SLEEP, *_WAKE) and self._is_backend_disabled(backend)
                else ""
            )
            logger.error(
                "broadcast: %s instance %s failed on %s%s: %s",
                backend.role,
                backend.name,
                message.engine_path,
                stays,
                problem,
            )
        return not problem

    def _is_backend_disabled(self, backend: Backend) -> bool:
        return any(each.backend == backend and each.is_disabled for each in self._roster.members_of_role(backend.role))

    async def _post_message(self, backend: Backend, message: _BroadcastMessage) -> tuple[int | None, str]:
        """Return the status of an engine's answer (None without an answer) and the error, which is empty below 300."""
        headers = dict(self._engine_keys.credential_headers(backend))
        if message.request_body and message.content_type:
            headers[hdrs.CONTENT_TYPE] = message.content_type
        request = EngineRequest(
            path=message.engine_path,
            query_parameters=message.query_parameters,
            headers=headers,
            body=message.request_body,
        )
        seconds = _TIMEOUT_SECONDS.get(message.engine_path, _CACHE_TIMEOUT_SECONDS)
        try:
            status = await self._engine_client.post_status(backend.url, request, seconds, _CONNECT_SECONDS)
        except EngineRequestError as error:
            return None, str(error)
        return status, "" if status < 300 else f"status {status}"
