"""What an administrator tells all engines at once: to empty their prefix caches, to begin and to end a profile.

Each engine gets the caller's query and body, and its answer counts only as a yes or a no.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import hdrs, web

from proxy.api.administrators import author
from proxy.listener.body import read_body
from proxy.settings import Listen
from proxy.upstream import engine_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import aiohttp
    from aiohttp.typedefs import Handler

    from proxy.api.administrators import Administrators
    from proxy.backend import Backend, Role
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.pool import Pool

logger = logging.getLogger(__name__)

RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
"""Ours, by vLLM's name."""
START_PROFILE: Final = "/start_profile"
STOP_PROFILE: Final = "/stop_profile"
"""Of both. vLLM has these routes only if it was started with a profiler, SGLang takes options in the body."""

# SGLang may be told to wait until it is idle before it empties its cache; its benchmark lets it wait for 60 s. What a
# profiler has recorded is written out before the engine answers, which takes minutes.
_TIMEOUT_SECONDS: Final = {START_PROFILE: 600.0, STOP_PROFILE: 600.0}
_CACHE_TIMEOUT_SECONDS: Final = 90.0
_CONNECT_SECONDS: Final = 5.0
_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)
_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


@dataclass(frozen=True, slots=True)
class _Message:
    """What each engine is told."""

    path: str
    query: Sequence[tuple[str, str]]
    body: bytes
    content_type: str


class BroadcastApi:
    """The routes that reach every engine there is, whatever its role and state.

    `cache_path`: the engines' route that empties their prefix caches; callers may use that name, too.
    """

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        session: aiohttp.ClientSession,
        keys: EngineKeys,
        administrators: Administrators,
        cache_path: str = RESET_PREFIX_CACHE,
    ) -> None:
        self._pools = pools
        self._session = session
        self._keys = keys
        self._administrators = administrators
        self._cache_path = cache_path

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        engines_paths = {path: path for path in (START_PROFILE, STOP_PROFILE)}
        engines_paths |= dict.fromkeys((RESET_PREFIX_CACHE, self._cache_path), self._cache_path)
        return [web.post(path, self._handler(engines_path)) for path, engines_path in engines_paths.items()]

    def _handler(self, path: str) -> Handler:
        async def tell_all(request: web.Request) -> web.Response:
            body = await read_body(request, _BODY, option=None)
            logger.info("sent to all instances: %s", path, extra={"fields": {"by": author(request)}})
            message = _Message(path, list(request.query.items()), body, request.headers.get(hdrs.CONTENT_TYPE, ""))
            backends = [backend for pool in self._pools.values() for backend in pool.backends()]
            done = await asyncio.gather(*(self._tell(backend, message) for backend in backends))
            failed = [backend.url for backend, ok in zip(backends, done, strict=True) if not ok]
            return _json({"failed": failed}, status=500) if failed else web.Response()

        return self._administrators.only(tell_all)

    async def _tell(self, backend: Backend, message: _Message) -> bool:
        headers = dict(self._keys.headers(backend))
        if message.body and message.content_type:
            headers[hdrs.CONTENT_TYPE] = message.content_type
        try:
            status = await engine_json.post_status(
                self._session,
                backend.url,
                message.path,
                _TIMEOUT_SECONDS.get(message.path, _CACHE_TIMEOUT_SECONDS),
                headers,
                query=message.query,
                body=message.body,
                connect_seconds=_CONNECT_SECONDS,
            )
            problem = "" if status < 300 else f"status {status}"
        except engine_json.NoAnswer as error:
            problem = str(error)
        if problem:
            logger.error("%s instance %s failed on %s: %s", backend.role, backend.name, message.path, problem)
        return not problem
