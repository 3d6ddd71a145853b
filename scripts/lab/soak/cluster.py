"""Engines, the network before each of them, and the gateway; and the questions one asks of them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from lab.common.proc import open_fds, resident_bytes, tree
from lab.common.processes import HOST, quiet_ports
from lab.common.programs import Program
from lab.common.toxics import ToxicProxy
from lab.soak.evidence import Limits, Sample
from lab.soak.listed import ListedEngines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from lab.common.toxics import Watcher

ENGINE_OPTIONS: dict[str, Any] = {"eos_after": 150, "tool_call_parser": "kimi_k2", "prompt_tokens_details": False}
"""What decides what engines say: those of the cluster and the one that is asked alone."""
STALL_SECONDS = 1.0
LIMITS = Limits(handoff_seconds=4.0, health_seconds=0.5)
_ENGINE_FLAGS = (
    *("--decode-step-ms", "25", "--prefill-ms-per-1k-tokens", "100", "--pin-seconds", "20"),
    *("--eos-after", "150", "--tool-call-parser", "kimi_k2", "--no-prompt-tokens-details"),
)
_PATIENCE_SECONDS = 20.0
_START_SECONDS = 60.0
"""All programs start at once, on machines that may be busy with something else."""


def settings(port: int, workers: int, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """The gateway's configuration: everything that takes a while by default takes a second or so."""
    return {
        "prefill": list(prefill),
        "decode": list(decode),
        "workers": workers,
        "listen": {"port": port},
        "retry": {
            "max_attempts": LIMITS.max_attempts,
            "budget_share": LIMITS.budget_share,
            "budget_least": LIMITS.budget_least,
        },
        "resume": {"mode": "exact", "max_attempts": LIMITS.max_resumes, "deadline_seconds": 10.0},
        "timeouts": {
            "connect_seconds": 1.0,
            "prefill_seconds": 10.0,
            "handoff_seconds": LIMITS.handoff_seconds,
            "first_token_seconds": 10.0,
            "idle_seconds": 10.0,
            "answer_seconds": 30.0,
        },
        "health": {
            "interval_seconds": LIMITS.health_seconds,
            "timeout_seconds": 1.0,
            "changing_interval_seconds": 0.2,
            "fall": 2,
            "rise": 2,
            "eject_seconds": 1.0,
            "stall_seconds": STALL_SECONDS,
            "slow_start_seconds": 2.0,
            "quarantine_seconds": 2.0,
        },
        "joining": {"interval_seconds": 0.2, "max_attempts": 50},
        "drain": {"not_ready_seconds": 0.0},
        "log": {"format": "json"},
    }


class Engine:
    """A simulated engine and the network before it. The gateway knows it as `instance`."""

    def __init__(
        self, role: str, port: int, network_port: int, output: BinaryIO, watch: Callable[[str], Watcher]
    ) -> None:
        self.role = role
        self.url = f"http://{HOST}:{port}"
        self.instance = f"{HOST}:{network_port}"
        self.network = ToxicProxy(HOST, port, listen_on=network_port, watch=lambda: watch(self.instance))
        self.program = Program(["mock-engine", "--role", role, "--port", str(port), *_ENGINE_FLAGS], output)

    @property
    def name(self) -> str:
        return f"{self.role} {self.instance}"


