"""A collector, and gateways that send it what they trace, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.observe.tracing.collector import Collector, collecting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    async with collecting() as collector:
        yield collector
