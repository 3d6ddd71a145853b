"""Elastic instances exchange their roles while clients are served, and nothing of an answer is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.balancer.roster import RoleMove, RosterMember
from proxy.common.backend import Role
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, answers_alone, request, until
from tests.clock import Clock
from tests.conftest import Deploy
from tests.deployment import Deployment, engine_options

pytestmark = pytest.mark.fault(163)

_HEALTH = {"interval_seconds": 0.1, "changing_interval_seconds": 0.05, "slow_start_seconds": 0.0}
_STREAMS = 200
_MOVES = 10


def name_of(engine: SimulatedEngine) -> str:
    return f"127.0.0.1:{engine.port}"


def engines(count: int, **options: Any) -> list[SimulatedEngine]:
    return [SimulatedEngine(**{"role": "both", "decode_step_ms": 5.0, **options}) for _ in range(count)]


async def elastic_fleet(
    deploy: Deploy, prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine], **sections: Any
) -> Deployment:
    """Start a gateway whose instances are all elastic."""
    elastic = {"evacuate_after_seconds": 0.0, **sections.pop("elastic", {})}
    return await deploy(prefillers, decoders, health=_HEALTH, elastic=elastic, **sections)


async def order(gateway: Deployment, role: str, *engines: SimulatedEngine, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Send an administrator's request for a role, and return the status and the answer."""
    url = gateway.url + "/instances/role" + ("?dry_run=true" if fields.pop("dry_run", False) else "")
    body = {"role": role, "instances": [name_of(engine) for engine in engines], **fields}
    async with gateway.session.post(url, json=body) as response:
        return response.status, await response.json()


def member_of(gateway: Deployment, engine: SimulatedEngine) -> RosterMember | None:
    return next((one for one in gateway.roster.elastic_members() if one.backend.port == engine.port), None)


def role_of(gateway: Deployment, engine: SimulatedEngine) -> str | None:
    """Return the role in which an instance gets requests, or None."""
    member = member_of(gateway, engine)
    return member.backend.role.value if member is not None and member.may_serve else None


async def has_role(gateway: Deployment, engine: SimulatedEngine, role: str) -> None:
    """Wait until an instance gets requests in a role."""

    def is_there() -> bool:
        pool = gateway.worker.pools.pool_of(Role(role))
        return any(backend.port == engine.port for backend in pool.eligible_backends())

    await until(is_there, f"{name_of(engine)} to be a {role} instance")


def problem_of(gateway: Deployment, engine: SimulatedEngine) -> str:
    member = member_of(gateway, engine)
    return "" if member is None else member.move_problem


def is_refused(gateway: Deployment, engine: SimulatedEngine) -> bool:
    """Return whether the engine has refused the last move."""
    member = member_of(gateway, engine)
    return member is not None and member.is_move_refused


def moves(gateway: Deployment) -> dict[tuple[str, ...], float]:
    """Return the counted moves by result and role."""
    return gateway.metrics("pdproxy_role_moves_total")


async def ask_timed(gateway: Deployment, body: dict[str, Any], gaps: list[float]) -> Answer:
    """Send a request, and note the longest time between two parts of its answer."""
    clock = asyncio.get_running_loop().time
    parts: list[bytes] = []
    at, longest = 0.0, 0.0
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        async for part in response.content.iter_any():
            longest, at = max(longest, clock() - at if at else 0.0), clock()
            parts.append(part)
    gaps.append(longest)
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, headers, b"".join(parts), is_whole=True)


async def ask_all(gateway: Deployment, bodies: list[dict[str, Any]], at_once: int) -> tuple[list[Answer], float]:
    """Send requests, this number at a time. Return the answers in their order, and the longest gap in one."""
    answers: dict[int, Answer] = {}
    gaps: list[float] = []
    left = iter(enumerate(bodies))

    async def client() -> None:
        for number, body in left:
            answers[number] = await ask_timed(gateway, body, gaps)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return [answers[number] for number in range(len(bodies))], max(gaps)


