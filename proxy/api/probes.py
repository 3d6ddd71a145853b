"""What everybody may ask, and most ask every few seconds: is it alive, is it ready, how many engines, which version."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from proxy import __version__
from proxy.common.backend import Role
from proxy.common.errors import NoBackendAvailable, ShuttingDown
from proxy.listener.replies import error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.gateway.lanes import Lanes
    from proxy.listener.drain import DrainManager

_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class ProbeApi:
    """The routes for probes. Each role that the connector uses needs a healthy backend before the gateway is ready, or
    before a model is that not all instances serve.
    """

    def __init__(self, lanes: Lanes, drain: DrainManager) -> None:
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
        return not self._is_leaving and self._lanes.is_ready()

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
        if self._lanes.models.is_mixed:
            return self._ready_by_model(request.query.get("model"))
        absent = self._lanes.whole.absent()
        return _json({"status": "ok"}) if absent is None else error_response(NoBackendAvailable(absent))

    def _ready_by_model(self, asked: str | None) -> web.Response:
        """Ready as long as one model can be served, or the one that is asked for."""
        lanes = self._lanes
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
        whole = self._lanes.whole
        decoders = whole.pools.decode
        prefillers = whole.pools.prefill if Role.PREFILL in whole.connector.roles else None
        return _json(
            {
                "status": "ok",
                "prefill_instances": len(prefillers.backends()) if prefillers else 0,
                "decode_instances": len(decoders.backends()),
                "request_num": sum(decoders.scoreboard.requests(backend.slot) for backend in decoders.backends()),
            }
        )

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})
