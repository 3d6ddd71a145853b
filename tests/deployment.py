"""A gateway, simulated engines and a client in this process, over real sockets.

Every deployment is checked at its end: no request may leave state behind.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest

from proxy.balancer.roster import Roster, SourceStates
from proxy.balancer.shared.journal import Journal
from proxy.balancer.shared.memory import QueueHeads
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Load
from proxy.connectors.nixl_push import EnginePlace, NixlPush
from proxy.connectors.releaser import RELEASE_MODEL
from proxy.gateway.api_keys import KeyUsage
from proxy.observe.receipts import Receipts
from proxy.process.configuration import SharedConfiguration
from proxy.process.shared import ListeningSockets, SharedState
from proxy.process.worker import Worker, build_worker, listening
from proxy.settings import LoadedSettings, Settings
from proxy.settings.tls import load_tls
from proxy.sim.engine import SimulatedEngine
from proxy.sim.state import RecordedRequest
from proxy.wire.openai import OPENAI_APIS
from tests.asking import Answer, api_of, ask, until
from tests.canned import CannedEngine

Engine = SimulatedEngine | CannedEngine

_QUIET_WITHIN_SECONDS = 30.0

# Default deadlines end only hanging tests, also on busy machines. A test of a deadline sets it. Health checks run once,
# at the beginning, unless a test sets otherwise.
_SETTINGS: dict[str, dict[str, object]] = {
    "retry": {"base_delay_seconds": 0.0, "max_delay_seconds": 0.0},
    "timeouts": {
        "connect_seconds": 30.0,
        "prefill_seconds": 30.0,
        "handoff_seconds": 30.0,
        "first_token_seconds": 30.0,
        "answer_seconds": 30.0,
        "idle_seconds": 30.0,
    },
    "stream": {"gather_seconds": 0},  # the event loop of a test is always busy
    "admission": {"wait_seconds": 20.0},
    "resume": {"deadline_seconds": 20.0},
    "health": {
        "interval_seconds": 3600.0,
        "timeout_seconds": 60.0,
        "changing_interval_seconds": 3600.0,
        "transfer_interval_seconds": 0.0,
    },
    "layerwise": {"host": "127.0.0.1"},
    "kv": {"skip_prefill": False},  # prompts of tests are short, and simulated prefills take no time
}


class LeavingClient:
    """A request whose client may disconnect before the answer."""

    def __init__(self, task: asyncio.Task[None], received: bytearray) -> None:
        self._task = task
        self._received = received

    async def has_tokens(self, count: int) -> None:
        """Wait until this number of events with content has arrived."""
        await until(lambda: self._received.count(b'"finish_reason":null,') >= count, f"{count} tokens")

    async def leave(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@dataclass
class Deployment:
    """Engines, gateway and client.

    `expects_pinned` is the expected amount of KV that remains pinned although the gateway releases all it can. PinnedKv
    must count it.
    """

    prefillers: list[SimulatedEngine]
    decoders: list[SimulatedEngine]
    worker: Worker
    scoreboard: Scoreboard
    roster: Roster
    sources: SourceStates
    url: str
    session: aiohttp.ClientSession
    stop_accepting: Callable[[], Awaitable[None]]
    end: Callable[[], Awaitable[None]]
    """Stop the gateway before the engines and the clients."""
    expects_pinned: int = 0
    may_stay_pinned: int = 0
    """Amount of KV that may also remain pinned, depending on timing."""
    expects_inexact_pins: bool = False
    """Releases may fail, because KV had been fetched, or clients left during a prefiller's answer."""
    legs_with_kv_names: int = 1
    """Requests to `decoders` that may name the same KV: two if they also prefill with SGLang."""
    expects_resent: bool = False
    """Engines reset idle connections, as if they had not received a request."""
    problems: list[str] = field(default_factory=list)
    """Errors in callbacks, and tracebacks in the log."""

    @property
    def engines(self) -> list[SimulatedEngine]:
        return [*self.prefillers, *self.decoders]

    async def ask(self, body: dict[str, Any], **headers: str) -> Answer:
        """Send a request through the gateway, and read the whole answer."""
        return await ask(self.session, self.url, body, **headers)

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the nonzero samples of a metric, by label values in the order of names.

        Recorded metrics are read alone, because collecting all takes longer than an answer.
        """
        metrics = self.worker.metrics
        recorded = getattr(metrics, name.removeprefix("pdproxy_"), None)
        families = metrics.collect() if recorded is None or "_instance_" in name else recorded.collect()
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for family in families
            if name.startswith(family.name)
            for sample in family.samples
            if sample.name == name and sample.value
        }

    @asynccontextmanager
    async def asking(self, body: dict[str, Any]) -> AsyncIterator[LeavingClient]:
        """Send a request from a client that disconnects at the end of the block at the latest."""
        received = bytearray()

        async def client() -> None:
            url = self.url + api_of(body).path
            async with aiohttp.ClientSession() as session, session.post(url, data=orjson.dumps(body)) as response:
                async for part in response.content.iter_any():
                    received.extend(part)

        leaving = LeavingClient(asyncio.create_task(client()), received)
        try:
            yield leaving
        finally:
            await leaving.leave()

    def leaks(self) -> list[str]:
        """Return state that ended requests have left behind."""
        board = self.scoreboard
        found = [
            f"slot {slot} of the scoreboard holds {board.open_leases(slot)} requests and {board.load_of(slot)}"
            for slot in range(board.slot_count)
            if board.open_leases(slot) or board.load_of(slot) != Load()
        ]
        if busy := self.worker.upstream.busy_connections:
            found.append(f"{busy} connections to engines are busy")
        if in_flight := self.worker.drain_manager.in_flight_count:
            found.append(f"{in_flight} requests are in flight")
        found += [
            f"the engine {engine.url} works on {engine.state.live} requests"
            for engine in self.engines
            if engine.state.live
        ]
        found += [
            f"{engine.state.waiting_rooms} legs wait for their partners in {engine.url}"
            for engine in self.engines
            if engine.state.waiting_rooms
        ]
        if pending := self.worker.releaser.pending_count:
            found.append(f"{pending} releases of KV are pending")
        found += self._pins_left()
        found += [f"a task of the gateway runs: {task!r}" for task in asyncio.all_tasks() if _serves_a_request(task)]
        return found

    def _pins_left(self) -> list[str]:
        """Check that the orphaned KV is as expected, and that PinnedKv counts it."""
        found = []
        pins = [pin for engine in self.engines for pin in engine.pins]
        if not self.expects_pinned <= len(pins) <= self.expects_pinned + self.may_stay_pinned:
            found.append(f"KV stays pinned for {pins}, while {self.expects_pinned} were expected")
        entries = self.worker.pinned_kv.current_pins()
        simulated = {(engine.host, engine.port) for engine in self.engines if isinstance(engine, SimulatedEngine)}
        possible = [entry for entry in entries if (entry.backend.host, entry.backend.port) in simulated]
        known = sum(not entry.is_suspected for entry in possible)
        if not known <= len(pins) <= len(possible) and not self.expects_inexact_pins:
            found.append(f"KV stays pinned for {pins}, while PinnedKv has {possible}")
        published = sum(self.scoreboard.pinned_kv(slot).cache_count for slot in range(self.scoreboard.slot_count))
        if published != len(entries):
            found.append(f"the scoreboard has {published} pins, and PinnedKv {entries}")
        return found

    def broken_promises(self) -> list[str]:
        """Return violations: an attempt's id or KV parameters used twice, and unexpected errors."""
        most = self.legs_with_kv_names
        handed_over = Counter(name for request in generations(*self.decoders) for name in _kv_names(request))
        sent = Counter(
            (request.headers.get("x-request-id", ""), engine.url)
            for engine in self.engines
            for request in generations(engine)
        )
        read_back = Counter(filter(None, map(_read_back_name, generations(*self.prefillers))))
        return [
            *(f"KV {name} was sent to prefillers {times} times" for name, times in read_back.items() if times > 1),
            *(f"KV {name} was sent to decoders {times} times" for name, times in handed_over.items() if times > most),
            *(
                f"attempt {name} was sent to {url} {times} times"
                for (name, url), times in sent.items()
                if times > 1 and not self.expects_resent
            ),
            *self.problems,
        ]


