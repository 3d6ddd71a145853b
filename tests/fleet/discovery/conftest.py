"""An engine to be probed, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.upstream import EngineClient
from tests.fleet.discovery.engines import Engine


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient() as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    async with engine.server:
        yield engine
