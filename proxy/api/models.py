"""GET /v1/models: what all engines together serve, also while some of them are down."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from aiohttp import web

from proxy.errors import Failure, GatewayError, UpstreamError
from proxy.upstream import read_bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api.keys import ClientKeys
    from proxy.balancer.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.pool import Pool
    from proxy.metrics import Metrics

_PATH: Final = "/v1/models"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3.0)
_MAX_LIST_BYTES: Final = 4 * 1024 * 1024
_FRESH_SECONDS: Final = 2.0


class ModelsApi:
    """Asks all eligible backends at once and merges their lists by model id; the first to name a model describes it.

    The last answer is kept for two seconds, for clients with the same credential.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        session: aiohttp.ClientSession,
        engine_keys: EngineKeys,
        client_keys: ClientKeys,
        metrics: Metrics,
    ) -> None:
        self._pools = pools
        self._session = session
        self._engine_keys = engine_keys
        self._client_keys = client_keys
        self._metrics = metrics
        self._kept_for: str | None = None
        self._kept_until = 0.0
        self._kept = b""

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [web.get(_PATH, self._models)]

    async def _models(self, request: web.Request) -> web.Response:
        status = 499
        try:
            self._client_keys.identify(request)
            body = await self._merged(self._client_keys.credential(request))
            status = 200
        except GatewayError as error:
            status = error.status
            raise
        finally:
            self._metrics.requests_total.labels("models", str(status)).inc()
        return web.Response(body=body, content_type="application/json")

    async def _merged(self, credential: str | None) -> bytes:
        if credential == self._kept_for and time.monotonic() < self._kept_until:
            return self._kept
        backends = [backend for pool in self._pools for backend in pool.eligible()]
        answers = await asyncio.gather(*(self._ask(backend, credential) for backend in backends))
        lists = [answer for answer in answers if isinstance(answer, list)]
        if not lists:
            raise _nobody([answer for answer in answers if isinstance(answer, UpstreamError)])
        models: dict[str, dict[str, Any]] = {}
        for model in (model for answer in lists for model in answer):
            models.setdefault(model["id"], model)
        self._kept = orjson.dumps({"object": "list", "data": list(models.values())})
        self._kept_for, self._kept_until = credential, time.monotonic() + _FRESH_SECONDS
        return self._kept

    async def _ask(self, backend: Backend, credential: str | None) -> list[dict[str, Any]] | UpstreamError:
        """One engine's models, or why there are none."""
        headers = self._engine_keys.headers(backend, credential)
        request = self._session.get(backend.url + _PATH, headers=headers, timeout=_TIMEOUT, allow_redirects=False)
        try:
            async with request as answer:
                body = await read_bounded(answer, _MAX_LIST_BYTES)
        except TimeoutError:
            return UpstreamError(Failure.TIMEOUT, backend, f"{backend.role} instance did not list its models in time")
        except (aiohttp.ClientError, ValueError):  # ValueError: a name that can be no host's
            return UpstreamError(Failure.CONNECT, backend, f"{backend.role} instance did not list its models")
        if answer.status >= 400:
            message = f"{backend.role} instance answered with status {answer.status}"
            kind = {"content-type": answer.headers.get("Content-Type", "application/json")}
            return UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=kind)
        try:
            if answer.status == 200:
                return [model for model in orjson.loads(body)["data"] if isinstance(model["id"], str)]
        except (ValueError, TypeError, KeyError):
            pass
        return UpstreamError(Failure.BAD_ANSWER, backend, f"{backend.role} instance sent no list of models")


def _nobody(errors: Sequence[UpstreamError]) -> GatewayError:
    """An engine that refuses the client's credential has the word; otherwise nobody can be asked now."""
    for error in errors:
        if error.is_clients_fault:
            return error
    nobody = GatewayError("no instance could be asked for its models", code="no_healthy_instance", status=503)
    nobody.retry_after_seconds = 1.0
    return nobody