def generations(*engines: SimulatedEngine) -> list[RecordedRequest]:
    """Return the generation requests of engines, without health checks and releases."""
    paths = {api.path for api in OPENAI_APIS}
    return [
        request
        for engine in engines
        for request in engine.requests
        if request.path in paths and not _is_release(request) and not _is_question(request)
    ]


def releases(*engines: SimulatedEngine) -> list[RecordedRequest]:
    """Return the requests that engines reject to release KV."""
    return [request for engine in engines for request in engine.requests if _is_release(request)]


def _is_release(request: RecordedRequest) -> bool:
    return isinstance(request.body, dict) and request.body.get("model") == RELEASE_MODEL


def _is_question(request: RecordedRequest) -> bool:
    """Return whether a request is the probe that SGLang rejects at its start."""
    return isinstance(request.body, dict) and request.body.get("temperature") == -1


def kv_params(request: RecordedRequest) -> Any:
    """Return the KV parameters of a decode request that fetches KV, or None."""
    params = request.body.get("kv_transfer_params") if isinstance(request.body, dict) else None
    return params if params and params.get("do_remote_prefill") else None


def _read_back_name(request: RecordedRequest) -> object:
    """Return the name of the answer whose KV a prefill request reads from a decoder, or None."""
    params = request.body.get("kv_transfer_params") if isinstance(request.body, dict) else None
    return params.get("remote_request_id") if params and params.get("remote_block_ids") else None


