"""Health probes and questions to small real servers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import UNKNOWN_VERSION, EngineFacts
from proxy.balancer.health import Transition
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.fleet.discovery.prober import log_transition
from proxy.settings import HealthChecks
from proxy.upstream import EngineClient
from tests.fleet.discovery.engines import HOST, Engine, Gateway, answering, silent_engine, until


async def test_one_passed_probe_confirms_a_backend(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    assert not gateway.pools[Role.PREFILL].is_ready_to_serve()
    async with gateway.prober(client):
        transition = await gateway.transitions.get()
    assert (transition.old_state, transition.new_state) == (HealthState.UNKNOWN, HealthState.UP)
    assert gateway.pools[Role.PREFILL].is_ready_to_serve()
    assert engine.seen[0] == ("/health", "Bearer s3cret")


async def test_failing_backend_goes_down_and_comes_up_again(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    async with gateway.prober(client):
        await gateway.transitions.get()
        engine.status, engine.seen = 503, []
        down = await gateway.transitions.get()
        assert (down.new_state, down.reason) == (HealthState.DOWN, "/health answered with status 503")
        assert len(engine.seen) >= 3
        engine.status, engine.seen = 200, []
        up = await gateway.transitions.get()
        assert up.new_state is HealthState.UP
        assert len(engine.seen) >= 2


async def test_refused_connection_is_a_failed_probe(client: EngineClient) -> None:
    gateway = Gateway([unused_port()])
    async with gateway.prober(client):
        transition = await gateway.transitions.get()
    assert (transition.new_state, transition.reason) == (HealthState.DOWN, "cannot connect (connection refused)")


async def test_late_answer_is_a_failed_probe(client: EngineClient) -> None:
    async with silent_engine() as port:
        gateway = Gateway([port], timeout_seconds=0.05)
        async with gateway.prober(client):
            transition = await gateway.transitions.get()
    assert (transition.new_state, transition.reason) == (HealthState.DOWN, "/health did not answer within 0.05 s")


async def test_invalid_host_name_is_a_failed_probe(client: EngineClient) -> None:
    gateway = Gateway([])
    gateway.roster.add_for_administrator(Backend(Role.PREFILL, "a..b", 1))
    async with gateway.prober(client):
        assert (await gateway.transitions.get()).new_state is HealthState.DOWN


async def test_slow_backend_does_not_delay_other_probes(client: EngineClient, engine: Engine) -> None:
    async with silent_engine() as port:
        gateway = Gateway([port, engine.port])
        async with gateway.prober(client):
            await until(lambda: len(engine.seen) > 3)
    assert gateway.transitions.get_nowait().backend.port == engine.port
    assert gateway.transitions.empty()


async def test_drained_backend_is_dropped(
    client: EngineClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = Gateway([engine.port])
    async with gateway.prober(client):
        with gateway.pools[Role.PREFILL].make_lease(PickRequest.make_for_load(Load())):
            assert gateway.roster.remove_backend(Role.PREFILL, HOST, engine.port)
            engine.seen.clear()
            await until(lambda: len(engine.seen) > 1)
            assert gateway.names(Role.PREFILL) == [f"{HOST}:{engine.port}"]
        await until(lambda: not gateway.names(Role.PREFILL))
    assert f"prober: prefill instance {HOST}:{engine.port} is removed" in caplog.messages


async def test_backend_removed_during_its_probe_stays_removed(client: EngineClient) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        arrived.set()
        await go_on.wait()
        return web.Response()

    async with answering(answer, "/health") as port:
        gateway = Gateway([port])
        (backend,) = gateway.pools[Role.PREFILL].all_backends()
        async with gateway.prober(client) as prober:
            await arrived.wait()
            gateway.roster.remove_backend(Role.PREFILL, HOST, port)
            prober.remove_drained_backends()
            go_on.set()
            arrived.clear()
            # Its next probe ends after the old one.
            gateway.roster.add_for_administrator(Backend(Role.DECODE, HOST, port))
            await gateway.transitions.get()
        assert gateway.health.health_of(backend).health_state is HealthState.UNKNOWN


async def test_instance_added_by_another_worker_serves_after_a_passed_probe(
    client: EngineClient, engine: Engine
) -> None:
    gateway = Gateway([unused_port()], interval_seconds=3600)
    pool = gateway.pools[Role.PREFILL]
    (known,) = pool.all_backends()
    gateway.roster.add_for_administrator(Backend(Role.PREFILL, HOST, engine.port))
    _, added = pool.all_backends()
    assert pool.eligible_backends() == (known,)
    async with gateway.prober(client):
        changes = {(change.backend, change.new_state) for change in [await gateway.transitions.get() for _ in range(2)]}
    assert changes == {(known, HealthState.DOWN), (added, HealthState.UP)}
    assert pool.eligible_backends() == (added,)


async def test_backend_that_refused_connections_is_probed_soon(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port, unused_port()], interval_seconds=3600)
    backend, _ = gateway.pools[Role.PREFILL].all_backends()
    async with gateway.prober(client):
        await until(lambda: gateway.health.health_of(backend).engine_facts is not None)
        while not gateway.transitions.empty():
            gateway.transitions.get_nowait()
        gateway.health.forget_backend(gateway.pools[Role.PREFILL].all_backends()[1])
        for _ in range(2):
            gateway.pools[Role.PREFILL].report_outcome(backend, UpstreamError(Failure.CONNECT, backend, "refused"))
        assert gateway.health.health_of(backend).health_state is HealthState.EJECTED
        await until(lambda: gateway.health.health_of(backend).health_state is HealthState.UP)
        await until(lambda: gateway.health.health_of(backend).engine_facts is not None)


async def test_engine_facts_are_requested_once(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    async with gateway.prober(client):
        await until(lambda: gateway.health.health_of(backend).engine_facts == EngineFacts((0, 18), 4096))
        probes = len(engine.seen)
        await until(lambda: len(engine.seen) > probes + 2)
    asked = Counter(path for path, _ in engine.seen)
    assert (asked["/version"], asked["/v1/models"]) == (1, 1)
    assert {authorization for _, authorization in engine.seen} == {"Bearer s3cret"}


async def test_returned_engine_is_asked_for_facts_once_it_is_up(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    async with gateway.prober(client):
        await until(lambda: gateway.health.health_of(backend).engine_facts is not None)
        engine.status = 503
        await until(lambda: not gateway.health.health_of(backend).is_healthy)
        assert gateway.health.health_of(backend).engine_facts is None
        engine.answers["/version"] = {"version": "0.30.0"}
        engine.status, engine.seen = 200, []
        await until(lambda: gateway.health.health_of(backend).engine_facts == EngineFacts((0, 30), 4096))
    asked = Counter(path for path, _ in engine.seen)
    assert (asked["/version"], asked["/v1/models"]) == (1, 1)


async def test_engine_on_probation_is_asked_for_facts(client: EngineClient, engine: Engine) -> None:
    """Its first request ends the probation, and the requests behind it depend on the facts."""
    gateway = Gateway([engine.port, unused_port()])
    pool = gateway.pools[Role.PREFILL]
    backend, other = pool.all_backends()
    async with gateway.prober(client):
        await until(lambda: gateway.health.health_of(backend).engine_facts is not None)
        gateway.health.forget_backend(other)
        for _ in range(5):
            pool.report_outcome(backend, UpstreamError(Failure.BROKEN, backend, "broken"))
        engine.status = 503
        await until(lambda: gateway.health.health_of(backend).health_state is HealthState.DOWN)
        engine.answers["/version"], engine.status = {"version": "0.30.0"}, 200
        await until(lambda: gateway.health.health_of(backend).engine_facts == EngineFacts((0, 30), 4096))
        assert gateway.health.health_of(backend).health_state in (HealthState.EJECTED, HealthState.PROBATION)


async def test_engine_reports_its_maximum_number_of_sequences(client: EngineClient, engine: Engine) -> None:
    engine.answers["/server_info"] = {"internal_states": [{"effective_max_running_requests_per_dp": 8}] * 2}
    gateway = Gateway([engine.port])
    pool = gateway.pools[Role.PREFILL]
    (backend,) = pool.all_backends()
    async with gateway.prober(client):
        await until(lambda: pool.running_limit(backend) == 16)
        assert gateway.health.health_of(backend).engine_facts == EngineFacts((0, 18), 4096, 16, data_parallel_ranks=2)
        probes = len(engine.seen)
        await until(lambda: len(engine.seen) > probes + 2)
    assert [path for path, _ in engine.seen].count("/server_info") == 1


@pytest.mark.parametrize(("kind", "ranks"), [("vllm", 2), ("somebody", None)])
async def test_ranks_of_vllm_are_read_from_metrics_without_server_info(
    client: EngineClient, engine: Engine, kind: str, ranks: int | None
) -> None:
    engine.answers["/v1/models"] = {"data": [{"id": "kimi", "owned_by": kind}]}
    engine.answers["/metrics"] = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 0.0\n' for rank in range(2))
    gateway = Gateway([engine.port])
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    async with gateway.prober(client):
        await until(
            lambda: gateway.health.health_of(backend).engine_facts == EngineFacts((0, 18), data_parallel_ranks=ranks)
        )
        probes = len(engine.seen)
        await until(lambda: len(engine.seen) > probes + 2)
    assert [path for path, _ in engine.seen].count("/metrics") == (ranks is not None)


async def test_limits_of_an_engine_are_forgotten_when_it_goes_down(client: EngineClient) -> None:
    asked, go_on, answers = asyncio.Event(), asyncio.Event(), iter([8, 4])

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/server_info":
            return web.json_response({"version": "0.18.1"})
        limit = next(answers)
        if limit == 8:
            asked.set()
            await go_on.wait()
        return web.json_response({"internal_states": [{"effective_max_running_requests_per_dp": limit}]})

    async with answering(answer, "/health", "/version", "/v1/models", "/server_info") as port:
        gateway = Gateway([port])
        pool = gateway.pools[Role.PREFILL]
        (backend,) = pool.all_backends()
        async with gateway.prober(client):
            await asked.wait()
            for ok in (False, False, False, True, True):
                gateway.health.on_probe(backend, ok, "test")
            await until(lambda: pool.running_limit(backend) == 4)
            go_on.set()
            await until(lambda: not [task for task in asyncio.all_tasks() if "_ask_setup" in repr(task)])
        assert pool.running_limit(backend) == 4


async def test_setup_is_noted_when_models_change_during_the_question(
    client: EngineClient,
) -> None:
    asked, go_on, model = asyncio.Event(), asyncio.Event(), "kimi"

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/server_info":
            asked.set()
            await go_on.wait()
        limit = [{"effective_max_running_requests_per_dp": 8}]
        return web.json_response({"version": "0.18.1", "data": [{"id": model}], "internal_states": limit})

    async with answering(answer, "/health", "/version", "/v1/models", "/server_info") as port:
        gateway = Gateway([port])
        gateway.checks = gateway.checks.model_copy(update={"models_interval_seconds": 0.01})
        pool = gateway.pools[Role.PREFILL]
        (backend,) = pool.all_backends()

        def models() -> frozenset[str]:
            facts = gateway.health.health_of(backend).engine_facts
            return frozenset() if facts is None else facts.identity.models

        async with gateway.prober(client):
            await asked.wait()
            model = "glm"
            await until(lambda: models() == {"glm"})
            go_on.set()
            await until(lambda: pool.running_limit(backend) == 8)
            assert models() == {"glm"}


@pytest.mark.parametrize("says", [None, "no", {"detail": "Not Found"}, {"data": 7, "version": 7}])
async def test_engine_without_facts_is_healthy_and_not_asked_again(
    client: EngineClient, engine: Engine, says: object
) -> None:
    engine.answers = {"/version": says, "/v1/models": says}
    gateway = Gateway([engine.port])
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    async with gateway.prober(client):
        await until(lambda: gateway.health.health_of(backend).engine_facts == EngineFacts(UNKNOWN_VERSION, None))
        probes = len(engine.seen)
        await until(lambda: len(engine.seen) > probes + 2)
    assert gateway.health.health_of(backend).is_confirmed_healthy
    assert [path for path, _ in engine.seen].count("/version") == 1


@pytest.mark.parametrize("path", ["/version", "/v1/models"])
async def test_engine_is_asked_again_when_it_did_not_answer_for_facts(client: EngineClient, path: str) -> None:
    """The engine was busy when it came up."""
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        asked[request.path] += 1
        if request.path == path and asked[path] <= 4:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"version": "0.18.1", "data": [{"id": "kimi", "max_model_len": 4096}]})

    async with answering(answer, "/health", "/version", "/v1/models") as port:
        gateway = Gateway([port])
        (backend,) = gateway.pools[Role.PREFILL].all_backends()
        async with gateway.prober(client):
            pool = gateway.pools[Role.PREFILL]

            def has_facts() -> bool:
                facts = pool.health.health_of(backend).engine_facts
                return pool.engine_version_of(backend) is not None and facts is not None and facts.max_model_len == 4096

            await until(has_facts)
            count, probes = asked[path], asked["/health"]
            await until(lambda: asked["/health"] > probes + 2)
        assert asked[path] == count


async def test_facts_are_dropped_when_the_engine_left_during_the_question(
    client: EngineClient,
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/version":
            asked.set()
            await go_on.wait()
        return web.json_response({"version": "0.18.1"})

    async with answering(answer, "/health", "/version", "/v1/models") as port:
        gateway = Gateway([port])
        (backend,) = gateway.pools[Role.PREFILL].all_backends()
        async with gateway.prober(client) as prober:
            await asked.wait()
            gateway.roster.remove_backend(Role.PREFILL, HOST, port)
            prober.remove_drained_backends()
            assert gateway.names(Role.PREFILL) == []
            go_on.set()
            # Its facts arrive after the old answer.
            gateway.roster.add_for_administrator(Backend(Role.DECODE, HOST, port))
            await until(lambda: gateway.health.health_of(Backend(Role.DECODE, HOST, port)).engine_facts is not None)
        assert gateway.health.health_of(backend).engine_facts is None


async def test_prober_exit_cancels_all_tasks(client: EngineClient, engine: Engine) -> None:
    engine.status = 503
    gateway = Gateway([engine.port], interval_seconds=3600, joining_interval_seconds=3600)
    before = asyncio.all_tasks()
    async with gateway.joining(client) as joiner:
        joiner.join_when_ready(Backend(Role.DECODE, HOST, unused_port()))
        await gateway.transitions.get()
    ours = {task for task in asyncio.all_tasks() - before if "Prober" in repr(task) or "Joiner" in repr(task)}
    assert not ours
    assert joiner.joining_instances(Role.DECODE) == []


async def test_changed_settings_hold_for_the_next_probe(client: EngineClient, engine: Engine) -> None:
    gateway = Gateway([engine.port])
    async with gateway.prober(client):
        await gateway.transitions.get()
        gateway.checks = HealthChecks(path="/nowhere", interval_seconds=0.01, changing_interval_seconds=0.01)
        transition = await gateway.transitions.get()
        assert (transition.new_state, transition.reason) == (HealthState.DOWN, "/nowhere answered with status 404")


async def test_transition_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = Backend(Role.DECODE, "10.0.0.1", 7100)
    up, down, ejected, probation = (HealthState(word) for word in ("up", "down", "ejected", "on probation"))
    for old, new, reason in (
        (up, down, "cannot connect (connection refused)"),
        (down, up, "passed its health check"),
        (up, ejected, "answered with status 500, 5 failures in a row, for 31 s"),
        (ejected, probation, "the next request decides"),
    ):
        log_transition(Transition(backend, old, new, reason))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "decode instance 10.0.0.1:7100 is down: cannot connect (connection refused)"),
        ("INFO", "decode instance 10.0.0.1:7100 is up: passed its health check"),
        (
            "WARNING",
            "decode instance 10.0.0.1:7100 is ejected: answered with status 500, 5 failures in a row, for 31 s",
        ),
        ("INFO", "decode instance 10.0.0.1:7100 is on probation: the next request decides"),
    ]


async def test_gone_check_uses_a_new_connection(client: EngineClient) -> None:
    """A process that has closed its listener may still serve its open connections."""
    served: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError):  # the client has closed the connection
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(serve, HOST, 0)
    port = listener.sockets[0].getsockname()[1]
    gateway = Gateway([port], interval_seconds=3600.0)
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    async with (
        EngineClient(keeps_connections=False) as fresh,
        gateway.prober(client, fresh) as prober,
    ):
        await gateway.transitions.get()
        assert not await prober.is_backend_gone(backend, 0.0)
        listener.close()
        assert (await client.get_body(f"http://{HOST}:{port}", "/health", 5.0)).status == 200  # on the kept connection
        assert await prober.is_backend_gone(backend, 0.0)
    await asyncio.gather(*filter(None, served))


@pytest.mark.fault(111)
async def test_many_probes_start_over_several_loop_iterations(client: EngineClient) -> None:
    begun: list[int] = []
    with ExitStack() as stack:
        # Sockets that are bound and do not listen: their ports differ, and refuse connections.
        sockets = [stack.enter_context(socket.socket()) for _ in range(45)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        gateway = Gateway([bound.getsockname()[1] for bound in sockets], interval_seconds=3600.0)
        async with gateway.prober(client) as prober:
            while not begun or begun[-1] < 45:
                begun.append(len(prober._due))
                await asyncio.sleep(0)
    assert max(later - earlier for earlier, later in pairwise(begun)) <= 10
