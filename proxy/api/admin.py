"""What operators and their tools ask: what does it measure. And changing it, while it runs.

Everybody may look. Changing anything takes the admin key, or without one a connection that comes straight from this
host: nothing a client writes into its headers can make it local. Each change is one line in the log, with its author.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from aiohttp import web

from proxy.api.body import read_body
from proxy.balancer.backend import Role
from proxy.errors import BadRequest, GatewayError, LimitExceeded
from proxy.settings import Listen, SettingsError, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from aiohttp.typedefs import Handler

    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.pool import Pool
    from proxy.configuration import Change
    from proxy.metrics import Metrics
    from proxy.prober import Prober
    from proxy.settings import Endpoint
    from proxy.upstream.names import Names

logger = logging.getLogger(__name__)

RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
FLUSH_CACHE: Final = "/flush_cache"
"""What vLLM and SGLang call the route that empties an engine's prefix cache."""

# SGLang may be told to wait until it is idle; its benchmark lets it wait for 60 s.
_RESET_TIMEOUT: Final = aiohttp.ClientTimeout(total=90.0, connect=5.0)
_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)
_MAX_CHANGES_AT_ONCE: Final = 10
_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)

# A request with one of these was made for somebody else: by a reverse proxy on this host, or by a browser for a page.
_ON_BEHALF: Final = ("X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded", "Via", "Origin")


class AdminApi:
    """The routes for operators. `pools` are those of the roles that the connector uses.

    `reload` reads the configuration again and applies it, for the author who is named to it. It raises SettingsError.
    `cache_path`: the engines' route that empties their prefix caches; clients may call it by that name, too.
    """

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        prober: Prober,
        session: aiohttp.ClientSession,
        keys: EngineKeys,
        names: Names,
        metrics: Metrics,
        reload: Callable[[str], Awaitable[Change]],
        admin_key: str | None,
        cache_path: str = RESET_PREFIX_CACHE,
    ) -> None:
        self._pools = pools
        self._prober = prober
        self._session = session
        self._keys = keys
        self._names = names
        self._metrics = metrics
        self._reload_configuration = reload
        self._admin_key = admin_key
        self._cache_path = cache_path
        self._changes = 0

    def configure(self, admin_key: str | None) -> None:
        """From now on this key lets administrators in; None: being on this host does."""
        self._admin_key = admin_key

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.get("/metrics", self._show_metrics),
            web.post("/instances/add", self._guarded(self._limited(self._add))),
            web.post("/instances/remove", self._guarded(self._limited(self._remove))),
            web.post("/admin/reload", self._guarded(self._limited(self._reload))),
            *(
                web.post(path, self._guarded(self._reset_prefix_cache))
                for path in sorted({RESET_PREFIX_CACHE, self._cache_path})
            ),
        ]

    # For everybody

    async def _show_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    # For administrators

    async def _add(self, request: web.Request) -> web.Response:
        change = _parse(await read_body(request, _BODY), self._pools.keys())
        role, endpoints = change.role, change.endpoints
        for endpoint in endpoints:
            await self._check_address(endpoint)
        try:
            joining = [e for e in endpoints if self._join(role, e, is_trusted=change.send_key)]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if joining:
            return self._members(request, f"Instances {_names(joining)} are waiting to be added.")
        return self._members(request, f"add {role} instances: {_names(endpoints)}.")

    def _join(self, role: Role, endpoint: Endpoint, *, is_trusted: bool) -> bool:
        host, port, bootstrap_port = endpoint.host, endpoint.port, endpoint.bootstrap_port
        return self._prober.join(role, host, port, trusted=is_trusted, bootstrap_port=bootstrap_port)

    async def _check_address(self, endpoint: Endpoint) -> None:
        """Raise BadRequest for where no instance may be. Connections are made under the same rules, whenever it is."""
        try:
            await self._names.find(endpoint.host)
        except OSError as problem:
            message = f"{endpoint} cannot be an instance: {problem}"
            raise BadRequest(message, code="address_not_allowed", param="instances") from None

    async def _remove(self, request: web.Request) -> web.Response:
        change = _parse(await read_body(request, _BODY), self._pools.keys())
        role, endpoints = change.role, change.endpoints
        for endpoint in endpoints:
            self._prober.remove(role, endpoint.host, endpoint.port)
        self._prober.drop_drained()
        left = {backend.name for backend in self._backends(role)}
        if any(str(endpoint) in left for endpoint in endpoints):
            return self._members(request, f"Instances {_names(endpoints)} are isolated and waiting to be removed.")
        return self._members(request, f"remove {role} instances: {_names(endpoints)}.")

    def _members(self, request: web.Request, message: str) -> web.Response:
        _log(request, message)
        answer: dict[str, Any] = {"message": message}
        for role in (role for role in Role if role is not Role.ENCODE or role in self._pools):
            answer[f"current_{role}_instances"] = [backend.name for backend in self._backends(role)]
            answer[f"joining_{role}_instances"] = [backend.name for backend in self._prober.joining(role)]
        return _json(answer)

    async def _reload(self, request: web.Request) -> web.Response:
        """The change, or in one sentence why there is none."""
        try:
            change = await self._reload_configuration(_author(request))
        except SettingsError as error:
            raise BadRequest(str(error), code="invalid_configuration") from None
        return _json({"changed": change.options, "instances": {"added": change.added, "removed": change.removed}})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        _log(request, "reset the prefix cache of all instances")
        backends = [backend for role in Role for backend in self._backends(role)]
        query = list(request.query.items())
        done = await asyncio.gather(*(self._reset(backend, query) for backend in backends))
        failed = [backend.url for backend, ok in zip(backends, done, strict=True) if not ok]
        return _json({"failed": failed}, status=500) if failed else web.Response()

    async def _reset(self, backend: Backend, query: Sequence[tuple[str, str]]) -> bool:
        request = self._session.post(
            backend.url + self._cache_path,
            params=query,
            headers=self._keys.headers(backend),
            timeout=_RESET_TIMEOUT,
            allow_redirects=False,
        )
        try:
            async with request as answer:
                problem = "" if answer.status < 300 else f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            problem = type(error).__name__
        if problem:
            logger.error("%s instance %s did not reset its prefix cache: %s", backend.role, backend.name, problem)
        return not problem

    def _backends(self, role: Role) -> Sequence[Backend]:
        return self._pools[role].backends() if role in self._pools else ()

    def _limited(self, handler: Handler) -> Handler:
        """Only so many at a time, as each waits: for a name, a file, or the caller's body."""

        async def limited(request: web.Request) -> web.StreamResponse:
            if self._changes >= _MAX_CHANGES_AT_ONCE:
                message = f"{_MAX_CHANGES_AT_ONCE} changes are being made already"
                raise LimitExceeded(message, code="too_many_changes", retry_after_seconds=1.0)
            self._changes += 1
            try:
                return await handler(request)
            finally:
                self._changes -= 1

        return limited

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        return guarded

    def _check(self, request: web.Request) -> None:
        """Raise GatewayError unless the caller may administer."""
        if self._admin_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            given = request.headers.get("X-Admin-Key") or (token if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._admin_key.encode()):
                raise GatewayError("this route needs the admin key", code="admin_key_required", status=401)
        elif not _is_local(request):
            raise GatewayError(
                "without an admin key only this host may use this route; set auth.admin_key to let others in",
                code="admin_key_not_configured",
                status=403,
            )


