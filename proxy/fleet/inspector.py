"""Finds instances that do not fit each other or the gateway, and reports each change once.

Health probes do not see such instances, which are healthy, and neither do answers. The inspector compares the reports
of engines; `transfers.py` reads their counters of transferred KV. All tasks end with the `async with` block.
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
from proxy.fleet.transfers import Transfers
from proxy.settings import CONNECTOR_TRAITS

if TYPE_CHECKING:
    from proxy.balancer.engines import Identity
    from proxy.common.backend import Backend
    from proxy.fleet.transfers import InspectorParts

logger = logging.getLogger("proxy.inspector.inspector")

_COMPARISON_SECONDS: Final = 1.0


class Inspector(BackgroundOwner):
    """Compares instances for one worker inside `async with`."""

    def __init__(self, parts: InspectorParts, interval_seconds: float, connector: str, *, reads: bool) -> None:
        """Keep the parts.

        Args:
            parts: The worker's parts.
            interval_seconds: Time between two readings of a decode instance's counters; 0: never read them.
            connector: Name of the connector in the settings.
            reads: Whether this worker reads the counters.
        """
        self._pools = parts.pools
        self._health = parts.health
        self._compatibility = parts.compatibility
        self._keys = parts.keys
        self._metrics = parts.metrics
        self._interval_seconds = interval_seconds
        self._connector = connector
        self._models = parts.models
        self._compared_roles = [role for role in parts.pools if role is not Role.ENCODE]
        self._identities: dict[Backend, Identity] = {}
        """Identities at the last comparison."""
        self._models_by_instance: dict[Backend, frozenset[str]] = {}
        """Served models at the last comparison."""
        self._reported_kinds = [IncompatibilityKind.GATEWAY, IncompatibilityKind.CONNECTOR, IncompatibilityKind.ROLE]
        """Kinds that the reports of engines show."""
        traits = CONNECTOR_TRAITS[connector]
        if traits.tells_bootstrap_port:
            self._reported_kinds.append(IncompatibilityKind.BOOTSTRAP)
        self._background = Background(logger, "a comparison of instances")
        self._transfers = None
        if reads and Role.PREFILL in parts.pools:
            self._transfers = Transfers(parts, self._background, traits)

    def _begin(self) -> None:
        self._background.keep(self._keep_comparing, "engine_comparison", self._metrics.background_restarts_total)

    def configure(self, interval_seconds: float) -> None:
        """Take a changed interval between readings."""
        self._interval_seconds = interval_seconds

    async def _keep_comparing(self) -> None:
        while True:
            self._compare()
            if self._transfers is not None and self._interval_seconds:
                self._transfers.read_due(self._interval_seconds)
            await asyncio.sleep(min(_COMPARISON_SECONDS, self._interval_seconds or _COMPARISON_SECONDS))

    def _compare(self) -> None:
        """Check each engine whose report has changed, and then the models of all."""
        identities = {
            backend: facts.identity
            for role in self._compared_roles
            for backend in self._pools[role].backends()
            if (facts := self._health.of(backend).facts) is not None
        }
        self._models.look()
        served = {
            backend: self._models.own(backend)
            for role in self._compared_roles
            for backend in self._pools[role].backends()
        }
        if identities == self._identities and served == self._models_by_instance:
            return
        for backend, identity in identities.items():
            if identity != self._identities.get(backend):
                self._check_report(backend, identity)
        minority = minority_instances(served)
        for backend, models in served.items():
            if models:
                self._compatibility.report(backend, IncompatibilityKind.MODEL, minority.get(backend))
        self._identities, self._models_by_instance = identities, served

    def _check_report(self, backend: Backend, identity: Identity) -> None:
        engine = EngineReport(backend.role, backend.name, identity)
        found, hint = unsuited(engine, self._connector, backend.bootstrap_port) or (None, "")
        for kind in self._reported_kinds:
            if kind is found:
                self._compatibility.report(backend, kind, hint)
            elif identity.setup is not None:  # otherwise the report is still incomplete
                self._compatibility.report(backend, kind, None)
        if not identity.refused_key:
            self._compatibility.report(backend, IncompatibilityKind.ENGINE_KEY, None)
        elif not self._keys.forwards_client_key:
            self._compatibility.refused_key(backend)
