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
    from proxy.flow.lanes import Lanes
    from proxy.listener.drain import Drain

_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class ProbeApi:
    """The routes for probes.

    `pools` are those of the roles that the connector uses: each needs a healthy backend before the gateway is ready.
    """

    def __init__(self, pools: Mapping[Role, Pool], drain: Drain, lanes: Lanes | None = None) -> None:
        """`lanes`: None: all instances serve the same models."""
        self._pools = pools
        self._lanes = lanes
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
        if self._is_leaving:
            return False
        if self._lanes is not None and self._lanes.models.is_mixed:
            return self._lanes.is_ready()
        return all(pool.is_ready() for pool in self._pools.values())

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
        if self._lanes is not None and self._lanes.models.is_mixed:
            return self._ready_by_model(self._lanes, request.query.get("model"))
        for role, pool in self._pools.items():
            if not pool.is_ready():
                return error_response(NoBackendAvailable(role))
        return _json({"status": "ok"})

    @staticmethod
    def _ready_by_model(lanes: Lanes, asked: str | None) -> web.Response:
        """Ready as long as one model can be served, or the one that is asked for."""
        if asked:
            absent = {asked: lanes.asked(asked).absent()}
        else:
            absent = {name: lanes.of(name).absent() for name in sorted(lanes.models.names)}
        told = {name: "ok" if role is None else NoBackendAvailable(role).message for name, role in absent.items()}
        nobody = next((role for role in absent.values() if role is not None), None)
        if nobody is not None and "ok" not in told.values():
            return error_response(NoBackendAvailable(nobody))
        return _json({"status": "ok", "models": told})

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
