"""A simulated engine, in this process (`SimulatedEngine`) or as a program (`pdproxy mock-engine`).

It has the HTTP interface of an engine, and transfers KV to other simulated engines over real sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import uvloop
from aiohttp import web

from proxy.sim.engine.cli import parse_arguments
from proxy.sim.engine.control import ControlRoutes
from proxy.sim.engine.core import EngineCore, EngineMetrics
from proxy.sim.engine.encoder_cache import EncoderCache
from proxy.sim.engine.faults import Faults
from proxy.sim.engine.pooling import PoolingRoutes
from proxy.sim.engine.scheduler import MachineCache, MachineScheduler, Scheduler
from proxy.sim.engine.server import GenerationRoutes
from proxy.sim.engine.sglang_control import SglangRoutes
from proxy.sim.engine.stream import reset_transport
from proxy.sim.kv.bootstrap import DEFAULT_PORT, BootstrapProtocol
from proxy.sim.kv.cache import Pin, PrefixCache
from proxy.sim.kv.layerwise import LayerwiseProtocol
from proxy.sim.kv.protocol import KvProtocol, NoProtocol, StoreProtocol
from proxy.sim.kv.pull import PullProtocol
from proxy.sim.kv.push import PushProtocol
from proxy.sim.kv.transfer import TransferProtocol
from proxy.sim.options import AtSigterm, Options, ProtocolName
from proxy.sim.state import Condition, EngineState, RecordedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from proxy.sim.engine.kv_events import KvEventPublisher

PROTOCOLS: dict[ProtocolName, Callable[[Options, EngineState, Callable[[], tuple[str, int]]], KvProtocol]] = {
    "pull": PullProtocol,
    "bootstrap": BootstrapProtocol,
    "layerwise": LayerwiseProtocol,
    "push": PushProtocol,
    "transfer": TransferProtocol,
    "store": StoreProtocol,
    "none": NoProtocol,
}
"""The KV transfer protocols by name. To add a protocol, add a file and a line here."""

_MAX_BODY_BYTES = 256 * 1024 * 1024
_SHUTDOWN_SECONDS = 10.0
"""Time limit in seconds for running answers after SIGTERM."""


class SimulatedEngine:
    """A simulated engine on the current event loop. It serves from `__aenter__` to `__aexit__`.

    Options are given by name (see `Options`). `state` counts events, `pins` is the KV kept for decoders, and `faults`
    makes requests fail. `__aexit__` ends all tasks and closes all sockets.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        options: Options | None = None,
        on_kill: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        self.host = host
        self.port = port
        self.options = dataclasses.replace(options or Options(), **fields)
        self.bootstrap_port: int | None = None
        """The port at which decoders ask this prefiller while it runs; None if its protocol has none."""
        self.state = EngineState()
        self.faults = Faults()
        self._role_at_start = self.options.role
        self.kv_events: KvEventPublisher | None = None
        """The publisher of KV events while the engine runs; None if the engine publishes none."""
        self._runner: web.AppRunner | None = None
        self._core: EngineCore | None = None
        self._generations: GenerationRoutes | None = None
        self._killing: asyncio.Task[None] | None = None
        self._reserved: dict[int, socket.socket] = {}
        self._on_kill = on_kill or self._kill_soon

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def core(self) -> EngineCore:
        assert self._core is not None, "the engine is not running"
        return self._core

    @property
    def pins(self) -> dict[str, Pin]:
        """The KV that the engine keeps for decoders, by remote request ID."""
        protocol = self._core.protocol if self._core is not None else None
        return protocol.pins if protocol is not None else {}

    @property
    def requests(self) -> list[RecordedRequest]:
        return list(self.state.requests)

    @property
    def is_running(self) -> bool:
        return self._core is not None

    async def wait_until(self, condition: Condition, timeout_seconds: float = 60.0) -> None:
        """Wait for a condition on `state`. It is tested again after each change of the state."""
        await self.state.wait_until(condition, timeout_seconds)

    @contextmanager
    def held(self, *, prefills: bool = False) -> Iterator[None]:
        """Hold back all tokens after the first of each sequence within the block.

        `prefills`: hold back first tokens, too.
        """
        scheduler = self.core.scheduler
        assert isinstance(scheduler, Scheduler)
        scheduler.hold(prefills=prefills)
        try:
            yield
        finally:
            scheduler.go_on()

    async def start(self) -> None:
        scheduler, cache = self._make_scheduler_and_cache()
        scheduler.start()
        self.kv_events = self._make_kv_event_publisher()
        if self.kv_events is not None:
            self.kv_events.start()
            cache.watch(self.kv_events)
        self._core = EngineCore(
            options=self.options,
            state=self.state,
            faults=self.faults,
            scheduler=scheduler,
            cache=cache,
            metrics=EngineMetrics(self.options.model),
            protocol=PROTOCOLS[self.options.kv_protocol](self.options, self.state, self._kv_address),
            encoder_cache=EncoderCache(self.options, self.state),
            kv_events=self.kv_events,
        )
        self._runner = web.AppRunner(
            self._make_application(self._core),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=2.0,
            keepalive_timeout=self.options.keep_alive_seconds,
        )
        await self._runner.setup()
        self.port = await self._listen_on_port(self._runner, self.port)
        if self._core.protocol.has_bootstrap_port and (self.options.role != "decode" or self.options.pd_role_switch):
            self.bootstrap_port = await self._listen_on_port(
                self._runner, self.bootstrap_port or self.options.bootstrap_port
            )

    def _make_scheduler_and_cache(self) -> tuple[Scheduler, PrefixCache] | tuple[MachineScheduler, MachineCache]:
        options = self.options
        if options.shape is None:
            return Scheduler(options, self._on_step), PrefixCache(options.block_size, options.num_gpu_blocks)
        scheduler = MachineScheduler(options, options.shape, self._on_step)
        return scheduler, MachineCache(scheduler.batch, options.block_size)

    def _make_kv_event_publisher(self) -> KvEventPublisher | None:
        if self.options.kv_events_config is None:
            return None
        # Late, because only this needs the extra.
        from proxy.sim.engine.kv_events import KvEventPublisher

        return KvEventPublisher(self.options, self.kv_events)

    def _make_application(self, core: EngineCore) -> web.Application:
        control = ControlRoutes(core)
        generations = self._generations = GenerationRoutes(core, self._on_kill)
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[control.guard_request])
        pooling = PoolingRoutes(core)
        app.add_routes([*control.routes(), *pooling.routes()])
        if self.options.profile.is_sglang:
            app.add_routes(SglangRoutes(core, generations, self._configured_bootstrap_port).routes())
        else:
            app.add_routes([*control.routes_of_vllm(), *pooling.routes_of_vllm()])
        app.add_routes(core.protocol.routes())
        app.add_routes([*generations.routes(), *core.encoder_cache.routes()])
        app.on_response_prepare.append(control.add_date_header)
        app.on_cleanup.append(generations.stop)
        app.on_cleanup.append(core.encoder_cache.stop)
        return app

    def _configured_bootstrap_port(self) -> int:
        """Return the bootstrap port in the engine's configuration. It has one even if it does not listen there."""
        return self.bootstrap_port or self.options.bootstrap_port or DEFAULT_PORT

    async def _listen_on_port(self, runner: web.AppRunner, port: int) -> int:
        """Serve on a port and return it. Port 0 means any free port."""
        port = self._reserve_port(port)
        await web.TCPSite(runner, self.host, port, backlog=4096, reuse_address=True).start()
        return port

    def _reserve_port(self, port: int) -> int:
        """Bind a port without listening and return it. Port 0 means any free port.

        A killed engine refuses connections, and no other process gets its port until it starts again.
        """
        if port not in self._reserved:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
            reserved = socket.socket(family, kind, protocol)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind(address)
            except OSError:
                reserved.close()
                raise
            port = int(reserved.getsockname()[1])
            self._reserved[port] = reserved
        return port

    async def kill(self) -> None:
        """End like a crash: reset every connection, close the port (but keep it bound), and drop all pins."""
        core, runner = self._core, self._runner
        self._core = self._runner = None
        if core is None or runner is None:
            return
        self.state.kills += 1
        self.options.switch_role(self._role_at_start)
        core.scheduler.stop()
        self._abort_connections(runner)
        await core.protocol.stop()
        if core.kv_events is not None:
            await core.kv_events.stop()
        await runner.cleanup()
        # Transports tell their protocols of their end in the next turn.
        await asyncio.sleep(0)
        self.state.pinned = 0
        self.state.notify_waiters()

    async def stop(self, how: AtSigterm) -> None:
        """Stop as vLLM 0.32 does at SIGTERM to its API server, or at the death of its engine core.

        The port is closed, and so are connections without a request. `kill` or `restart` ends the rest.

        Args:
            how: `silent`: running answers stay open without further data. `abort`: they end with finish_reason `abort`.
                `core-dead`: they end with an error. `exit`: see `kill`.
        """
        if how == "exit":
            await self.kill()
            return
        core, runner = self.core, self._runner
        assert runner is not None
        assert self._generations is not None
        if how == "silent":
            core.scheduler.stop()
        elif how == "abort":
            self._generations.abort("")
        else:
            self._generations.fail()
        for site in list(runner.sites):
            await site.stop()
        if runner.server is not None:
            runner.server.pre_shutdown()

    async def restart(self) -> None:
        """Start again on the same port as a new engine, which has none of the old engine's KV.

        If a fault is killing the engine, wait for its end first. Counters and fault rules are kept.
        """
        await self._end_engine()
        await self.start()

    async def _end_engine(self) -> None:
        killing, self._killing = self._killing, None
        if killing is not None:
            await killing
        await self.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end_engine()
        finally:
            while self._reserved:
                self._reserved.popitem()[1].close()

    def _abort_connections(self, runner: web.AppRunner) -> None:
        for handler in runner.server.connections if runner.server is not None else ():
            if handler.transport is not None:
                reset_transport(handler.transport)

    def _kill_soon(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self.kill())

    def _kv_address(self) -> tuple[str, int]:
        return self.options.kv_host or self.host, self.port

    def _on_step(self, tokens: int) -> None:
        self.state.tokens_generated += tokens
        self.state.notify_waiters()


