"""An engine to be probed, and a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.fleet.discovery.engines import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    async with engine.server:
        yield engine
