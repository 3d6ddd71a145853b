"""What everybody may ask, and most ask every few seconds: is it alive, is it ready, how many engines, which version."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from proxy import __version__
from proxy.backend import Role
from proxy.errors import NoBackendAvailable, ShuttingDown
from proxy.listener.replies import error_response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.balancer.pool import Pool
    from proxy.listener.drain import Drain

_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class ProbeApi:
    """The routes for probes.

    `pools` are those of the roles that the connector uses: each needs a healthy backend before the gateway is ready.
    """

    def __init__(self, pools: Mapping[Role, Pool], drain: Drain) -> None:
        self._pools = pools
        self._drain = drain

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        return [
            web.get("/livez", self._live),
            *(web.get(path, self.ready) for path in ("/readyz", "/health", "/healthz", "/ping")),
            web.get("/healthcheck", self._healthcheck),
            web.get("/version", self._version),
        ]

    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        return not self._is_leaving and all(pool.is_ready() for pool in self._pools.values())

    @property
    def _is_leaving(self) -> bool:
        return self._drain.is_draining and not self._drain.has_successor

    async def _live(self, request: web.Request) -> web.Response:
        """This process answers, whatever the engines do."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Answer whether new requests should come here; of several routes."""
        # Answered and not raised: a probe is no request that was refused.
        if self._is_leaving:
            return error_response(ShuttingDown())
        for role, pool in self._pools.items():
            if not pool.is_ready():
                return error_response(NoBackendAvailable(role))
        return _json({"status": "ok"})

    async def _healthcheck(self, request: web.Request) -> web.Response:
        """The answer of vLLM-Ascend's example proxy."""
        # Every unit of a generation request has a lease on one decoder.
        decoders = self._pools[Role.DECODE]
        prefillers = self._pools.get(Role.PREFILL)
        return _json(
            {
                "status": "ok",
                "prefill_instances": len(prefillers.backends()) if prefillers else 0,
                "decode_instances": len(decoders.backends()),
                "request_num": sum(decoders.in_flight(backend) for backend in decoders.backends()),
            }
        )

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})
