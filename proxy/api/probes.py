"""Answers probes: whether the gateway is alive and ready, how many engines there are, and the version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from proxy import __version__
from proxy.common.backend import Role
from proxy.common.errors import NoBackendAvailable, ShuttingDown
from proxy.listener.replies import error_response, json_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.gateway.lanes import Lanes
    from proxy.listener.drain import DrainManager


class ProbeApi:
    """Serves the routes for health probes of the gateway.

    The gateway is ready if each role of the connector has a healthy backend. If instances serve different models, this
    applies to each model.
    """

    def __init__(self, lanes: Lanes, drain: DrainManager) -> None:
        self._lanes = lanes
        self._drain_manager = drain

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes for health probes for the application."""
        return [
            web.get("/livez", self._answer_liveness),
            *(web.get(path, self.answer_readiness) for path in ("/readyz", "/health", "/healthz", "/ping")),
            web.get("/healthcheck", self._answer_healthcheck),
            web.get("/version", self._answer_version),
        ]

    def is_ready(self) -> bool:
        """Return whether the gateway should receive new requests."""
        return not self._is_draining and self._lanes.is_any_ready()

    @property
    def _is_draining(self) -> bool:
        return self._drain_manager.is_draining and not self._drain_manager.has_successor_process

    async def _answer_liveness(self, request: web.Request) -> web.Response:
        """Answer that the process is alive. The answer does not depend on engines."""
        return json_response({"status": "ok"})

    async def answer_readiness(self, request: web.Request) -> web.Response:
        """Answer whether the gateway should receive new requests. Several routes use it."""
        # The error is not raised, because a probe does not count as a rejected request.
        if self._is_draining:
            return error_response(ShuttingDown())
        if self._lanes.served_models.has_several_groups:
            return self._answer_model_readiness(request.query.get("model"))
        absent = self._lanes.whole_lane.find_absent_role()
        return json_response({"status": "ok"}) if absent is None else error_response(NoBackendAvailable(absent))

    def _answer_model_readiness(self, name: str | None) -> web.Response:
        """Answer whether a model can be served. `name` None: whether at least one model can be served."""
        lanes = self._lanes
        if name:
            absent = {name: lanes.lane_of_alias(name).find_absent_role()}
        else:
            absent = {
                model: lanes.lane_of_model(model).find_absent_role()
                for model in sorted(lanes.served_models.served_names)
            }
        states = {model: "ok" if role is None else NoBackendAvailable(role).message for model, role in absent.items()}
        absent_role = next((role for role in absent.values() if role is not None), None)
        if absent_role is not None and "ok" not in states.values():
            return error_response(NoBackendAvailable(absent_role))
        return json_response({"status": "ok", "models": states})

    async def _answer_healthcheck(self, request: web.Request) -> web.Response:
        """Answer a health check as vLLM-Ascend's example proxy does."""
        # Each unit of a generation request has a lease on one decoder.
        whole = self._lanes.whole_lane
        decoders = whole.pools.decode
        prefillers = whole.pools.prefill if Role.PREFILL in whole.connector.roles else None
        return json_response(
            {
                "status": "ok",
                "prefill_instances": len(prefillers.all_backends()) if prefillers else 0,
                "decode_instances": len(decoders.all_backends()),
                "request_num": sum(
                    decoders.scoreboard.open_leases(backend.slot) for backend in decoders.all_backends()
                ),
            }
        )

    async def _answer_version(self, request: web.Request) -> web.Response:
        return json_response({"version": __version__})
