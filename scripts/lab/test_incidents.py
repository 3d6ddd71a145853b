"""Measure how long GET /admin/status takes to name the cause of an incident.

Every incident has 2 prefillers and 4 decoders under 6 requests per second of 2,300 tokens. The state must be healthy
before, and name all causes within 15 s. The state of nine healthy fleets must stay healthy under load, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import uvloop

from lab.common.fleet import STOPS_SOON, Fleet, Gateway, simulated
from lab.common.load import Connections, Load, post
from lab.common.processes import called_from, fetch, quiet_ports, unwind_on_signals
from proxy.sim.engine import SimulatedEngine
from proxy.sim.engine.scheduler import Scheduler

_BOUND_SECONDS: Final = 15.0
_READY_SECONDS: Final = 30.0
_WARM_SECONDS: Final = 6.0
_HEALTHY_SECONDS: Final = 40.0
_PER_SECOND: Final = 6.0
_POLL_SECONDS: Final = 0.1
_DOWN_SECONDS: Final = 4.0
_WIDTH: Final = 1400
_ENGINE: Final[dict[str, Any]] = {
    "prefill_ms_per_1k_tokens": 60.0,
    "decode_step_ms": 25.0,
    "connector_name": "nixl",
    "profile_name": "v0.33",
}
_KEYS: Final = ("team-a", "team-b")
_WORD: Final = "word "  # the simulated tokenizer makes a token of each character
Cause = tuple[str, str]
"""The code and the subject of a reason. Several codes are separated by `|`; one of them is enough."""


class Site:
    """Engines in this process, a gateway, and its clients."""

    def __init__(self, gateway: Gateway, prefill: list[SimulatedEngine], decode: list[SimulatedEngine]) -> None:
        self.gateway = gateway
        self.prefill = prefill
        self.decode = decode
        self.cut_off: set[int] = set()
        """Ports of prefillers from which the last decoder cannot fetch KV."""
        self._connections = {name: Connections(gateway.port) for name in _KEYS}
        self._draw = random.Random(5)

    async def status(self) -> dict[str, Any]:
        """Return the answer to GET /admin/status."""
        text = await asyncio.to_thread(fetch, self.gateway.url + "/admin/status")
        status: dict[str, Any] = json.loads(text)
        return status

    async def healthy_instances(self) -> set[str]:
        """Return the addresses of the instances that are up."""
        text = await asyncio.to_thread(fetch, self.gateway.url + "/instances")
        return {each["address"] for each in json.loads(text)["instances"] if each["state"] == "up"}

    async def ask(self, key: str = _KEYS[0], *, tokens: int = 2300, max_tokens: int = 60, **fields: Any) -> str:
        """Send one request. Return the problem of its answer."""
        prompt = f"{self._draw.random()} " + _WORD * (tokens // len(_WORD))
        body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "stream": True, **fields}
        request = post(self.gateway.port, body, "/v1/completions").replace(b"Bearer bench", f"Bearer sk-{key}".encode())
        answer = await self._connections[key].ask(request)
        return answer.problem()

    def load(self, per_second: float, key: str = _KEYS[0], **fields: Any) -> AbstractAsyncContextManager[None]:
        """Send requests of a key at this rate during the block, and cancel those in flight at its end."""
        return Load(lambda _: self.ask(key, **fields)).at_rate(per_second, random.Random(3), leaves=True)


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, which lasts as long as its context, and its causes."""

    begin: Callable[[Site], AbstractAsyncContextManager[Sequence[Cause]]]
    """Begins the incident. The context returns the causes, all of which must be named."""
    per_second: float = _PER_SECOND
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.begin.__name__


def _name(engine: SimulatedEngine) -> str:
    return f"{engine.host}:{engine.port}"


async def _restart(site: Site, engines: Mapping[SimulatedEngine, Mapping[str, Any]]) -> None:
    """Restart engines with other options, and wait until the gateway sends them requests again.

    They are down for some seconds, which is another incident: the status names it at once.
    """
    for engine in engines:
        await engine.kill()
    await asyncio.sleep(_DOWN_SECONDS)
    for engine, options in engines.items():
        engine.options = replace(engine.options, **options)
        await engine.restart()
    restarted = set(map(_name, engines))
    while restarted - await site.healthy_instances():  # noqa: ASYNC110 the gateway is another process
        await asyncio.sleep(_POLL_SECONDS)


# The six incidents of a trial by operators


