"""Engines, a network in front of each, the gateways and their store, and queries of their state."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lab.common.fleet import PDPROXY, Fleet, Gateway, store, store_url
from lab.common.proc import open_fds, resident_bytes, tree
from lab.common.processes import HOST, Program, fetch, quiet_ports
from lab.common.toxics import ToxicProxy, Watcher
from lab.soak.evidence import Limits, Sample, combined

ENGINE_OPTIONS: dict[str, Any] = {"eos_after": 150, "tool_call_parser": "kimi_k2", "prompt_tokens_details": False}
"""Options that determine answers, for the engines of the cluster and the reference engine."""
_ENGINE_FLAGS = (
    *("--decode-step-ms", "25", "--prefill-ms-per-1k-tokens", "100", "--pin-seconds", "20"),
    *("--eos-after", "150", "--tool-call-parser", "kimi_k2", "--no-prompt-tokens-details"),
)
_PATIENCE_SECONDS = 60.0
STALL_SECONDS = 1.0
LIMITS = Limits(handoff_seconds=4.0, health_seconds=0.5)


def settings(prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """Return the settings of all gateways. Times that are long by default are about a second."""
    return {
        "prefill": list(prefill),
        "decode": list(decode),
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
            "timeout_seconds": 3.0,  # `stall_seconds` detects silence, and this machine may be busy
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
    """A simulated engine and the network in front of it. Gateways know it as `instance`."""

    def __init__(
        self,
        role: str,
        port: int,
        network_port: int,
        log: Path,
        watch: Callable[[str], Watcher],
        *,
        is_elastic: bool,
    ) -> None:
        """Describe the engine. `is_elastic`: it serves both roles, and begins with `role`."""
        self.role = role
        self.instance = f"{HOST}:{network_port}"
        self.network = ToxicProxy(HOST, port, listen_on=network_port, watch=lambda: watch(self.instance))
        served = "both" if is_elastic else role
        command = [*PDPROXY, "mock-engine", "--role", served, "--port", str(port), *_ENGINE_FLAGS]
        self.program = Program(name=self.name, command=command, port=port, output=log, ready_path="/health")

    @property
    def name(self) -> str:
        return f"{self.role} {self.instance}"


class Cluster:
    """Engines, gateways and their store."""

    def __init__(
        self,
        engines: list[Engine],
        gateways: list[Gateway],
        listed: ListedEngines | None,
        store: Program | None,
    ) -> None:
        """Create the cluster.

        Args:
          engines: All engines.
          gateways: All gateways.
          listed: File by which gateways find engines. None: they are configured, and changed by the admin API.
          store: Store by which gateways share state. None: they share nothing.
        """
        self.engines = engines
        self.gateways = gateways
        self.listed = listed
        self.store = store

    async def sample(self) -> Sample:
        """Return the metrics of all gateways, and their memory and file descriptors."""
        return combined(await asyncio.gather(*map(_sample, self.gateways)))

    def workers(self) -> list[int]:
        """Return the process ids of workers. A gateway of one process has none."""
        return [pid for gateway in self.gateways for pid in gateway.workers()]

    # Instances

    async def change(self, verb: str, engine: Engine, **fields: Any) -> None:
        """`add` or `remove` an instance, and wait until the gateways know."""
        if self.listed is not None:
            (self.listed.add if verb == "add" else self.listed.remove)(engine.role, engine.instance)
            await wait_until(partial(self._is_enabled, engine, is_expected=verb == "add"))
        else:
            await self.administer(verb, engine, **fields)

    async def administer(self, verb: str, engine: Engine, **fields: Any) -> None:
        """`add` or `remove` an instance by the admin API of every gateway."""
        change = json.dumps({"type": engine.role, "instances": engine.instance, **fields}).encode()
        for gateway in self.gateways:
            try:
                await asyncio.to_thread(fetch, f"{gateway.url}/instances/{verb}", change)
            except OSError as error:
                sys.exit(f"a gateway failed to {verb} {engine.name}: {error}")

    async def move(self, engine: Engine, role: str) -> None:
        """Order another role for an elastic instance at every gateway, and wait until all of them have given it."""
        order = json.dumps({"role": role, "instances": engine.instance}).encode()
        for gateway in self.gateways:
            try:
                await asyncio.to_thread(fetch, f"{gateway.url}/instances/role", order)
            except OSError as error:
                sys.exit(f"a gateway failed to move {engine.name}: {error}")
        await wait_until(partial(self._has_role, engine, role))
        engine.role = role

    async def _has_role(self, engine: Engine, role: str) -> bool:
        for gateway in self.gateways:
            roles = {one["address"]: one["role"] for one in await _instances(gateway)}
            if roles.get(engine.instance) != role:
                return False
        return True

    async def is_known(self, engine: Engine) -> bool:
        """Return whether all gateways know an instance, draining or not."""
        return all([engine.instance in await _addresses(gateway) for gateway in self.gateways])

    async def is_unknown(self, engine: Engine) -> bool:
        """Return whether no gateway knows an instance."""
        return not any([engine.instance in await _addresses(gateway) for gateway in self.gateways])

    async def _is_enabled(self, engine: Engine, *, is_expected: bool) -> bool:
        for gateway in self.gateways:
            enabled = {one["address"] for one in await _instances(gateway) if one["membership"] == "enabled"}
            if (engine.instance in enabled) != is_expected:
                return False
        return True

    async def have_discovered(self, count: int) -> bool:
        """Return whether discovery has reported `count` instances to each gateway."""
        return (await self.sample()).total("pdproxy_discovery_instances") == count * len(self.gateways)

    async def discovery_fails(self) -> bool:
        """Return whether all gateways report that discovery fails."""
        return (await self.sample()).total("pdproxy_discovery_up") == 0

    # Health

    async def is_healthy(self) -> bool:
        """Return whether the gateways report every instance as up, and know each other."""
        for gateway in self.gateways:
            for sample in await _samples(gateway):
                if sample.total("pdproxy_instance_up") < len(self.engines):
                    return False
        return await self.know_each_other()

    async def becomes_healthy(self) -> bool:
        """Wait until everything is healthy. Return False if that takes too long."""
        with suppress(TimeoutError):
            await wait_until(self.is_healthy)
            return True
        return False

    async def is_down(self, engine: Engine) -> bool:
        """Return whether no worker of any gateway reports an instance as up."""
        for gateway in self.gateways:
            if any(s.total("pdproxy_instance_up", address=engine.instance) for s in await _samples(gateway)):
                return False
        return True

    async def are_alone(self) -> bool:
        """Return whether no gateway knows another one."""
        return (await self.sample()).total("pdproxy_replicas_peers") == 0

    async def know_each_other(self) -> bool:
        if self.store is None:
            return True
        count = len(self.gateways)
        return (await self.sample()).total("pdproxy_replicas_peers") == count * (count - 1)

    # Engines

    async def is_idle(self, engine: Engine) -> bool:
        """Return whether an engine has no requests."""
        return not (await self.state(engine))["live"]

    async def inject(self, engine: Engine, rule: dict[str, Any]) -> None:
        await asyncio.to_thread(fetch, f"{engine.program.url}/_mock/faults", json.dumps(rule).encode())

    async def clear_faults(self, engine: Engine) -> None:
        await asyncio.to_thread(fetch, f"{engine.program.url}/_mock/faults", method="DELETE")

    async def state(self, engine: Engine) -> dict[str, Any]:
        """Return the state that an engine reports, without the requests that it received."""
        state: dict[str, Any] = json.loads(await asyncio.to_thread(fetch, f"{engine.program.url}/_mock/state"))
        del state["requests"]
        return state


async def wait_until(condition: Callable[[], Awaitable[bool]], patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait until a condition is true. Raises TimeoutError."""
    async with asyncio.timeout(patience_seconds):
        while not await condition():  # noqa: ASYNC110 other processes have no events
            await asyncio.sleep(0.1)


