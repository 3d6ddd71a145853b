"""Sharing loads with other gateways, where the settings name a store."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.shared import EXCHANGER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.worker.basis import Basis


@asynccontextmanager
async def build_replicas(basis: Basis) -> AsyncIterator[None]:
    """One worker does it for all. Leaving takes back what the others were told."""
    shared, settings = basis.shared, basis.settings
    if settings.replicas.url is None or basis.index != EXCHANGER:
        yield
        return
    # Late, because only this needs the extra.
    from proxy.replicas import Exchange, Store

    async with (
        Store(settings, shared.replica) as store,
        Exchange(store, shared.replica, shared.scoreboard, shared.roster, settings, basis.metrics),
    ):
        yield