def _kv_names(request: RecordedRequest) -> list[object]:
    """Return the identifiers of the KV that a decode request fetches. Each is valid once."""
    params = kv_params(request) or {}
    rooms = request.body.get("bootstrap_room") if isinstance(request.body, dict) else None
    names = [
        params.get("remote_request_id"),
        params.get("transfer_id"),
        *(rooms if isinstance(rooms, list) else [rooms]),
    ]
    return [name for name in names if name is not None]


def _serves_a_request(task: asyncio.Task[Any]) -> bool:
    """Return whether a task serves a request: one of the fan-out, or an orphan. Others are aiohttp's handlers."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and any(part in code.co_filename for part in ("/proxy/gateway/", "/proxy/connectors/"))


class _Problems(logging.Handler):
    """Collects tracebacks in the log and errors in callbacks."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        problem = self.format(record)
        if "/proxy/sim/" not in problem:  # engines may log errors about disconnected clients
            self._problems.append(problem)

    def caught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._problems.append(f"the event loop caught {context}")


def engine_options(connector: str, store: Callable[[], Path]) -> dict[str, Any]:
    """Return the options of simulated engines for a connector.

    `store` creates the directory of a KV store, if needed.
    """
    if connector == "vllm_store":
        return {"protocol": "store", "store": str(store())}
    return {
        "sglang_bootstrap": {"profile_name": "sglang"},
        "ascend_layerwise": {"protocol": "layerwise"},
        "mooncake_bootstrap": {"protocol": "transfer"},
        "nixl_push": {"protocol": "push"},
    }.get(connector, {})


def _settings(prefillers: Sequence[Engine], decoders: Sequence[Engine], sections: Mapping[str, Any]) -> Settings:
    tree: dict[str, Any] = {
        "prefill": [_endpoint(engine) for engine in prefillers],
        "decode": [_endpoint(engine) for engine in decoders],
        **sections,
    }
    if "elastic" in sections:  # all engines are elastic
        everybody = [_endpoint(engine) for engine in (*prefillers, *decoders)]
        tree["elastic"] = {"instances": everybody, **sections["elastic"]}
        tree["decode"] = [address.partition(" ")[0] for address in tree["decode"]]
    for name, defaults in _SETTINGS.items():
        tree[name] = defaults | sections.get(name, {})
    return Settings.model_validate(tree)


def _endpoint(engine: Engine) -> str:
    """Return an engine's address in a configuration, with its bootstrap port."""
    port = getattr(engine, "bootstrap_port", None)
    return f"{engine.host}:{engine.port}" + (f" {port}" if port else "")


def _shared(settings: Settings) -> SharedState:
    """Return the shared state that a supervisor creates, on any free port."""
    scoreboard = Scoreboard(slots=32, guests=settings.replicas.guest_rows)
    prefill, decode = (
        [(each.host, each.port, each.bootstrap_port, each.models, each.tls) for each in settings.instances_of(role)]
        for role in ("prefill", "decode")
    )
    elastic = {each.place for each in settings.elastic.instances}
    roster = Roster(prefill, decode, scoreboard, elastic=elastic)
    loaded = LoadedSettings(settings, {}, tls=load_tls(settings))
    callbacks = [socket.create_server(("127.0.0.1", 0))] if settings.connector == "ascend_layerwise" else []
    listeners = ListeningSockets(socket.create_server(("127.0.0.1", 0)), callbacks=callbacks)
    return SharedState(
        configuration=SharedConfiguration(loaded, lambda: loaded, roster),
        listeners=listeners,
        scoreboard=scoreboard,
        roster=roster,
        key_usage=KeyUsage(guest_rows=settings.replicas.guest_rows),
        queue_heads=QueueHeads(guests=settings.replicas.guest_rows),
        journal=Journal(1 + settings.replicas.guest_rows, write_only_rings=settings.kv_events.journal_rings),
        request_receipts=Receipts(bytes_per_worker=settings.admin.receipts_bytes),
    )


