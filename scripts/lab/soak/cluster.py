"""Engines, the network before each of them, and the gateways; and the questions one asks of them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from lab.common.processes import HOST, quiet_ports
from lab.common.programs import Program
from lab.common.toxics import ToxicProxy
from lab.soak.evidence import together
from lab.soak.gateways import Gateway, Store, settings
from lab.soak.listed import ListedEngines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from pathlib import Path
    from typing import BinaryIO

    from lab.common.toxics import Watcher
    from lab.soak.evidence import Sample

ENGINE_OPTIONS: dict[str, Any] = {"eos_after": 150, "tool_call_parser": "kimi_k2", "prompt_tokens_details": False}
"""What decides what engines say: those of the cluster and the one that is asked alone."""
_ENGINE_FLAGS = (
    *("--decode-step-ms", "25", "--prefill-ms-per-1k-tokens", "100", "--pin-seconds", "20"),
    *("--eos-after", "150", "--tool-call-parser", "kimi_k2", "--no-prompt-tokens-details"),
)
_PATIENCE_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_START_SECONDS = 60.0
"""All programs start at once, on machines that may be busy with something else."""


class Engine:
    """A simulated engine and the network before it. Gateways know it as `instance`."""

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
        gateways: list[Gateway],
        session: aiohttp.ClientSession,
        listed: ListedEngines | None,
        store: Store | None,
    ) -> None:
        """`listed`: where the gateways find the engines; None: they are configured, and changed by an administrator.
        `store`: by which the gateways share what they know; None: they do not.
        """
        self.engines = engines
        self.gateways = gateways
        self.listed = listed
        self.store = store
        self._session = session

    async def start(self, engine: Engine) -> None:
        """Start an engine, and wait until it answers."""
        await engine.program.start()
        await self._wait_for(engine.url + "/health", engine.name, engine.program)

    async def start_gateways(self) -> None:
        """All at once, and wait until they are ready and know of each other."""
        await asyncio.gather(*(gateway.program.start() for gateway in self.gateways))
        for gateway in self.gateways:
            await self._wait_for(f"{gateway.url}/readyz", f"the gateway at port {gateway.port}", gateway.program)
        await until(self._know_each_other)

    async def sample(self) -> Sample:
        """What the gateways tell of themselves, and the kernel of them."""
        return together(await asyncio.gather(*(gateway.sample() for gateway in self.gateways)))

    def logs(self) -> list[str]:
        """What each gateway has written."""
        return [gateway.log() for gateway in self.gateways]

    def workers(self) -> list[int]:
        """The gateways'; none of one that is one process."""
        return [pid for gateway in self.gateways for pid in gateway.workers()]

    # Instances

    async def change(self, verb: str, engine: Engine, **fields: Any) -> None:
        """`add` or `remove` an instance, until the gateways have heard of it."""
        if self.listed is not None:
            (self.listed.add if verb == "add" else self.listed.remove)(engine.role, engine.instance)
            await until(partial(self._is_enabled, engine, is_expected=verb == "add"))
        else:
            await self.administer(verb, engine, **fields)

    async def administer(self, verb: str, engine: Engine, **fields: Any) -> None:
        """Tell every gateway to `add` or `remove` an instance."""
        for gateway in self.gateways:
            if refused := await gateway.change(verb, {"type": engine.role, "instances": engine.instance, **fields}):
                sys.exit(f"a gateway does not {verb} {engine.name}: {refused}")

    async def have(self, engine: Engine) -> bool:
        """Whether all gateways know an instance, be it draining."""
        return all([engine.instance in await _addresses(gateway) for gateway in self.gateways])

    async def lack(self, engine: Engine) -> bool:
        """Whether no gateway knows an instance."""
        return not any([engine.instance in await _addresses(gateway) for gateway in self.gateways])

    async def _is_enabled(self, engine: Engine, *, is_expected: bool) -> bool:
        for gateway in self.gateways:
            enabled = {one["address"] for one in await gateway.instances() if one["membership"] == "enabled"}
            if (engine.instance in enabled) != is_expected:
                return False
        return True

    async def are_told(self, count: int) -> bool:
        """Whether discovery has named so many instances to each gateway."""
        return (await self.sample()).total("pdproxy_discovery_instances") == count * len(self.gateways)

    async def discovery_fails(self) -> bool:
        """Whether the gateways say so."""
        return (await self.sample()).total("pdproxy_discovery_up") == 0

    # What is well

    async def is_well(self) -> bool:
        """Whether the gateways say so of every instance, and of each other."""
        for gateway in self.gateways:
            for sample in await gateway.samples():
                if sample.total("pdproxy_instance_up") < len(self.engines):
                    return False
        return await self._know_each_other()

    async def is_well_soon(self) -> bool:
        """Wait until all is well; False if that takes too long."""
        with suppress(TimeoutError):
            await until(self.is_well)
            return True
        return False

    async def is_down(self, engine: Engine) -> bool:
        """Whether no worker of any gateway holds an instance to be up."""
        for gateway in self.gateways:
            if any(s.total("pdproxy_instance_up", address=engine.instance) for s in await gateway.samples()):
                return False
        return True

    async def are_alone(self) -> bool:
        """Whether no gateway knows of another one."""
        return (await self.sample()).total("pdproxy_replicas_peers") == 0

    async def _know_each_other(self) -> bool:
        if self.store is None:
            return True
        count = len(self.gateways)
        return (await self.sample()).total("pdproxy_replicas_peers") == count * (count - 1)

    # Engines

    async def is_idle(self, engine: Engine) -> bool:
        """Whether an engine works on nothing."""
        return not (await self.state(engine))["live"]

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

    async def _wait_for(self, url: str, name: str, program: Program) -> None:
        async def answers() -> bool:
            if program.has_ended:
                sys.exit(f"{name} did not start; its output ends with:\n{program.last_words()}")
            # One that listens and has not come to answering is no failure yet.
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(url) as response:
                    return response.status == 200
            return False

        try:
            await until(answers, _START_SECONDS)
        except TimeoutError:
            sys.exit(f"{name} did not start in {_START_SECONDS:g} s; its output ends with:\n{program.last_words()}")


