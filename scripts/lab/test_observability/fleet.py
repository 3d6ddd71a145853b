"""Simulated engines in this process, and two gateways: one under load, with as many workers as one likes, and one that
serves nobody else, for faults of a gateway itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from lab.common.proc import tree
from lab.common.processes import HOST, quiet_ports
from lab.common.programs import Program
from proxy.sim.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

ENGINE: Final[dict[str, Any]] = {"decode_step_ms": 10.0, "prefill_ms_per_1k_tokens": 40.0, "connector_name": "nixl"}
_READY_SECONDS: Final = 60.0


def settings(port: int, workers: int, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """The gateway's configuration: everything that takes a while by default takes a second or so."""
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


class Tap:
    """Takes a program's output to a file, and for a while nothing of it."""

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
        """Nobody reads."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def _copy(self) -> None:
        with self._file.open("wb") as output, os.fdopen(self._reading, "rb", buffering=0) as reading:
            while self._is_open.wait() and (some := reading.read(65536)):
                output.write(some)


class Gateway:
    """`python -m proxy` with a configuration file."""

    def __init__(self, file: Path, settings: dict[str, Any], tap: Tap, session: aiohttp.ClientSession) -> None:
        self.url = f"http://{HOST}:{settings['listen']['port']}"
        self.target = self.url.removeprefix("http://")
        self.settings = settings
        self.tap = tap
        self.program = Program(["--config", str(file)], tap.writing)
        self._file = file
        self._session = session
        self.write(settings)

    def write(self, settings: dict[str, Any]) -> None:
        """Have this in its file. JSON is YAML, too."""
        self._file.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    async def start(self) -> None:
        await self.program.start()
        async with asyncio.timeout(_READY_SECONDS):
            while not await self._is_ready():  # noqa: ASYNC110 other processes have no events
                await asyncio.sleep(0.1)

    def reload(self, **changed: Any) -> None:
        """With these options, or without a sensible one if they are not sensible."""
        self.write(self.settings | changed)
        self.program.send(signal.SIGHUP)

    def processes(self) -> list[int]:
        """Those that serve."""
        main, *workers = tree(self.program.pid)
        return workers or [main]

    async def _is_ready(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with self._session.get(self.url + "/readyz") as response:
                return response.status == 200
        return False


@dataclasses.dataclass(slots=True)
class Fleet:
    """All of it. `serving` is under load."""

    prefill: list[SimulatedEngine]
    decode: list[SimulatedEngine]
    others: list[SimulatedEngine]
    serving: Gateway
    idle: Gateway
    session: aiohttp.ClientSession

    def jobs(self) -> dict[str, list[str]]:
        """For Prometheus."""
        engines = [*self.prefill, *self.decode, *self.others]
        return {
            "pdproxy": [self.serving.target, self.idle.target],
            "engines": [f"{engine.host}:{engine.port}" for engine in engines],
        }


async def change(engine: SimulatedEngine, **options: Any) -> None:
    """Restart an engine with other options."""
    engine.options = dataclasses.replace(engine.options, **options)
    await engine.restart()


@asynccontextmanager
async def fleet(directory: Path, workers: int, session: aiohttp.ClientSession) -> AsyncIterator[Fleet]:
    """Two prefillers and three decoders behind the gateway under load, a pair behind the other; an SGLang engine."""
    async with AsyncExitStack() as stack:

        async def engines(role: str, count: int) -> list[SimulatedEngine]:
            made = [SimulatedEngine(role=role, port=port, **ENGINE) for port in quiet_ports(count)]
            return [await stack.enter_async_context(engine) for engine in made]

        def gateway(name: str, workers: int, prefill: list[SimulatedEngine], decode: list[SimulatedEngine]) -> Gateway:
            addresses = ([f"{engine.host}:{engine.port}" for engine in role] for role in (prefill, decode))
            (port,) = quiet_ports(1)
            tap = stack.enter_context(Tap(directory / f"{name}.log"))
            return Gateway(directory / f"{name}.yaml", settings(port, workers, *addresses), tap, session)

        prefill, decode = await engines("prefill", 2), await engines("decode", 3)
        others = [*await engines("prefill", 1), *await engines("decode", 1)]
        sglang = await stack.enter_async_context(SimulatedEngine(profile_name="sglang"))
        made = Fleet(
            prefill,
            decode,
            [*others, sglang],
            gateway("serving", workers, prefill, decode),
            gateway("idle", 1, others[:1], others[1:]),
            session,
        )
        try:
            await asyncio.gather(made.serving.start(), made.idle.start())
            yield made
        finally:
            await asyncio.gather(made.serving.program.end(), made.idle.program.end())
