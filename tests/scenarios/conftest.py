"""Simulated engines in this process, and what an operator has at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Site:
    """An engine for each role, and a client."""

    prefiller: SimulatedEngine
    decoder: SimulatedEngine
    session: aiohttp.ClientSession

    @property
    def engines(self) -> tuple[str, ...]:
        """Flags of a gateway in front of both engines."""
        return "--prefill", self.prefiller.url, "--decode", self.decoder.url


@pytest.fixture
def site(prefiller: SimulatedEngine, decoder: SimulatedEngine, session: aiohttp.ClientSession) -> Site:
    return Site(prefiller, decoder, session)
