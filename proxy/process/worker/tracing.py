"""Tracing, if the settings name a collector."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.observe.observers import RequestListener
    from proxy.process.worker.basis import Basis


@asynccontextmanager
async def build_tracing(basis: Basis) -> AsyncIterator[RequestListener | None]:
    """Return the listener that traces requests, or None without tracing. Leaving sends the last spans."""
    if basis.traces is None:
        yield None
        return
    # imported here, because only this needs the extra, and it is slow
    from proxy.observe.collector import exporting
    from proxy.observe.tracing import TracedGateway, Tracer

    settings = basis.settings
    traced = TracedGateway(
        connector=settings.connector,
        engine=settings.connector_traits.engine,
        routes={dialect.label: dialect.path for dialect in DIALECTS},
    )
    async with exporting(settings.tracing, basis.shared.log_once.is_news) as (provider, ids):
        yield Tracer(provider, ids, basis.traces, traced)
