"""Simulated engines and a client that talks to them over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.sim.engine import SimulatedEngine

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Client:
    """Sends requests to engines and reads answers; asks the way a gateway does."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, engine: SimulatedEngine, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(engine.url + path, json=body, headers=names) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if raw else None

    async def get(self, engine: SimulatedEngine, path: str) -> Any:
        async with self.session.get(engine.url + path) as response:
            return orjson.loads(await response.read())

    async def stream(self, engine: SimulatedEngine, path: str, body: Any, **headers: str) -> list[Any]:
        """Return the parsed events of a streamed answer; `[DONE]` stays text."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(engine.url + path, json=body | {"stream": True}, headers=names) as response:
            assert response.status == 200
            text = (await response.read()).decode().replace("\r\n", "\n")
        events = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
        return [event if event == "[DONE]" else orjson.loads(event) for event in events]

    async def prefill(self, engine: SimulatedEngine, path: str, body: Any) -> Any:
        """Send the prefill leg: one token, and the KV cache is kept."""
        leg = body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PREFILL}
        status, answer = await self.post(engine, path, leg)
        assert status == 200
        return answer["kv_transfer_params"]


@asynccontextmanager
async def simulated_pair(**options: Any) -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine]]:
    """Start a prefiller and a decoder with the same options."""
    async with (
        SimulatedEngine(role="prefill", **options) as prefiller,
        SimulatedEngine(role="decode", **options) as decoder,
    ):
        yield prefiller, decoder


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session)


@pytest.fixture
async def prefiller() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(role="prefill") as engine:
        yield engine


@pytest.fixture
async def decoder() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(role="decode") as engine:
        yield engine


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine() as engine:
        yield engine
