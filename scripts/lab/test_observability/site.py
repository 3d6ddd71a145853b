"""Simulated engines in this process, two gateways and their clients.

One gateway is under load, with any number of workers. The other one is idle, for faults of a gateway itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lab.common.fleet import Fleet, Gateway, addresses, simulated
from lab.common.load import CHAT, Connections, Load, post
from lab.common.processes import quiet_ports
from proxy.sim.engine import SimulatedEngine

PROVIDED: Final = ("", "auth.client_keys_file", "discovery")
"""Options that the serving gateway has: panels that need others may have no data."""
ENGINE: Final[dict[str, Any]] = {"decode_step_ms": 10.0, "prefill_ms_per_1k_tokens": 40.0, "connector_name": "nixl"}


def settings(port: int, workers: int, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """Return the gateway's settings. Times that are long by default are about a second."""
    return {
        "prefill": list(prefill),
        "decode": list(decode),
        "workers": workers,
        "listen": {"port": port},
        "admission": {"max_running_decode": 64, "max_waiting": 40, "wait_seconds": 3.0},
        "kv": {"prefill_min_tokens": 16},
        "retry": {"budget_least": 1, "budget_wait_seconds": 0.2},
        "resume": {"deadline_seconds": 10.0},
        "health": {
            "interval_seconds": 0.5,
            "timeout_seconds": 2.0,
            "changing_interval_seconds": 0.2,
            "fall": 2,
            "eject_seconds": 0.3,
            "max_eject_seconds": 1.0,
            "slow_start_seconds": 1.0,
            "quarantine_seconds": 0.5,
            "transfer_interval_seconds": 1.0,
        },
        "drain": {"not_ready_seconds": 0.0, "streams_seconds": 2.0},
        "log": {"format": "json"},
    }


_PER_SECOND: Final = 12.0
_TOPICS: Final = [f"Topic {number}: " + "tell me more about it, please. " * 12 * number for number in range(1, 9)]


class Tap:
    """Copies a program's output to a file, with pauses."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reading, self.writing = os.pipe()
        self._is_open = threading.Event()
        self._is_open.set()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.writing)
        self._is_open.set()
        self._thread.join()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Read nothing during the block."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def _copy(self) -> None:
        with self._file.open("wb") as output, os.fdopen(self._reading, "rb", buffering=0) as reading:
            while self._is_open.wait() and (some := reading.read(65536)):
                output.write(some)


class Clients:
    """Clients of one gateway, which ignore the content of answers. Engines know them by `user`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._connections = Connections(gateway.port)
        self._draw = random.Random(7)

    async def ask(self, user: str = "", *, leaves_after: float = 60.0, **fields: Any) -> None:
        """Send one request, and read the answer or disconnect after a time."""
        body = self._body() | ({"user": user} if user else {}) | fields
        path = CHAT if "messages" in body else "/v1/completions"
        with suppress(OSError):  # also a TimeoutError
            async with asyncio.timeout(leaves_after):
                await self._ask(body, path)

    async def message(self) -> None:
        """Send one request in Anthropic's format."""
        messages = [{"role": "user", "content": self._draw.choice(_TOPICS)}]
        await self._ask({"model": "sim", "max_tokens": 8, "messages": messages}, "/v1/messages")

    async def send(self, data: bytes) -> None:
        """Send bytes that are not a request."""
        with suppress(OSError):
            _, writer = await asyncio.open_connection(self._gateway.host, self._gateway.port)
            writer.write(data)
            await writer.drain()
            writer.close()

    @asynccontextmanager
    async def asking(self, user: str = "", per_second: float = _PER_SECOND, **fields: Any) -> AsyncIterator[None]:
        """Send requests at a rate during the block, and cancel those in flight at its end."""

        async def ask(_: int) -> str:
            if not user and self._draw.random() < 0.1:
                await self.message()
            await self.ask(user, **fields)
            return ""

        async with Load(ask).at_rate(per_second, leaves=True):
            yield

    async def _ask(self, body: dict[str, Any], path: str) -> None:
        # Each request has a new connection, which any worker may accept.
        await self._connections.ask(post(self._gateway.port, body, path, Connection="close"))

    def _body(self) -> dict[str, Any]:
        topic = self._draw.choice([*_TOPICS, "Hi"])
        body = {"model": "sim", "max_tokens": self._draw.randrange(4, 60), "stream": self._draw.random() < 0.8}
        if self._draw.random() < 0.5:
            return body | {"prompt": topic}
        return body | {"messages": [{"role": "user", "content": topic}]}


@dataclasses.dataclass(slots=True)
class Site:
    """Engines, gateways and clients. `serving` is under load."""

    prefill: list[SimulatedEngine]
    decode: list[SimulatedEngine]
    others: list[SimulatedEngine]
    serving: Gateway
    idle: Gateway
    clients: Clients
    other_clients: Clients
    tap: Tap
    """Copies the idle gateway's output."""

    def jobs(self) -> dict[str, list[str]]:
        """Return the targets of Prometheus' jobs."""
        engines = [*self.prefill, *self.decode, *self.others]
        return {"pdproxy": [self.serving.address, self.idle.address], "engines": addresses(engines)}


async def change(engine: SimulatedEngine, **options: Any) -> None:
    """Restart an engine with other options."""
    engine.options = dataclasses.replace(engine.options, **options)
    await engine.restart()


def _key_and_discovery(directory: Path, decoder: SimulatedEngine) -> dict[str, Any]:
    """Return settings with a client key, and with a decoder from a file. See PROVIDED."""
    keys, targets = directory / "keys.yaml", directory / "targets.yaml"
    # JSON is YAML, too.
    keys.write_text(json.dumps({"keys": [{"name": "bench", "key": "bench"}]}), encoding="utf-8")
    group = {"targets": addresses([decoder]), "labels": {"role": "decode"}}
    targets.write_text(json.dumps([group]), encoding="utf-8")
    return {"auth": {"client_keys_file": str(keys)}, "discovery": {"files": [str(targets)]}}


@asynccontextmanager
async def site(directory: Path, workers: int) -> AsyncIterator[Site]:
    """Run 2 prefillers and 3 decoders behind the serving gateway, a pair behind the idle one, and an SGLang engine."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(simulated("prefill", 2, **ENGINE))
        decode = await enter(simulated("decode", 3, **ENGINE))
        others = await enter(simulated("prefill", 1, **ENGINE)) + await enter(simulated("decode", 1, **ENGINE))
        sglang = await enter(simulated("both", 1, profile_name="sglang"))
        fleet = stack.enter_context(Fleet(directory))
        tap = stack.enter_context(Tap(directory / "idle.log"))
        port, idle_port = quiet_ports(2)
        serving_settings = settings(port, workers, addresses(prefill), addresses(decode[:-1]))
        serving = fleet.configured("serving", serving_settings | _key_and_discovery(directory, decode[-1]))
        idle = fleet.configured("idle", settings(idle_port, 1, *([each] for each in addresses(others))), tap.writing)
        clients = Clients(serving), Clients(idle)
        try:
            await asyncio.to_thread(fleet.keep, serving)
            await asyncio.to_thread(fleet.keep, idle)
            yield Site(prefill, decode, [*others, *sglang], serving, idle, *clients, tap)
        finally:
            await asyncio.to_thread(fleet.close)
