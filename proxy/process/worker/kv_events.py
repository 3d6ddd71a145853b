"""KV events of engines, if the settings say that they publish them."""

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
    """Subscribe in worker 0 to the KV events of all engines, inside `async with`.

    The other workers get them through the journal. Does nothing in other workers, or if KV events are not configured.
    """
    settings, journal = basis.settings.kv_events, basis.shared.journal
    if settings.endpoint is None or basis.index != 0 or Role.PREFILL not in engines.serving:
        yield
        return
    # imported here, because no other part needs it
    from proxy.fleet.kv_events.subscriptions import SubscriptionParts, Subscriptions

    # The cache of a decoder matters if it may get a prompt without prefill.
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
