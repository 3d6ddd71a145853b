"""What the page shows: simulated engines in this process, the gateway in front of them, and clients that never rest."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from lab.common.processes import HOST, quiet_ports
from lab.common.programs import Program
from proxy.sim.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY: Final = "the-admin-key"
MARKUP: Final = "<img src=x onerror=window.owned=1>"
"""What an engine says in place of a name or a reason."""
DOOMED: Final = "doomed"
"""A client to whom every decoder answers with an error."""
LOST: Final = "lost"
"""One whom every decoder leaves in the middle of the answer."""
_ENGINE: Final[dict[str, Any]] = {
    "model": "kimi_k26",
    "decode_step_ms": 15.0,
    "prefill_ms_per_1k_tokens": 60.0,
    "connector_name": "nixl",
}
_READY_SECONDS: Final = 60.0
_PER_SECOND: Final = 10.0
_GONE: Final = (aiohttp.ClientError, TimeoutError, ConnectionError)


@dataclass(slots=True)
class Site:
    """All of it."""

    prefill: list[SimulatedEngine]
    decode: list[SimulatedEngine]
    program: Program
    url: str
    """Of clients."""
    admin_url: str
    session: aiohttp.ClientSession
    file: Path
    settings: dict[str, Any]
    failing: list[SimulatedEngine]

    async def break_down(self) -> None:
        """One decoder dies, and one answers with errors. Returns when the gateway knows."""
        dead, sick = self.failing = self.decode[1:3]
        await dead.kill()
        sick.faults.add("refuse_status", status=500, body={"error": {"message": MARKUP}})
        for engine in self.decode:
            engine.faults.add("refuse_status", status=500, user=DOOMED, body={"error": {"message": MARKUP}})
            engine.faults.add("reset_after_tokens", tokens=5, user=LOST)
        states = {f'pdproxy_instance_state{{address="{HOST}:{engine.port}"': engine for engine in self.failing}
        async with asyncio.timeout(_READY_SECONDS):
            while True:
                told = [line for line in (await self.metrics()).splitlines() if line.startswith(tuple(states))]
                if [line.split()[-1] for line in told] and all(line.endswith((" 2.0", " 3.0")) for line in told):
                    return
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def odd_decoder(self) -> AsyncIterator[None]:
        """There is one more, whose model is called `MARKUP`."""
        (port,) = quiet_ports(1)
        change = {"type": "decode", "instances": f"{HOST}:{port}"}
        async with SimulatedEngine(role="decode", port=port, **{**_ENGINE, "model": MARKUP}):
            await self._administer("add", change)
            try:
                yield
            finally:
                await self._administer("remove", change)

    def reload(self, **changed: Any) -> None:
        """With these options instead."""
        self.file.write_text(json.dumps(self.settings | changed), encoding="utf-8")
        self.program.send(signal.SIGHUP)

    async def start(self) -> None:
        """Returns when the gateway is ready."""
        await self.program.start()
        async with asyncio.timeout(_READY_SECONDS):
            while not await self._is_ready():  # noqa: ASYNC110 another process has no events
                await asyncio.sleep(0.1)

    async def metrics(self) -> str:
        async with self.session.get(self.admin_url + "/metrics") as response:
            return await response.text()

    async def ask(self, draw: random.Random, user: str = "", request_id: str = "") -> None:
        """One chat, read to its end; nobody minds what it is. Engines know clients by `user`."""
        words = "tell me more about it, please. " * draw.choice((4, 60, 200, 400))
        body = {
            "model": "kimi_k26",
            "max_tokens": draw.randrange(20, 200),
            "stream": draw.random() < 0.9,
            "user": user,
            "messages": [{"role": "user", "content": f"Topic {draw.randrange(6)}: {words}"}],
        }
        with suppress(*_GONE):
            headers = {"X-Request-Id": request_id} if request_id else {}
            async with self.session.post(self.url + "/v1/chat/completions", json=body, headers=headers) as response:
                await response.read()

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Requests come all the time; at the end those under way are left."""
        draw, users = random.Random(7), cycle([*[""] * 20, DOOMED, *[""] * 20, LOST])
        async with asyncio.TaskGroup() as group:
            begun: set[asyncio.Task[None]] = set()

            async def begin() -> None:
                while True:
                    task = group.create_task(self.ask(draw, next(users)))
                    begun.add(task)
                    task.add_done_callback(begun.discard)
                    await asyncio.sleep(draw.expovariate(_PER_SECOND))

            beginner = group.create_task(begin())
            try:
                yield
            finally:
                for task in (beginner, *begun):
                    task.cancel()

    async def _administer(self, what: str, change: dict[str, str]) -> None:
        headers = {"X-Admin-Key": KEY}
        async with self.session.post(f"{self.admin_url}/instances/{what}", json=change, headers=headers) as response:
            response.raise_for_status()

    async def _is_ready(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with self.session.get(self.admin_url + "/readyz") as response:
                return response.status == 200
        return False


@asynccontextmanager
async def site(directory: Path, *, workers: int = 3) -> AsyncIterator[Site]:
    """Two prefillers and four decoders, and the gateway in front of them."""
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=60.0, connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))

        async def engines(role: str, count: int) -> list[SimulatedEngine]:
            made = [SimulatedEngine(role=role, port=port, **_ENGINE) for port in sorted(quiet_ports(count))]
            return [await stack.enter_async_context(engine) for engine in made]

        prefill, decode = await engines("prefill", 2), await engines("decode", 4)
        port, admin_port = quiet_ports(2)
        settings: dict[str, Any] = {
            "prefill": [f"{HOST}:{engine.port}" for engine in prefill],
            "decode": [f"{HOST}:{engine.port}" for engine in decode],
            "workers": workers,
            "listen": {"port": port},
            "admin": {"port": admin_port},
            "auth": {"admin_key": KEY},
            "admission": {"max_running_decode": 32},
            "health": {"interval_seconds": 0.5, "fall": 2, "eject_seconds": 60.0},
        }
        file = directory / "pdproxy.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML, too
        log = stack.enter_context((directory / "pdproxy.log").open("wb"))
        program = Program(["--config", str(file)], log)
        urls = (f"http://{HOST}:{port}", f"http://{HOST}:{admin_port}")
        made = Site(prefill, decode, program, *urls, session, file, settings, [])
        try:
            await made.start()
            yield made
        finally:
            await program.end()
