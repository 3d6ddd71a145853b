"""Hearing the KV events of engines, where the settings say that they publish them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.common.backend import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.process.worker.balancing import Balancing
    from proxy.process.worker.basis import Basis
    from proxy.process.worker.engines import Engines


@asynccontextmanager
async def build_kv_events(basis: Basis, balancing: Balancing, engines: Engines) -> AsyncIterator[None]:
    """Within the block, worker 0 subscribes to the KV events of all engines and tells the other workers by the journal.
    Does nothing in other workers, or where KV events are not configured.
    """
    settings, journal = basis.settings.kv_events, basis.shared.journal
    if settings.endpoint is None or basis.index != 0 or Role.PREFILL not in engines.serving:
        yield
        return
    # Late, because nobody else needs it.
    from proxy.fleet.kv_events.subscriptions import SubscriptionParts, Subscriptions

    # A decoder's cache matters where it may be left with a prompt.
    roles = [Role.PREFILL, Role.DECODE] if basis.settings.kv.skip_prefill else [Role.PREFILL]
    async with Subscriptions(
        SubscriptionParts(
            pools=[engines.serving[role] for role in roles],
            health=balancing.health,
            journal=journal.writer(journal.workers),
            names=engines.lines.names,
            client=engines.lines.client,
            keys=balancing.keys,
            settings=settings,
            metrics=basis.metrics,
        )
    ):
        yield