@asynccontextmanager
async def deployed(
    prefillers: list[Engine],
    decoders: list[Engine],
    *,
    settle_seconds: float = 0.01,
    hearing_seconds: float = 0.2,
    knows_push_engines: bool = True,
    **sections: Any,
) -> AsyncIterator[Deployment]:
    """Start engines and a gateway, and check at the end that nothing is left.

    Args:
      settle_seconds: Time before orphaned KV is released.
      hearing_seconds: Time that a request suspected as poison waits for exonerating evidence.
      knows_push_engines: Whether connector nixl_push knows the engines of prefillers, as after their first answers.
      sections: Settings.
    """
    tasks_before = asyncio.all_tasks()
    # Of several concurrent deployments, the first one is checked for all.
    is_first = tasks_before == {asyncio.current_task()}
    problems: list[str] = []
    watcher = _Problems(problems)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(watcher.caught)
    logging.getLogger().addHandler(watcher)
    try:
        async with AsyncExitStack() as stack:
            for engine in (*prefillers, *decoders):
                await stack.enter_async_context(engine)
            settings = _settings(prefillers, decoders, sections)
            shared = _shared(settings)
            connector = aiohttp.TCPConnector(ssl=False)  # a test of certificates has its own session
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            gateway = await stack.enter_async_context(AsyncExitStack())
            worker = await gateway.enter_async_context(build_worker(shared, settle_seconds=settle_seconds))
            worker.lanes.whole_lane.request_service.suspects.hearing_seconds = hearing_seconds
            doors = await gateway.enter_async_context(listening(worker, shared.listeners))
            scheme = "http" if settings.listen.tls_certificate is None else "https"
            url = f"{scheme}://127.0.0.1:{shared.listeners.clients.getsockname()[1]}"
            deployment = Deployment(
                cast("list[SimulatedEngine]", prefillers),
                cast("list[SimulatedEngine]", decoders),
                worker,
                shared.scoreboard,
                shared.roster,
                shared.source_states,
                url,
                session,
                doors.stop_accepting,
                end=gateway.aclose,
                problems=problems,
            )
            await until(lambda: _all_are_up(deployment), "the first health checks")
            if knows_push_engines:
                _introduce_push_engines(deployment)
            yield deployment
            left = await _settled(deployment.leaks)
            left += deployment.broken_promises()
        left += await _settled(
            lambda: [
                f"task left behind: {task!r}"
                for task in asyncio.all_tasks() - tasks_before - {asyncio.current_task()}
                if is_first
            ]
        )
    finally:
        logging.getLogger().removeHandler(watcher)
        loop.set_exception_handler(None)
    if left:
        pytest.fail("the gateway left something behind:\n  " + "\n  ".join(left), pytrace=False)


def _introduce_push_engines(deployment: Deployment) -> None:
    """Let a nixl_push connector learn the engines of its prefillers, so that its first legs run at once, too."""
    connector = deployment.worker.lanes.whole_lane.connector
    if not isinstance(connector, NixlPush):
        return
    for engine in deployment.prefillers:
        (backend,) = (each for each in deployment.worker.pools.prefill.all_backends() if each.port == engine.port)
        engine_id = engine.core.protocol.describe()["engine_id"]
        connector.places.learn(backend, 0, EnginePlace(engine_id, engine.host, engine.port, 1, "before"))


async def _settled(find: Callable[[], list[str]]) -> list[str]:
    """Return leaks that remain after a while. The end of a connection takes a moment to be noticed."""
    with suppress(AssertionError):
        await until(lambda: not find(), "quiet", _QUIET_WITHIN_SECONDS)
    return find()


def _all_are_up(deployment: Deployment) -> bool:
    """Return whether every engine passed the first health check, and reported its version if it has one."""
    pools = deployment.worker.pools
    health = deployment.worker.health
    everybody = [pool for pool in (pools.prefill, pools.decode, pools.encode) if pool is not None]
    confirmed = sum(
        health.health_of(backend).is_confirmed_healthy for pool in everybody for backend in pool.all_backends()
    )
    versions = [
        pool.engine_version_of(backend) for pool in (pools.prefill, pools.decode) for backend in pool.all_backends()
    ]
    told = sum(version is not None for version in versions)
    tell = sum(isinstance(engine, SimulatedEngine) for engine in deployment.engines)
    return told >= tell and confirmed == len(deployment.engines)
