"""The routes over a real balancer, with small real servers as engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.api.credentials import KeyAuth
from proxy.api.questions import QuestionParts
from proxy.balancer.blame import SuspectMemory
from proxy.balancer.engines import EngineKeys
from proxy.balancer.health import Health, HealthBoard
from proxy.balancer.incompatibilities import Incompatibilities
from proxy.balancer.models import ServedModels
from proxy.balancer.pick import PickRequest
from proxy.balancer.pool import Pools
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.connectors.base import Connector
from proxy.connectors.legs import Attempt
from proxy.dialects.call import Call
from proxy.fleet.discovery.joining import InstanceJoiner
from proxy.fleet.discovery.prober import HealthProber, ProberParts
from proxy.gateway.api_keys import ApiKeys, KeyUsage, assign_slots
from proxy.gateway.detokenizer import Detokenizer
from proxy.gateway.lanes import Lane, Lanes
from proxy.gateway.suspects import Suspects
from proxy.gateway.work import RequestService
from proxy.listener import replies
from proxy.observe.metrics import Metrics, render_exposition
from proxy.observe.timeline import Timeline
from proxy.settings import ClientKey, HealthChecks, Joining, Settings, Timeouts
from proxy.settings.live import LiveSettings
from proxy.upstream import EngineClient, Upstream
from tests.pools import make_pool

if TYPE_CHECKING:
    from proxy.gateway.lanes import Serving

HOST = "127.0.0.1"
_NO_INSTANCES = Settings()


def team_key() -> ApiKeys:
    """Return client keys with the key `client` of `team`."""
    api_keys = ApiKeys(KeyUsage())
    digest = hashlib.sha256(b"client").hexdigest()
    api_keys.replace_keys([ClientKey(name="team", key_sha256=digest)], assign_slots(["team"], {}))
    return api_keys


async def never(request: web.Request) -> web.Response:
    """Answer nothing."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@dataclass
class Asked:
    """One request as an engine saw it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Engine:
    """Serves every path with `answer`, and remembers what it was asked."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    asked: list[Asked] = field(default_factory=list)
    port: int = 0

    @property
    def name(self) -> str:
        return f"{HOST}:{self.port}"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(Asked(request.method, request.path, request.query_string, headers, await request.read()))
        return await self.answer(request)


class NoConnector(Connector):
    """Nothing is generated here: it only has roles."""

    def __init__(self, roles: Collection[Role]) -> None:
        self.roles = tuple(roles)

    def open_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        raise AssertionError("nothing is generated")