async def serve_engine(host: str, port: int, options: Options) -> None:
    """Run one engine until SIGINT or SIGTERM. If the options say so, SIGTERM lets running answers end first."""
    stopped, terminated = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    loop.add_signal_handler(signal.SIGTERM, stopped.set if options.at_sigterm == "exit" else terminated.set)
    async with SimulatedEngine(host=host, port=port, options=options, on_kill=lambda: os._exit(1)) as engine:
        bootstrap = f" with bootstrap port {engine.bootstrap_port}" if engine.bootstrap_port else ""
        print(f"simulated {options.role} engine ({options.profile_name}) on {engine.url}{bootstrap}", flush=True)
        if options.at_sigterm != "exit":
            waiting = [asyncio.create_task(event.wait()) for event in (stopped, terminated)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if not stopped.is_set():
                loop.add_signal_handler(signal.SIGTERM, stopped.set)
                await engine.stop(options.at_sigterm)
                if options.at_sigterm != "silent":
                    await engine.wait_until(lambda state: not state.live, _SHUTDOWN_SECONDS)
                    return
        await stopped.wait()


def main(argv: list[str]) -> int:
    host, port, options = parse_arguments(argv)
    try:
        uvloop.run(serve_engine(host, port, options))
    except OSError as error:
        print(f"cannot listen on {host}:{port}: {error}", file=sys.stderr)
        return 1
    return 0