def _is_local(request: web.Request) -> bool:
    """Whether the connection comes from this host, and not on behalf of somebody else."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not isinstance(peer, tuple) or any(name in request.headers for name in _ON_BEHALF):
        return False
    address = ipaddress.ip_address(peer[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@dataclass(frozen=True, slots=True)
class _Change:
    """What an administrator asks for. `send_key`: the added instances may be sent the engine key."""

    role: Role
    endpoints: list[Endpoint]
    send_key: bool


def _parse(raw: bytes, roles: Collection[Role]) -> _Change:
    """Read `{"type": "prefill", "instances": "host:port"}`, or a list of them. Raises BadRequest.

    Behind a prefiller may stand its bootstrap port, as in the settings.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        role = Role(body.get("type", ""))
    except ValueError:
        raise BadRequest("type must be 'prefill', 'decode' or 'encode'", param="type") from None
    if role not in roles:
        raise BadRequest(f"this gateway has no {role} instances", param="type")
    listed = body.get("instances")
    texts = [listed] if isinstance(listed, str) else listed
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest("instances must be 'host:port' or a list of them", param="instances")
    send_key = body.get("send_key", False)
    if not isinstance(send_key, bool):
        raise BadRequest("send_key must be true or false", param="send_key")
    try:
        return _Change(role, [_endpoint(text, role) for text in texts], send_key)
    except ValueError as error:
        raise BadRequest(str(error), param="instances") from None


def _endpoint(text: str, role: Role) -> Endpoint:
    if "/" in text:
        raise ValueError(f"{text!r} must be host:port without scheme and path")
    found = parse_endpoints(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} must name one port")
    if found[0].bootstrap_port is not None and role is not Role.PREFILL:
        raise ValueError(f"{text!r} has a bootstrap port, which only prefillers have")
    return found[0]


def _author(request: web.Request) -> str:
    """Who makes a change, for the log. Of the key there is nothing to tell: there is only one."""
    return f"an administrator at {request.remote}"


def _log(request: web.Request, what: str) -> None:
    logger.info("%s", what, extra={"fields": {"by": _author(request)}})


def _names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]