def bodies_of(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [request(Api.CHAT, f"Tell me number {number}", stream=True, **fields) for number in range(count)]


async def assert_equal(answers: Sequence[Answer], bodies: list[dict[str, Any]]) -> None:
    """Check that all answers are complete, and equal to those of a single engine."""
    assert [answer.status for answer in answers] == [200] * len(bodies)
    assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert [answer.text for answer in answers] == await answers_alone(bodies)


async def move_back_and_forth(gateway: Deployment, engine: SimulatedEngine, times: int) -> None:
    """Move a decoder to prefill and back, this number of times each."""
    for role in itertools.islice(itertools.cycle(("prefill", "decode")), 2 * times):
        status, answer = await order(gateway, role, engine)
        assert status == 200, answer
        await has_role(gateway, engine, role)


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "sglang_bootstrap"])
async def test_streams_are_equal_during_ten_moves_each_way(
    deploy: Deploy, tmp_path: Path, connector: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = engine_options(connector, lambda: tmp_path)
    is_sglang = connector == "sglang_bootstrap"
    roles = ("prefill", "decode") if is_sglang else ("both", "both")
    prefillers, decoders = (
        engines(count, role=role, pd_role_switch=is_sglang, **options)
        for count, role in zip((2, 3), roles, strict=True)
    )
    gateway = await elastic_fleet(deploy, prefillers, decoders, connector=connector)
    gateway.may_stay_pinned = _STREAMS
    gateway.legs_with_kv_names = 2 if is_sglang else 1
    bodies = bodies_of(_STREAMS, max_tokens=40)
    serving = asyncio.create_task(ask_all(gateway, bodies, at_once=40))
    await decoders[0].wait_until(lambda state: state.live >= 2)
    await move_back_and_forth(gateway, decoders[0], _MOVES)
    answers, gap = await serving
    await assert_equal(answers, bodies)
    assert moves(gateway) == {("moved", "prefill"): _MOVES, ("moved", "decode"): _MOVES}
    assert not gateway.metrics("pdproxy_instance_ejected_total")
    with capsys.disabled():
        print(f" {connector}: {_STREAMS} equal streams, {2 * _MOVES} moves, longest gap {gap:.3f} s ", end="")


async def start_streams(gateway: Deployment, count: int, **fields: Any) -> tuple[list[Any], list[asyncio.Task[Answer]]]:
    bodies = bodies_of(count, **fields)
    return bodies, [asyncio.create_task(gateway.ask(body)) for body in bodies]


async def test_answers_may_finish_before_the_move(deploy: Deploy) -> None:
    gateway = await elastic_fleet(deploy, engines(1), engines(2))
    mover = gateway.decoders[0]
    bodies, tasks = await start_streams(gateway, 6, max_tokens=60)
    await mover.wait_until(lambda state: state.live == 3)
    await order(gateway, "prefill", mover, evacuate_after=None)
    assert role_of(gateway, mover) is None
    await has_role(gateway, mover, "prefill")
    await assert_equal([await task for task in tasks], bodies)
    assert not gateway.metrics("pdproxy_resumes_total")


async def test_instance_keeps_its_role_when_requests_do_not_end_in_time(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await elastic_fleet(deploy, engines(1), engines(2), elastic={"drain_seconds": 0.3})
    mover = gateway.decoders[0]
    bodies, tasks = await start_streams(gateway, 2, max_tokens=600)
    await mover.wait_until(lambda state: state.live == 1)
    await order(gateway, "prefill", mover, evacuate_after=None)
    await until(lambda: role_of(gateway, mover), "the end of the move")
    problem = "its requests have not ended within 0.3 s"
    assert (role_of(gateway, mover), problem_of(gateway, mover)) == ("decode", problem)
    assert moves(gateway) == {("failed", "prefill"): 1}
    assert [record.getMessage() for record in caplog.records if record.name == "proxy.roles"] == [
        f"roles: move failed, and decode instance {name_of(mover)} keeps its role: {problem}"
    ]
    await assert_equal([await task for task in tasks], bodies)


async def test_answers_continue_when_the_instance_dies_in_a_move(deploy: Deploy) -> None:
    gateway = await elastic_fleet(deploy, engines(1), engines(3))
    mover = gateway.decoders[0]
    bodies, tasks = await start_streams(gateway, 9, max_tokens=60)
    await mover.wait_until(lambda state: state.live == 3)
    await order(gateway, "prefill", mover, evacuate_after=None)
    await mover.kill()
    await until(lambda: role_of(gateway, mover), "the end of the move")
    assert role_of(gateway, mover) == "prefill"
    await assert_equal([await task for task in tasks], bodies)
    assert mover.port not in [backend.port for backend in gateway.worker.pools.prefill.eligible_backends()]
    await mover.start()
    await has_role(gateway, mover, "prefill")


async def test_prefiller_with_kept_kv_moves_when_it_is_released(deploy: Deploy) -> None:
    gateway = await elastic_fleet(deploy, engines(2), engines(1))
    mover = gateway.prefillers[0]
    row = gateway.worker.pinned_kv
    backend = gateway.worker.pools.prefill.all_backends()[0]
    pin = row.add_pin(backend, 100, 60.0, is_suspected=True)
    await order(gateway, "decode", mover)
    for _ in range(4):
        gateway.worker.apply_other_decisions()
    assert role_of(gateway, mover) is None
    row.remove_pin(pin)
    await has_role(gateway, mover, "decode")


async def test_prefiller_moves_although_its_kv_is_not_released(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that was aborted may have left KV, which only its lease ends. The pin follows the instance.

    Only its first move waits for the release.
    """
    monkeypatch.setattr("proxy.fleet.roles._RELEASE_SECONDS", 0.1)
    gateway = await elastic_fleet(deploy, engines(2), engines(1))
    mover = gateway.prefillers[0]
    pools, pinned_kv = gateway.worker.pools, gateway.worker.pinned_kv
    pin = pinned_kv.add_pin(pools.prefill.all_backends()[0], 100, 3600.0, is_suspected=True)
    gateway.may_stay_pinned = 1
    for role in ("decode", "prefill", "decode"):
        await order(gateway, role, mover)
        await has_role(gateway, mover, role)
        monkeypatch.setattr("proxy.fleet.roles._RELEASE_SECONDS", 3600.0)
        both_roles = (*pools.prefill.all_backends(), *pools.decode.all_backends())
        (backend,) = [each for each in both_roles if each.port == mover.port]
        assert (pinned_kv.current_pins(), pin.backend) == ([pin], backend)
        assert gateway.scoreboard.pinned_kv(backend.slot).pinned_tokens == 100


def sglang(role: str, **options: Any) -> list[SimulatedEngine]:
    return engines(2, role=role, profile_name="sglang", **{"pd_role_switch": True, **options})


async def test_refusal_of_the_engine_leaves_the_role(deploy: Deploy) -> None:
    decoders = sglang("decode", pd_role_switch=False)
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    await order(gateway, "prefill", decoders[0])
    await until(lambda: role_of(gateway, decoders[0]), "the end of the move")
    assert role_of(gateway, decoders[0]) == "decode"
    assert problem_of(gateway, decoders[0]) == "its engine refuses: --enable-pd-role-switch is not set on this server"
    (answer,) = [await gateway.ask(body) for body in bodies_of(1)]
    assert answer.is_done


async def test_lost_answer_of_the_engine_is_replaced_by_its_report(deploy: Deploy) -> None:
    decoders = sglang("decode")
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    decoders[0].faults.add("lost_response", path="/pd_role_switch", times=1)
    await order(gateway, "prefill", decoders[0])
    await has_role(gateway, decoders[0], "prefill")
    assert decoders[0].options.role == "prefill"
    assert moves(gateway) == {("moved", "prefill"): 1}


async def test_instance_without_a_known_role_gets_no_requests(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    """The engine dies when it is asked. It has one role again when it reports it, which is that of its start."""
    decoders = sglang("decode")
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    mover = decoders[0]
    await mover.kill()
    await order(gateway, "prefill", mover)
    words = f"roles: role unknown, so the instance gets no requests until its engine reports it: {name_of(mover)}"
    await until(lambda: words in caplog.messages, "the log line")
    assert role_of(gateway, mover) is None
    (answer,) = [await gateway.ask(body) for body in bodies_of(1)]
    assert answer.is_done
    await mover.start()
    await has_role(gateway, mover, "decode")
    assert problem_of(gateway, mover) == "its engine still has the role decode"
    assert caplog.messages.count(words) == 1


async def test_engine_that_returns_in_its_first_role_gets_it_back(deploy: Deploy) -> None:
    decoders = sglang("decode")
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    mover = decoders[0]
    await order(gateway, "prefill", mover)
    await has_role(gateway, mover, "prefill")
    await mover.kill()
    pool = gateway.worker.pools.prefill
    await until(lambda: mover.port not in [each.port for each in pool.eligible_backends()], "the instance to be down")
    await mover.start()
    await has_role(gateway, mover, "decode")
    (answer,) = [await gateway.ask(body) for body in bodies_of(1)]
    assert answer.is_done


async def test_prefiller_becomes_a_decoder_with_the_graphs_of_other_decoders(deploy: Deploy) -> None:
    """SGLang refuses to capture CUDA graphs without the memory that they need, and decoders report it."""
    prefillers = sglang("prefill")
    gateway = await elastic_fleet(deploy, prefillers, sglang("decode"), connector="sglang_bootstrap")
    mover = prefillers[0]
    await order(gateway, "decode", mover)
    await has_role(gateway, mover, "decode")
    (asked,) = [seen.body for seen in mover.state.requests if seen.path == "/pd_role_switch"]
    assert asked == {
        "new_role": "decode",
        "decode_cuda_graph_memory_gb": 1.5,
        "decode_cuda_graph_bs": [1, 2, 4, 8],
    }
    assert moves(gateway) == {("moved", "decode"): 1}


async def test_role_after_a_move_is_not_that_of_a_stale_report(deploy: Deploy) -> None:
    """After a break, the engine reports the role of its start. The gateway asks at `/pd_role_switch` and keeps it."""
    decoders = sglang("decode", reports_only_role_at_start=True)
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    mover, pool = decoders[0], gateway.worker.pools.prefill
    await order(gateway, "prefill", mover)
    await has_role(gateway, mover, "prefill")
    mover.faults.add("refuse_status", path="/health")
    await until(lambda: mover.port not in [each.port for each in pool.eligible_backends()], "the instance to be down")
    mover.faults.clear()
    await mover.wait_until(
        lambda state: any(
            seen.path == "/pd_role_switch" and seen.body == {"new_role": "prefill", "prepare_only": True}
            for seen in state.requests
        )
    )
    await has_role(gateway, mover, "prefill")
    assert moves(gateway) == {("moved", "prefill"): 1}


async def test_refusal_is_logged_once_and_ends_moves_by_the_controller(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has too little memory for CUDA graphs. It is asked again when it has restarted."""
    prefillers = sglang("prefill", free_gpu_gb=0.5)
    gateway = await elastic_fleet(deploy, prefillers, sglang("decode"), connector="sglang_bootstrap")
    mover = prefillers[0]
    await order(gateway, "decode", mover)
    await until(lambda: problem_of(gateway, mover), "the end of the move")
    problem = (
        "its engine refuses: insufficient decode CUDA graph headroom: required=1.500 GB, available=0.500 GB; "
        "start it with a lower --mem-fraction-static"
    )
    assert (role_of(gateway, mover), problem_of(gateway, mover)) == ("prefill", problem)
    assert [record.getMessage() for record in caplog.records if record.name == "proxy.roles"] == [
        f"roles: move failed, and prefill instance {name_of(mover)} keeps its role: {problem}"
    ]
    assert is_refused(gateway, mover)
    await mover.kill()
    pool = gateway.worker.pools.prefill
    await until(lambda: mover.port not in [each.port for each in pool.eligible_backends()], "the instance to be down")
    await mover.start()
    await until(lambda: not is_refused(gateway, mover), "the engine to be asked again")


async def test_another_worker_continues_a_move(deploy: Deploy) -> None:
    """The roster has the state of the move, so nothing of the worker that began it is needed."""
    decoders = sglang("decode")
    gateway = await elastic_fleet(deploy, sglang("prefill"), decoders, connector="sglang_bootstrap")
    (backend, _) = gateway.worker.pools.decode.all_backends()
    decoders[0].options.switch_role("prefill")  # by the worker that died before it had the answer
    move = RoleMove(Role.PREFILL, asyncio.get_running_loop().time() + 60, is_engine_switching=True)
    gateway.roster.begin_move(backend, move, None)
    await has_role(gateway, decoders[0], "prefill")


# The controller


_QUICK = {"window_seconds": 2.0, "horizon_seconds": 600.0, "min_prefill": 1}


async def overloaded_prefillers(deploy: Deploy, mode: str) -> Deployment:
    """Start a gateway with one slow prefiller, and with decoders that have little to do."""
    fleet = engines(4, prefill_ms_per_1k_tokens=150.0)
    return await elastic_fleet(
        deploy, fleet[:1], fleet[1:], elastic={**_QUICK, "mode": mode}, admission={"max_running_decode": 16}
    )


@asynccontextmanager
async def held_prompts(gateway: Deployment, count: int = 12) -> AsyncIterator[None]:
    """Ask for answers while the prefiller computes nothing. At the end it goes on, and all answers must be equal."""
    bodies = [request(Api.CHAT, f"{number} " + "x" * 2000, stream=True, max_tokens=4) for number in range(count)]
    with gateway.prefillers[0].held(prefills=True):
        serving = asyncio.create_task(ask_all(gateway, bodies, at_once=count))
        await until(lambda: gateway.worker.drain_manager.in_flight_count == count, "the requests")
        await gateway.prefillers[0].wait_until(lambda state: state.live > 0)
        yield
    await assert_equal((await serving)[0], bodies)


def measure(gateway: Deployment, monkeypatch: pytest.MonkeyPatch, seconds: int = 60) -> None:
    """Let the controller measure the present load each second of a time that its clock alone sees."""
    controller, clock = gateway.worker.role_controller, Clock()
    assert controller is not None
    clock.now = asyncio.get_running_loop().time()
    monkeypatch.setattr(controller, "_clock", clock)
    for _ in range(seconds):
        clock.now += 1.0
        controller.measure_and_decide()


async def test_controller_moves_decoders_to_overloaded_prefill(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await overloaded_prefillers(deploy, "auto")
    caplog.set_level(logging.INFO, logger="proxy.roles")
    async with held_prompts(gateway):
        measure(gateway, monkeypatch)
    await until(lambda: moves(gateway), "a move")
    assert moves(gateway) == {("moved", "prefill"): 1}
    (line,) = [text for text in caplog.messages if text.startswith("roles: move begins: ")]
    assert "1P3D to 2P2D: prefillers " in line
    assert gateway.metrics("pdproxy_desired_instances")


async def test_controller_only_reports_by_default(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await overloaded_prefillers(deploy, "advise")
    caplog.set_level(logging.INFO, logger="proxy.roles")
    async with held_prompts(gateway):
        measure(gateway, monkeypatch)
        assert gateway.metrics("pdproxy_desired_instances")[("prefill",)] >= 2
    assert not moves(gateway)
    (line,) = [text for text in caplog.messages if "roles: a move would pay: " in text]
    assert line.startswith("roles: a move would pay: elastic.mode is advise: 1P3D to 2P2D: ")


async def test_pinned_instances_stay_whatever_the_controller_wants(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await overloaded_prefillers(deploy, "auto")
    await order(gateway, "decode", *gateway.decoders)
    caplog.set_level(logging.INFO, logger="proxy.roles")
    async with held_prompts(gateway):
        measure(gateway, monkeypatch)
    assert any("roles: a move would pay: no elastic instance can move: " in text for text in caplog.messages)
    assert not moves(gateway)


async def test_gateway_follows_the_leading_one(deploy: Deploy) -> None:
    gateway = await elastic_fleet(deploy, engines(1), engines(3), elastic={**_QUICK, "mode": "auto"})
    controller = gateway.worker.role_controller
    assert controller is not None
    mover, pinned, unknown = gateway.decoders
    await order(gateway, "decode", pinned)
    controller.leader_roles = {name_of(mover): "prefill", name_of(pinned): "prefill", name_of(unknown): "nonsense"}
    await has_role(gateway, mover, "prefill")
    assert [role_of(gateway, engine) for engine in (pinned, unknown)] == ["decode", "decode"]
    controller.leader_roles = {name_of(mover): "decode"}
    await has_role(gateway, mover, "decode")


async def test_no_gateway_decides_without_the_store(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await overloaded_prefillers(deploy, "auto")
    controller = gateway.worker.role_controller
    assert controller is not None
    controller.leader_roles = {}
    async with held_prompts(gateway):
        measure(gateway, monkeypatch)
        assert gateway.metrics("pdproxy_desired_instances")[("prefill",)] >= 2
    assert not moves(gateway)
    assert not any("move" in text for text in caplog.messages)
