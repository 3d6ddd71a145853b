"""Small real servers to probe, and the parts of a prober and a joiner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.balancer.engines import EngineKeys
from proxy.balancer.health import Health, Transition
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Role
from proxy.fleet.discovery.joining import InstanceJoiner
from proxy.fleet.discovery.prober import HealthProber, ProberParts
from proxy.observe.metrics import Metrics
from proxy.settings import HealthChecks, Joining, Timeouts
from proxy.upstream import EngineClient, Upstream
from tests.pools import make_pool

HOST = "127.0.0.1"


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. The time limit of the test ends the wait."""
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.001)


class Engine:
    """An engine that answers GET requests with `status`, and records the requests.

    It serves /health, /version and /v1/models, and also /server_info and /metrics if `answers` has them.
    """

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.seen: list[tuple[str, str | None]] = []
        self.answers: dict[str, object] = {
            "/version": {"version": "0.18.1"},
            "/v1/models": {"data": [{"id": "kimi", "max_model_len": 4096}]},
        }
        self.asked = asyncio.Event()
        app = web.Application()
        app.add_routes([web.get(path, self._answer) for path in ("/health", "/version", "/v1/models")])
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/metrics", self._metrics)
        self.server = TestServer(app, host=HOST)

    async def _server_info(self, request: web.Request) -> web.Response:
        assert request.query_string == "config_format=json"
        if request.path not in self.answers:
            raise web.HTTPNotFound
        return await self._answer(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        if request.path not in self.answers:
            raise web.HTTPNotFound
        self.seen.append((request.path, request.headers.get("Authorization")))
        return web.Response(text=str(self.answers[request.path]), status=self.status)

    async def _answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, request.headers.get("Authorization")))
        self.asked.set()
        return web.json_response(self.answers.get(request.path), status=self.status)

    @property
    def port(self) -> int:
        assert self.server.port is not None
        return self.server.port


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.Response]], *paths: str) -> AsyncIterator[int]:
    """Run an engine whose GET requests at these paths are answered by `answer`, and yield its port."""
    app = web.Application()
    app.add_routes([web.get(path, answer) for path in paths])
    async with TestServer(app, host=HOST) as server:
        assert server.port is not None
        yield server.port


@asynccontextmanager
async def silent_engine() -> AsyncIterator[int]:
    """Run an engine that accepts connections and answers nothing, and yield its port."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


class Gateway:
    """The parts of a prober as in a worker, with short intervals."""

    def __init__(
        self,
        prefill: Sequence[int],
        decode: Sequence[int] = (),
        *,
        interval_seconds: float = 0.01,
        timeout_seconds: float = 5.0,
        joining_attempts: int = 3,
        joining_interval_seconds: float = 0.01,
    ) -> None:
        self.scoreboard = Scoreboard(slots=max(8, len(prefill) + len(decode)))
        self.roster = Roster([(HOST, port) for port in prefill], [(HOST, port) for port in decode], self.scoreboard)
        self.health = Health(lambda: HealthChecks(fall=3, rise=2))
        self.transitions: asyncio.Queue[Transition] = asyncio.Queue()
        row = self.scoreboard.load_row(0)
        self.pools = {
            role: make_pool(role, self.roster, self.scoreboard, load_row=row, health=self.health) for role in Role
        }
        self.checks = HealthChecks(
            interval_seconds=interval_seconds, changing_interval_seconds=0.01, timeout_seconds=timeout_seconds
        )
        self.settings = Joining(max_attempts=joining_attempts, interval_seconds=joining_interval_seconds)
        self.keys = EngineKeys("s3cret")
        self.restarts = Metrics().background_restarts_total

    @asynccontextmanager
    async def prober(
        self, client: EngineClient, fresh_client: EngineClient | None = None
    ) -> AsyncIterator[HealthProber]:
        """Run a prober."""
        async with Upstream(Timeouts(), self.keys) as upstream, self.make_prober(upstream, client, fresh_client) as it:
            yield it

    def make_prober(
        self, upstream: Upstream, client: EngineClient, fresh_client: EngineClient | None = None
    ) -> HealthProber:
        parts = ProberParts(
            pools=self.pools,
            roster=self.roster,
            health=self.health,
            upstream=upstream,
            engine_client=client,
            fresh_client=fresh_client or client,
            engine_headers=self.keys.credential_headers,
            on_transition=self.transitions.put_nowait,
            restart_counter=self.restarts,
        )
        return HealthProber(parts, lambda: self.checks)

    @asynccontextmanager
    async def joining(self, client: EngineClient) -> AsyncIterator[InstanceJoiner]:
        """Run a joiner that announces joined instances to a prober."""
        async with (
            self.prober(client) as prober,
            InstanceJoiner(
                self.pools,
                self.roster,
                lambda: self.settings,
                client,
                self.keys.credential_headers,
                prober.on_backend_joined,
            ) as joiner,
        ):
            yield joiner

    def names(self, role: Role) -> list[str]:
        return [backend.name for backend in self.pools[role].all_backends()]