async def until(condition: Callable[[], Awaitable[bool]], patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Ask again and again. Raises TimeoutError."""
    async with asyncio.timeout(patience_seconds):
        while not await condition():  # noqa: ASYNC110 other processes have no events
            await asyncio.sleep(0.1)


async def _addresses(gateway: Gateway) -> set[str]:
    return {one["address"] for one in await gateway.instances()}


@asynccontextmanager
async def started(
    directory: Path,
    workers: int,
    per_role: int,
    watch: Callable[[str], Watcher],
    *,
    gateways: int,
    is_discovered: bool,
    evacuate_after_seconds: float | None,
) -> AsyncIterator[Cluster]:
    """Start everything, and stop it in the end. Logs and configurations are written to the directory. Several gateways
    share what they know. `is_discovered`: they find the engines in a file. `evacuate_after_seconds`: what still runs at
    an instance that leaves may end there for so long; None: however long that takes.
    """
    store_port, *ports = quiet_ports(1 + gateways + 4 * per_role)
    gateway_ports, ports = ports[:gateways], ports[gateways:]
    roles = ["prefill"] * per_role + ["decode"] * per_role
    async with AsyncExitStack() as stack:
        # Not kept: a connection that is left open would count among the gateways'.
        connector = aiohttp.TCPConnector(force_close=True)
        client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS))
        session = await stack.enter_async_context(client)
        engine_log = stack.enter_context((directory / "engines.log").open("wb"))
        engines = [
            Engine(role, port, network_port, engine_log, watch)
            for role, port, network_port in zip(roles, ports[::2], ports[1::2], strict=True)
        ]
        for engine in engines:
            await stack.enter_async_context(engine.network)
        listed = store = None
        configured = engines
        if is_discovered:
            listed = ListedEngines(directory / "engines.json", ((engine.role, engine.instance) for engine in engines))
            configured = []
        if gateways > 1:
            store = Store(store_port, directory)
            stack.push_async_callback(store.end)
            await store.start()
        instances = {role: [e.instance for e in configured if e.role == role] for role in ("prefill", "decode")}
        options = {
            **settings(**instances),
            "workers": workers,
            "leaving": {"evacuate_after_seconds": evacuate_after_seconds},
            **(listed.settings if listed else {}),
            **(store.settings if store else {}),
        }
        made = [
            stack.enter_context(Gateway(directory / f"gateway-{number}", port, options, session))
            for number, port in enumerate(gateway_ports, 1)
        ]
        cluster = Cluster(engines, made, session, listed, store)
        stack.push_async_callback(
            _end, [*(gateway.program for gateway in made), *(engine.program for engine in engines)]
        )
        await asyncio.gather(*map(cluster.start, engines))
        await cluster.start_gateways()
        yield cluster


async def _end(programs: Iterable[Program]) -> None:
    await asyncio.gather(*(program.end() for program in programs))
