"""Simulated engines in this process, and what an operator has at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine


@pytest.fixture
async def prefiller() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(role="prefill") as engine:
        yield engine
        assert not engine.pins


@pytest.fixture
async def decoder() -> AsyncIterator[SimulatedEngine]:
    """Slow enough for things to happen while it answers."""
    async with SimulatedEngine(role="decode", decode_step_ms=2.0) as engine:
        yield engine


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