class Cluster:
    """All of it."""

    def __init__(
        self,
        engines: list[Engine],
        gateway: Program,
        port: int,
        session: aiohttp.ClientSession,
        listed: ListedEngines | None,
    ) -> None:
        """`listed`: where the gateway finds the engines; None: they are configured, and changed by an administrator."""
        self.engines = engines
        self.listed = listed
        self.port = port
        self._gateway = gateway
        self._session = session
        self._url = f"http://{HOST}:{port}"

    async def start(self, engine: Engine) -> None:
        """Start an engine, and wait until it answers."""
        await engine.program.start()
        await self._wait_for(engine.url + "/health", engine.name)

    async def start_gateway(self) -> None:
        await self._gateway.start()
        await self._wait_for(self._url + "/readyz", "the gateway")

    async def sample(self) -> Sample:
        """What the gateway tells of itself, and the kernel of it."""
        async with self._session.get(self._url + "/metrics") as response:
            text = await response.text()
        metrics = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
        gateway = self._gateway.pid
        fds = sum(map(open_fds, tree(gateway)))
        return Sample(at=time.time(), metrics=metrics, rss_bytes=resident_bytes(gateway), fds=fds)

    def workers(self) -> list[int]:
        """The gateway's; none if it is one process."""
        return tree(self._gateway.pid)[1:]

    async def change(self, verb: str, engine: Engine) -> None:
        """`add` or `remove` an instance, until the gateway has heard of it."""
        if self.listed is not None:
            (self.listed.add if verb == "add" else self.listed.remove)(engine.role, engine.instance)
            await until(partial(self._is_enabled, engine, is_expected=verb == "add"))
            return
        body = {"type": engine.role, "instances": engine.instance}
        async with self._session.post(f"{self._url}/instances/{verb}", json=body) as response:
            if response.status != 200:
                sys.exit(f"the gateway does not {verb} {engine.name}: {await response.text()}")

    async def _is_enabled(self, engine: Engine, *, is_expected: bool) -> bool:
        async with self._session.get(f"{self._url}/instances") as response:
            told = (await response.json())["instances"]
        enabled = {one["address"] for one in told if one["membership"] == "enabled"}
        return (engine.instance in enabled) == is_expected

    async def discovery_fails(self) -> bool:
        """Whether the gateway says so."""
        return (await self.sample()).total("pdproxy_discovery_up") == 0

    async def has(self, engine: Engine) -> bool:
        """Whether the gateway knows an instance, be it draining."""
        sample = await self.sample()
        return any(("address", engine.instance) in labels for _, labels in sample.metrics)

    async def lacks(self, engine: Engine) -> bool:
        return not await self.has(engine)

    async def inject(self, engine: Engine, rule: dict[str, Any]) -> None:
        async with self._session.post(engine.url + "/_mock/faults", json=rule):
            pass

    async def clear_faults(self, engine: Engine) -> None:
        async with self._session.delete(engine.url + "/_mock/faults"):
            pass

    async def state(self, engine: Engine) -> dict[str, Any]:
        """What an engine says of itself, without what it was asked."""
        async with self._session.get(engine.url + "/_mock/state") as response:
            state = dict(await response.json())
        del state["requests"]
        return state

    async def is_well(self) -> bool:
        """Whether the gateway says so of every instance, and every worker does: each knows for itself."""
        for _ in range(max(1, 4 * len(self.workers()))):
            sample = await self.sample()
            if sample.total("pdproxy_instance_up") < len(self.engines):
                return False
        return True

    async def is_well_soon(self) -> bool:
        """Wait until all is well; False if that takes too long."""
        with suppress(TimeoutError):
            await until(self.is_well)
            return True
        return False

    async def _wait_for(self, url: str, name: str) -> None:
        async def answers() -> bool:
            with suppress(aiohttp.ClientError):
                async with self._session.get(url) as response:
                    return response.status == 200
            return False

        try:
            await until(answers, _START_SECONDS)
        except TimeoutError:
            sys.exit(f"{name} did not start; see its log in the directory of the run")


async def until(condition: Callable[[], Awaitable[bool]], patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Ask again and again. Raises TimeoutError."""
    async with asyncio.timeout(patience_seconds):
        while not await condition():  # noqa: ASYNC110 other processes have no events
            await asyncio.sleep(0.1)


@asynccontextmanager
async def started(
    directory: Path, workers: int, per_role: int, watch: Callable[[str], Watcher], *, is_discovered: bool
) -> AsyncIterator[Cluster]:
    """Start everything, and stop it in the end. Logs and configuration are written to the directory. `is_discovered`:
    the gateway finds the engines in a file.
    """
    gateway_port, *ports = quiet_ports(1 + 4 * per_role)
    roles = ["prefill"] * per_role + ["decode"] * per_role
    # Not kept: a connection that is left open would count among the gateway's.
    connector = aiohttp.TCPConnector(force_close=True)
    with (directory / "engines.log").open("wb") as engine_log, (directory / "gateway.log").open("wb") as gateway_log:
        engines = [
            Engine(role, port, network_port, engine_log, watch)
            for role, port, network_port in zip(roles, ports[::2], ports[1::2], strict=True)
        ]
        gateway = Program(["--config", str(directory / "gateway.yaml")], gateway_log)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10.0)) as session:
            names = ((engine.role, engine.instance) for engine in engines)
            listed = ListedEngines(directory / "engines.json", names) if is_discovered else None
            cluster = Cluster(engines, gateway, gateway_port, session, listed)
            configured = [] if is_discovered else engines
            instances = {role: [e.instance for e in configured if e.role == role] for role in ("prefill", "decode")}
            options = settings(gateway_port, workers, **instances) | (listed.settings if listed else {})
            # JSON is YAML, too.
            (directory / "gateway.yaml").write_text(json.dumps(options, indent=1))
            try:
                for engine in engines:
                    await engine.network.__aenter__()
                await asyncio.gather(*map(cluster.start, engines))
                await cluster.start_gateway()
                yield cluster
            finally:
                await asyncio.gather(*(program.end() for program in (gateway, *(e.program for e in engines))))
                for engine in engines:
                    await engine.network.__aexit__(None, None, None)
