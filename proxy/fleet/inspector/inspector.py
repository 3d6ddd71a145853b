"""Looks whether instances fit each other and this gateway. What is wrong is told once, and once that it is over.

An instance that does not fit is well, so the Prober has nothing to say of it, and answers do not show it. What engines
say of themselves is compared here, and `transfers.py` looks at what became of KV. Nothing outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.models import minority_instances
from proxy.balancer.recognition import EngineReport, unsuited
from proxy.common.backend import Role
from proxy.common.background import Background, BackgroundOwner
from proxy.fleet.inspector.transfers import Transfers
from proxy.settings import CONNECTOR_TRAITS

if TYPE_CHECKING:
    from proxy.balancer.engines import Identity
    from proxy.common.backend import Backend
    from proxy.fleet.inspector.transfers import InspectorParts

logger = logging.getLogger("proxy.inspector.inspector")

_LOOK_SECONDS: Final = 1.0


class Inspector(BackgroundOwner):
    """Compares instances for one worker. `async with` it."""

    def __init__(self, parts: InspectorParts, interval_seconds: float, connector: str, *, reads: bool) -> None:
        """Keep the parts, to begin on entry.

        Args:
            parts: What it works with.
            interval_seconds: Time between two readings of a decode instance's counters; 0: never read them.
            connector: Name of the connector in the settings.
            reads: Whether this worker reads the counters.
        """
        self._pools = parts.pools
        self._health = parts.health
        self._fitness = parts.fitness
        self._keys = parts.keys
        self._metrics = parts.metrics
        self._interval_seconds = interval_seconds
        self._connector = connector
        self._models = parts.models
        self._compared = [role for role in parts.pools if role is not Role.ENCODE]
        self._told: dict[Backend, Identity] = {}
        self._serving: dict[Backend, frozenset[str]] = {}
        self._reported_kinds = [IncompatibilityKind.GATEWAY, IncompatibilityKind.CONNECTOR, IncompatibilityKind.ROLE]
        """What engines tell by themselves."""
        traits = CONNECTOR_TRAITS[connector]
        if traits.tells_bootstrap_port:
            self._reported_kinds.append(IncompatibilityKind.BOOTSTRAP)
        self._background = Background(logger, "a look at instances")
        self._transfers = None
        if reads and Role.PREFILL in parts.pools:
            self._transfers = Transfers(parts, self._background, traits)

    def _begin(self) -> None:
        self._background.keep(self._keep_looking, "engine_comparison", self._metrics.background_restarts_total)

    def configure(self, interval_seconds: float) -> None:
        """Take a changed interval for the looks from now on."""
        self._interval_seconds = interval_seconds

    async def _keep_looking(self) -> None:
        while True:
            self._compare()
            if self._transfers is not None and self._interval_seconds:
                self._transfers.look(self._interval_seconds)
            await asyncio.sleep(min(_LOOK_SECONDS, self._interval_seconds or _LOOK_SECONDS))

    # What engines say they are

    def _compare(self) -> None:
        """Look at the engines that have told something new of themselves, and then at all of them together."""
        told = {
            backend: facts.identity
            for role in self._compared
            for backend in self._pools[role].backends()
            if (facts := self._health.of(backend).facts) is not None
        }
        self._models.look()
        serving = {
            backend: self._models.own(backend) for role in self._compared for backend in self._pools[role].backends()
        }
        if told == self._told and serving == self._serving:
            return
        for backend, identity in told.items():
            if identity != self._told.get(backend):
                self._look_at(backend, identity)
        odd = minority_instances(serving)
        for backend, models in serving.items():
            if models:
                self._fitness.report(backend, IncompatibilityKind.MODEL, odd.get(backend))
        self._told, self._serving = told, serving

    def _look_at(self, backend: Backend, identity: Identity) -> None:
        engine = EngineReport(backend.role, backend.name, identity)
        kind, hint = unsuited(engine, self._connector, backend.bootstrap_port) or (None, "")
        for its_kind in self._reported_kinds:
            if its_kind is kind:
                self._fitness.report(backend, its_kind, hint)
            elif identity.setup is not None:  # otherwise there may be more to come
                self._fitness.report(backend, its_kind, None)
        if not identity.refused_key:
            self._fitness.report(backend, IncompatibilityKind.ENGINE_KEY, None)
        elif not self._keys.forwards_client_key:
            self._fitness.refused_key(backend)
