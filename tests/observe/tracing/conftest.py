"""A collector, and gateways that send it what they trace, at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.observe.tracing.collector import Collector, collecting


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    async with collecting() as collector:
        yield collector