async def _instances(gateway: Gateway) -> list[dict[str, Any]]:
    """Return all instances of a gateway, draining ones included."""
    return list(json.loads(await asyncio.to_thread(fetch, f"{gateway.url}/instances"))["instances"])


async def _addresses(gateway: Gateway) -> set[str]:
    return {one["address"] for one in await _instances(gateway)}


async def _sample(gateway: Gateway) -> Sample:
    """Return the metrics of a gateway with a label `gateway`, its memory and file descriptors."""
    text = await asyncio.to_thread(gateway.metrics)
    metrics = {
        (sample.name, tuple(sorted({**sample.labels, "gateway": str(gateway.port)}.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    pid = gateway.pid
    return Sample(at=time.time(), metrics=metrics, rss_bytes=resident_bytes(pid), fds=sum(map(open_fds, tree(pid))))


async def _samples(gateway: Gateway) -> list[Sample]:
    """Return samples until every worker has probably answered one, since each has a separate view of health."""
    return [await _sample(gateway) for _ in range(max(1, 4 * len(gateway.workers())))]


def _elastic(engines: Iterable[Engine], evacuate_after_seconds: float | None) -> dict[str, Any]:
    """Return the options of elastic instances. Only the faults move them."""
    return {
        "instances": [engine.instance for engine in engines],
        "evacuate_after_seconds": evacuate_after_seconds,
        "mode": "advise",
    }


class ListedEngines:
    """The file by which gateways discover engines. `settings` are those that name it."""

    def __init__(self, path: Path, engines: Iterable[tuple[str, str]]) -> None:
        """Write the file. `engines`: role and instance of each engine."""
        self._path = path
        self._engines = list(engines)
        self.settings: dict[str, Any] = {"discovery": {"files": [str(path)]}}
        self.repair()

    def add(self, role: str, instance: str) -> None:
        self._engines.append((role, instance))
        self.repair()

    def remove(self, role: str, instance: str) -> None:
        self._engines.remove((role, instance))
        self.repair()

    def corrupt(self) -> None:
        """Cut the file in the middle, so that it is invalid."""
        text = self._path.read_text()
        self._replace(text[: len(text) // 2])

    def repair(self) -> None:
        """Write the current engines."""
        groups = [{"targets": [instance], "labels": {"role": role}} for role, instance in self._engines]
        self._replace(json.dumps(groups))

    def _replace(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(text)
        new.replace(self._path)


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
    is_elastic: bool,
) -> AsyncIterator[Cluster]:
    """Start the cluster and stop it at the end. Several gateways share state.

    Args:
      directory: For logs and configurations.
      workers: Workers of each gateway.
      per_role: Number of prefillers, and of decoders.
      watch: Makes a watcher for each connection to an engine.
      gateways: Number of gateways.
      is_discovered: Gateways find the engines in a file.
      evacuate_after_seconds: Time that requests of a removed or moving instance may take. None: unlimited.
      is_elastic: All engines can move to the other role.
    """
    store_port, *ports = quiet_ports(1 + gateways + 2 * per_role)
    roles = ["prefill"] * per_role + ["decode"] * per_role
    async with AsyncExitStack() as stack:
        fleet = Fleet(directory)
        stack.push_async_callback(asyncio.to_thread, fleet.close)
        engines = [
            Engine(role, port, network_port, directory / "engines.log", watch, is_elastic=is_elastic)
            for role, port, network_port in zip(roles, quiet_ports(2 * per_role), ports[gateways:], strict=True)
        ]
        for engine in engines:
            await stack.enter_async_context(engine.network)
            fleet.begin(engine.program)
        listed = shared = None
        configured = engines
        if is_discovered:
            listed = ListedEngines(directory / "engines.json", ((engine.role, engine.instance) for engine in engines))
            configured = []
        if gateways > 1:
            shared = fleet.begin(store(store_port, directory))
        instances = {role: [e.instance for e in configured if e.role == role] for role in ("prefill", "decode")}
        options = {
            **settings(**instances),
            "workers": workers,
            "leaving": {"evacuate_after_seconds": evacuate_after_seconds},
            **(listed.settings if listed else {}),
            **({"replicas": {"url": store_url(store_port)}} if shared else {}),
            **({"elastic": _elastic(engines, evacuate_after_seconds)} if is_elastic else {}),
        }
        await asyncio.to_thread(fleet.wait)
        made = [
            fleet.begin(fleet.configured(f"gateway-{number}", {**options, "listen": {"port": port}}))
            for number, port in enumerate(ports[:gateways], 1)
        ]
        await asyncio.to_thread(fleet.wait)
        cluster = Cluster(engines, made, listed, shared)
        await wait_until(cluster.know_each_other)
        yield cluster