class Gateway:
    """The parts below the routes, as a worker puts them together."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.scoreboard = Scoreboard(slots=8)
        self.roster = Roster([], [], self.scoreboard)
        self.health = Health(lambda: HealthChecks(fall=1, rise=1, slow_start_seconds=0))
        self.health_board = HealthBoard(worker_count=3, slot_count=8)
        self.incompatibilities = Incompatibilities(slots=8)
        row = self.scoreboard.load_row(0)
        self.metrics = Metrics()
        self.pools = {
            role: make_pool(
                role,
                self.roster,
                self.scoreboard,
                policy="round_robin",
                load_row=row,
                health=self.health,
                on_lease_end=self._count,
            )
            for role in (Role.PREFILL, Role.DECODE)
        }
        self.metrics.watch_instances(self.pools.values(), self.scoreboard, self.health, self.incompatibilities)
        self.engine_client: EngineClient
        self.prober: HealthProber
        self.joiner: InstanceJoiner

    def _count(self, backend: Backend, result: str) -> None:
        self.metrics.instance_requests_total.labels(backend.role, backend.name, result).inc()

    async def start(self) -> None:
        self.engine_client = await self._stack.enter_async_context(EngineClient())
        # Probes are for the prober's own tests: here they come once, so that tests set the health themselves.
        checks = HealthChecks(interval_seconds=3600, changing_interval_seconds=3600)
        joining = Joining(max_attempts=1)
        upstream = await self._stack.enter_async_context(Upstream(Timeouts(), self.keys()))
        parts = ProberParts(
            pools=self.pools,
            roster=self.roster,
            health=self.health,
            upstream=upstream,
            engine_client=self.engine_client,
            fresh_client=self.engine_client,
            engine_headers=self.keys().credential_headers,
            restart_counter=self.metrics.background_restarts_total,
        )
        self.prober = await self._stack.enter_async_context(HealthProber(parts, lambda: checks))
        self.joiner = await self._stack.enter_async_context(
            InstanceJoiner(
                self.pools,
                self.roster,
                lambda: joining,
                self.engine_client,
                self.keys().credential_headers,
                self.prober.on_backend_joined,
            )
        )
        await asyncio.sleep(0)  # its first round, without instances

    async def engine(
        self, role: Role | None, answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    ) -> Engine:
        """Start one more engine; with a role it is a backend, and well."""

        async def empty(_: web.Request) -> web.Response:
            return web.Response()

        engine = Engine(answer or empty)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", engine.serve)
        server = await self._stack.enter_async_context(TestServer(app, host=HOST))
        assert server.port is not None
        engine.port = server.port
        if role is not None:
            self.add(role, HOST, engine.port)
        return engine

    def add(self, role: Role, host: str, port: int, *, healthy: bool = True, **details: Any) -> None:
        self.roster.add_for_administrator(Backend(role, host, port, **details))
        (backend,) = (b for b in self.pools[role].all_backends() if (b.host, b.port) == (host, port))
        self.health.on_probe(
            backend, healthy, "passed its health check" if healthy else "cannot connect (connection refused)"
        )

    def lanes(self, settings: Settings = _NO_INSTANCES, roles: Collection[Role] = (Role.PREFILL, Role.DECODE)) -> Lanes:
        """Return the lane of all instances. `roles`: the roles of its connector."""

        def make(serving: Serving) -> Lane:
            raise AssertionError("there is one lane")

        pools = Pools(prefill=self.pools[Role.PREFILL], decode=self.pools[Role.DECODE])
        suspects = Suspects(SuspectMemory(), pools, tuple(roles), self.prober.is_backend_gone, self.metrics)
        connector, detokenizer = NoConnector(roles), Detokenizer(pools, Upstream(settings.timeouts, self.keys()))
        flow = RequestService(
            live_settings=LiveSettings(settings),
            connector=connector,
            pools=pools,
            detokenizer=detokenizer,
            suspects=suspects,
            is_engine_gone=self.prober.is_backend_gone,
            metrics=self.metrics,
        )
        models = ServedModels(self.roster, self.health, tuple(roles))
        return Lanes(models, Lane(flow), make, settings, self.prober.refresh_models)

    def keys(self, key: str | None = None, trusted: Sequence[tuple[str, int]] = ()) -> EngineKeys:
        """Keys for these backends, which from now on stand in the roster as trusted."""
        for role, pool in self.pools.items():
            for backend in pool.all_backends():
                if (backend.host, backend.port) in trusted:
                    self.roster.remove_backend(role, backend.host, backend.port)
                    self.roster.drop_drained_backends()
                    self.add(role, backend.host, backend.port, is_trusted=True)
        return EngineKeys(key)

    def questions(self, keys: EngineKeys | None = None, callers: ApiKeys | None = None) -> QuestionParts:
        """Return the parts of routes that query engines. `callers`: the client keys; None: there are none."""
        return QuestionParts(
            engine_client=self.engine_client,
            engine_keys=keys or self.keys(),
            key_auth=KeyAuth(callers or ApiKeys(KeyUsage())),
            metrics=self.metrics,
        )

    async def serve(self, routes: Sequence[web.RouteDef], **options: Any) -> TestClient[web.Request, web.Application]:
        """Return a client of a gateway with these routes. `options`: see web.Application."""
        app = web.Application(**options)
        replies.install_replies(app, self.metrics)
        app.add_routes(routes)
        server = TestServer(app, host=HOST)
        return await self._stack.enter_async_context(TestClient(server))

    def books(self) -> set[tuple[int, Load]]:
        """Return the loads of all slots, which are {(0, Load())} if there is none."""
        return {
            (self.scoreboard.open_leases(slot), self.scoreboard.load_of(slot))
            for slot in range(self.scoreboard.slot_count)
        }

    def metric_lines(self) -> list[str]:
        return render_exposition(self.metrics.collect(), "")[0].decode().splitlines()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        gateway = Gateway(stack)
        await gateway.start()
        yield gateway
        assert gateway.books() == {(0, Load())}