@asynccontextmanager
async def hang(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Let a decoder stop after five tokens of each answer."""
    site.decode[0].faults.add("stall_after_tokens", tokens=5)
    yield [("instance_silent", _name(site.decode[0]))]


@asynccontextmanager
async def pair(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Cut the route of KV between a prefiller and a decoder."""
    prefiller, decoder = site.prefill[0], site.decode[3]
    site.cut_off.add(prefiller.port)
    yield [("pair_apart", f"{_name(prefiller)} {_name(decoder)}")]


@asynccontextmanager
async def burst(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Send three times as many requests as the prefillers can compute."""
    async with site.load(40.0):
        yield [("queue", "prefill")]


@asynccontextmanager
async def flood(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Send most requests with one of two client keys."""
    async with site.load(40.0, _KEYS[1]):
        yield [("key_dominates", _KEYS[1])]


@asynccontextmanager
async def memory(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Let two decoders give up answers for lack of KV memory."""
    for engine in site.decode[:2]:
        engine.faults.add("recompute", tokens=10, every=2)
    yield [("kv_memory", _name(engine)) for engine in site.decode[:2]]


@asynccontextmanager
async def bad_deploy(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Restart two decoders without a KV connector, and a prefiller with another model."""
    await _restart(
        site, {site.prefill[0]: {"model": "other"}, **{each: {"protocol": "none"} for each in site.decode[:2]}}
    )
    names = [_name(engine) for engine in site.decode[:2]]
    yield [
        ("incompatible", _name(site.prefill[0])),
        *(("pair_recomputes|pair_slow", f"{_name(site.prefill[1])} {name}") for name in names),
    ]


# Further incidents


@asynccontextmanager
async def slow_decoder(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Let a decoder take 300 ms for a token instead of 25 ms."""
    scheduler = site.decode[0].core.scheduler
    assert isinstance(scheduler, Scheduler)
    scheduler.cost = replace(scheduler.cost, step=0.3)
    yield [("instance_slow", _name(site.decode[0]))]


@asynccontextmanager
async def slow_restart(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Restart a decoder, which then takes 300 ms for a token instead of 25 ms."""
    await _restart(site, {site.decode[0]: {"decode_step_ms": 300.0}})
    yield [("instance_slow", _name(site.decode[0]))]


@asynccontextmanager
async def quiet_hang(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Stop the only answer in the fleet, so that no other instance shows progress."""
    for engine in site.decode:
        engine.faults.add("stall_after_tokens", tokens=5)
    asking = asyncio.create_task(site.ask())
    try:
        await asyncio.sleep(1.0)
        (busy,) = [engine for engine in site.decode if any(seen.path == "/v1/completions" for seen in engine.requests)]
        yield [("instance_silent", _name(busy))]
    finally:
        asking.cancel()
        await asyncio.wait([asking])


@asynccontextmanager
async def prefill_hang(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Let a prefiller accept prompts without an answer."""
    site.prefill[0].faults.add("hang_before_headers")
    yield [("instance_silent", _name(site.prefill[0]))]


@asynccontextmanager
async def engine_error(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Let a decoder answer with status 500."""
    body = {"error": {"message": "CUDA error: an illegal memory access was encountered", "code": 500}}
    site.decode[0].faults.add("refuse_status", status=500, body=body)
    yield [("instance_failing|instance_ejected", _name(site.decode[0]))]


@asynccontextmanager
async def no_prefiller(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Kill both prefillers."""
    for engine in site.prefill:
        await engine.kill()
    yield [("no_instance", "prefill"), *(("instance_down", _name(engine)) for engine in site.prefill)]


@asynccontextmanager
async def blocked_worker(site: Site) -> AsyncIterator[Sequence[Cause]]:
    """Stop a worker of the gateway."""
    workers = site.gateway.workers()
    number = len(workers) - 1
    pid = workers[number] if workers else site.gateway.pid
    stopping = await asyncio.create_subprocess_exec("kill", "-STOP", str(pid))
    await stopping.wait()
    try:
        yield [("worker_silent", str(number))]
    finally:
        continuing = await asyncio.create_subprocess_exec("kill", "-CONT", str(pid))
        await continuing.wait()


_INCIDENTS: Final = (
    *(Incident(begin) for begin in (hang, pair, burst, flood, memory, bad_deploy)),
    *(Incident(begin) for begin in (slow_decoder, slow_restart, prefill_hang, engine_error, no_prefiller)),
    Incident(quiet_hang, per_second=0.0),
    Incident(blocked_worker, settings={"workers": 3}),
)


# Healthy fleets


@dataclass(frozen=True, slots=True)
class HealthyFleet:
    """A fleet without a problem."""

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    models: Sequence[str] = ("sim",)
    """Models of the instances, in turn."""


_HEALTHY: Final = (
    HealthyFleet("vllm-ascend", {"protocol": "layerwise", "profile_name": "v0.30", "connector_name": None}),
    HealthyFleet("vllm-nixl"),
    HealthyFleet("sglang", {"profile_name": "sglang", "connector_name": None}),
    HealthyFleet("mooncake", {"protocol": "transfer", "profile_name": "v0.30", "connector_name": None}),
    HealthyFleet("plain", settings={"connector": "plain", "prefill": []}),
    HealthyFleet("two-models", models=("a", "b")),
    HealthyFleet("engine-keys", {"api_key": "sk-engine"}, {"auth": {"engine_api_key": "sk-engine"}}),
    HealthyFleet("ipv6", host="::1"),
    HealthyFleet("auto", settings={"connector": "auto"}),
)
_CONNECTORS: Final = {"layerwise": "ascend_layerwise", "transfer": "mooncake_bootstrap"}
_MIX: Final = (
    # Requests per second, tokens of the prompt, tokens of the answer
    (2.0, 2_300, 60),
    (1.0, 100, 200),
    (0.05, 110_000, 20),
)
"""Load of a healthy fleet: usual requests, short prompts with long answers, and prompts of several seconds."""


# The runs


@asynccontextmanager
async def _site(
    directory: Path, settings: Mapping[str, Any], engines: Sequence[tuple[str, int, Mapping[str, Any]]]
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made: dict[str, list[SimulatedEngine]] = {"prefill": [], "decode": [], "both": []}
        for role, count, options in engines:
            made[role] += await stack.enter_async_context(simulated(role, count, **options))
        prefill, decode = made["prefill"], made["decode"] + made["both"]
        fleet = stack.enter_context(Fleet(directory))
        (port,) = quiet_ports(1)
        tree = {
            "prefill": [_endpoint(engine) for engine in prefill],
            "decode": [_endpoint(engine) for engine in decode],
            "listen": {"port": port},
            "kv": {"prefill_min_tokens": 16},
            **settings,
        }
        gateway = fleet.configured("gateway", tree)
        gateway.environment = STOPS_SOON
        await asyncio.to_thread(fleet.keep, gateway)
        try:
            yield Site(gateway, prefill, decode)
        finally:
            gateway.send(signal.SIGTERM)
            await asyncio.to_thread(gateway.end)


def _endpoint(engine: SimulatedEngine) -> str:
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    return f"{host}:{engine.port}" + (f" {engine.bootstrap_port}" if engine.bootstrap_port else "")


async def _measure(incident: Incident, directory: Path, workers: int, pictures: Path | None) -> tuple[str, ...]:
    """Run an incident. Return its row: name, seconds, and the sentence of the last cause or the problem."""
    keys = directory / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in _KEYS]}), encoding="utf-8")
    settings = {"workers": workers, "auth": {"client_keys_file": str(keys)}, **incident.settings}
    cut_off: set[int] = set()
    engines = [
        ("prefill", 2, _ENGINE),
        ("decode", 3, _ENGINE),
        ("decode", 1, {**_ENGINE, "unreachable_ports": cut_off}),
    ]
    async with _site(directory, settings, engines) as site, AsyncExitStack() as stack:
        site.cut_off = cut_off
        if incident.per_second:
            await stack.enter_async_context(site.load(incident.per_second))
        problem = await _stays_healthy(site, _WARM_SECONDS)
        if problem:
            return incident.name, "-", f"before the incident: {problem}"
        causes = await stack.enter_async_context(incident.begin(site))
        began = time.monotonic()
        while True:
            status = await site.status()
            found = {(reason["code"], reason["subject"]["name"]): reason["text"] for reason in status["reasons"]}
            texts = [_text_of(cause, found) for cause in causes]
            seconds = time.monotonic() - began
            if None not in texts:
                if pictures is not None:
                    await _take_picture(site.gateway.url + "/", pictures / f"{incident.name}.png")
                return incident.name, f"{seconds:.1f}", f"{status['state']}: {texts[-1]}"
            if seconds > 2 * _BOUND_SECONDS:
                missing = [cause for cause, text in zip(causes, texts, strict=True) if text is None]
                return incident.name, "-", f"not named: {missing}; named: {sorted(found)}"
            await asyncio.sleep(_POLL_SECONDS)


def _text_of(cause: Cause, found: Mapping[Cause, str]) -> str | None:
    """Return the sentence of a cause, or None if the status does not name it. `found`: sentences by cause."""
    codes, subject = cause
    return next((found[code, subject] for code in codes.split("|") if (code, subject) in found), None)


async def _stays_healthy(site: Site, seconds: float) -> str:
    """Wait until the state is healthy, and for this time. Return the first reason against it, or an empty string."""
    deadline = time.monotonic() + _READY_SECONDS
    while (status := await site.status())["at"] is None or status["reasons"]:
        if time.monotonic() > deadline:
            return f"after {_READY_SECONDS:g} s: {status['reasons'][:1]}"
        await asyncio.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if reasons := (await site.status())["reasons"]:
            return f"{reasons[0]['code']}: {reasons[0]['text']}"
        await asyncio.sleep(_POLL_SECONDS)
    return ""


async def _take_picture(url: str, file: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("--pictures needs Chromium: apt-get install chromium (Debian, Ubuntu)")
    flags = (
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--window-size={_WIDTH},1000",
        "--virtual-time-budget=8000",
    )
    with tempfile.TemporaryDirectory() as profile:
        command = (chromium, *flags, f"--user-data-dir={profile}", f"--screenshot={file}", url)
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*command, **quiet)  # type: ignore[arg-type]
        await process.wait()


async def _watch(healthy: HealthyFleet, directory: Path) -> str:
    """Run a healthy fleet under load. Return the first reason against its health, or an empty string."""
    options = {**_ENGINE, "host": healthy.host, **healthy.engine}
    is_plain = healthy.settings.get("connector") == "plain"
    engines: list[tuple[str, int, Mapping[str, Any]]] = []
    for model in healthy.models:
        own = {**options, "model": model}
        engines += [("both", 2, own)] if is_plain else [("prefill", 2, own), ("decode", 2, own)]
    connector = _CONNECTORS.get(str(healthy.engine.get("protocol")), "vllm_pull")
    if healthy.engine.get("profile_name") == "sglang":
        connector = "sglang_bootstrap"
    settings = {"connector": connector, "layerwise": {"host": "127.0.0.1"}, **healthy.settings}
    async with _site(directory, settings, engines) as site, AsyncExitStack() as stack:
        for per_second, tokens, max_tokens in _MIX:
            for model in healthy.models:
                load = site.load(per_second, tokens=tokens, max_tokens=max_tokens, model=model)
                await stack.enter_async_context(load)
        return await _stays_healthy(site, _HEALTHY_SECONDS)


async def _run(options: argparse.Namespace, pictures: Path | None) -> list[str]:
    problems = []
    wanted = set(options.only)

    for incident in _INCIDENTS:
        if wanted and incident.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as directory:
            name, seconds, text = await _measure(incident, Path(directory), options.workers, pictures)
        print(f"{name:15} {seconds:>5} s  {text}", flush=True)
        if seconds == "-" or float(seconds) > _BOUND_SECONDS:
            problems.append(f"{name} was not named within {_BOUND_SECONDS:g} s")
    for healthy in _HEALTHY:
        if wanted and healthy.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as directory:
            problem = await _watch(healthy, Path(directory))
        print(f"{healthy.name:15} {problem or f'healthy for {_HEALTHY_SECONDS:g} s'}", flush=True)
        if problem:
            problems.append(f"healthy fleet {healthy.name}: {problem}")
    return problems


def main() -> None:
    """Run the incidents and the healthy fleets. Exits with 1 if there are problems."""
    unwind_on_signals()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # an engine whose client has left logs an error
    names = [*(incident.name for incident in _INCIDENTS), *(healthy.name for healthy in _HEALTHY)]
    parser = argparse.ArgumentParser(prog="scripts/test-incidents", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--workers", type=int, default=1, help="workers of the gateway (default: 1)")
    parser.add_argument(
        "--pictures",
        metavar="DIRECTORY",
        help="write a picture of the page in each incident. Its rates are wrong: the browser's clock runs fast",
    )
    options = parser.parse_args()
    pictures = called_from() / options.pictures if options.pictures else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    problems = uvloop.run(_run(options, pictures))
    sys.exit("; ".join(problems) or None)


if __name__ == "__main__":
    main()
