"""Engines in this process, the gateway in front of them, and continuous clients."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

from lab.common.fleet import Fleet, Gateway, addresses, simulated
from lab.common.load import Connections, Load, post
from lab.common.processes import HOST, fetch, quiet_ports
from proxy.sim.engine import SimulatedEngine

KEY: Final = "the-admin-key"
MARKUP: Final = "<img src=x onerror=window.owned=1>"
"""Text of an engine in place of a name or a reason."""
CLIENTS: Final = ("team-busy", "team-other")
"""Names of the client keys. The first sends most requests."""
DOOMED: Final = "doomed"
"""User whose requests every decoder answers with an error."""
LOST: Final = "lost"
"""User whose answers every decoder breaks off."""
_ENGINE: Final[dict[str, Any]] = {
    "model": "kimi_k26",
    "decode_step_ms": 15.0,
    "prefill_ms_per_1k_tokens": 60.0,
    "connector_name": "nixl",
}
_READY_SECONDS: Final = 60.0
_PER_SECOND: Final = 10.0


@dataclass(slots=True)
class Site:
    """Engines, gateway and clients."""

    prefill: list[SimulatedEngine]
    decode: list[SimulatedEngine]
    gateway: Gateway
    admin_url: str
    connections: Connections
    failing: list[SimulatedEngine]
    pictures: Path | None = None
    """Directory for pictures. None: no pictures are taken."""

    async def break_down(self) -> None:
        """Kill one decoder and let another one fail. Return when the gateway knows."""
        dead, failing_decoder = self.failing = self.decode[1:3]
        await dead.kill()
        failing_decoder.faults.add("refuse_status", status=500, body={"error": {"message": MARKUP}})
        for engine in self.decode:
            engine.faults.add("refuse_status", status=500, user=DOOMED, body={"error": {"message": MARKUP}})
            engine.faults.add("reset_after_tokens", tokens=5, user=LOST)
        states = {f'pdproxy_instance_state{{address="{HOST}:{engine.port}"': engine for engine in self.failing}
        async with asyncio.timeout(_READY_SECONDS):
            while True:
                lines = [line for line in (await self.metrics()).splitlines() if line.startswith(tuple(states))]
                if [line.split()[-1] for line in lines] and all(line.endswith((" 2.0", " 3.0")) for line in lines):
                    return
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def odd_decoder(self) -> AsyncIterator[None]:
        """Add a decoder whose model is called `MARKUP`."""
        (port,) = quiet_ports(1)
        change = {"type": "decode", "instances": f"{HOST}:{port}"}
        async with SimulatedEngine(role="decode", port=port, **{**_ENGINE, "model": MARKUP}):
            await self._administer("add", change)
            try:
                yield
            finally:
                await self._administer("remove", change)

    async def metrics(self) -> str:
        return (await asyncio.to_thread(fetch, self.admin_url + "/metrics")).decode()

    async def ask(self, draw: random.Random, user: str = "", request_id: str = "") -> None:
        """Send one chat, and ignore its answer. Engines know clients by `user`."""
        words = "tell me more about it, please. " * draw.choice((4, 60, 200, 400))
        body = {
            "model": "kimi_k26",
            "max_tokens": draw.randrange(20, 200),
            "stream": draw.random() < 0.9,
            "user": user,
            "messages": [{"role": "user", "content": f"Topic {draw.randrange(6)}: {words}"}],
        }
        headers = {"X_Request_Id": request_id} if request_id else {}
        request = post(self.connections.port, body, **headers)
        busy, other = CLIENTS
        name = busy if draw.random() < 0.8 else other
        with suppress(OSError):
            await self.connections.ask(request.replace(b"Bearer bench", f"Bearer sk-{name}".encode()))

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Send requests during the block, and cancel those in flight at its end."""
        draw, users = random.Random(7), cycle([*[""] * 20, DOOMED, *[""] * 20, LOST])

        async def ask(_: int) -> str:
            await self.ask(draw, next(users))
            return ""

        async with Load(ask).at_rate(_PER_SECOND, draw, leaves=True):
            yield

    async def _administer(self, what: str, change: dict[str, str]) -> None:
        headers = {"X-Admin-Key": KEY, "Content-Type": "application/json"}
        request = Request(f"{self.admin_url}/instances/{what}", json.dumps(change).encode(), headers)
        (await asyncio.to_thread(urlopen, request)).close()


@asynccontextmanager
async def site(directory: Path, *, workers: int = 3) -> AsyncIterator[Site]:
    """Run two prefillers, four decoders and the gateway in front of them."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(simulated("prefill", 2, **_ENGINE))
        decode = await stack.enter_async_context(simulated("decode", 4, **_ENGINE))
        port, admin_port = quiet_ports(2)
        keys_file = directory / "keys.yaml"
        keys_file.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in CLIENTS]}))
        settings: dict[str, Any] = {
            "prefill": addresses(prefill),
            "decode": addresses(decode),
            "workers": workers,
            "listen": {"port": port},
            "admin": {"port": admin_port},
            "auth": {"admin_key": KEY, "client_keys_file": str(keys_file)},
            "admission": {"max_running_decode": 32},
            "health": {"interval_seconds": 0.5, "fall": 2, "eject_seconds": 60.0},
        }
        fleet = stack.enter_context(Fleet(directory))
        gateway = fleet.configured("pdproxy", settings)
        try:
            await asyncio.to_thread(fleet.keep, gateway)
            yield Site(prefill, decode, gateway, f"http://{HOST}:{admin_port}", Connections(port), [])
        finally:
            await asyncio.to_thread(fleet.close)
