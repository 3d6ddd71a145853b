"""Failures of engines that need several engines or requests to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from proxy.common.backend import Backend, Role
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.canned import CannedEngine, Received, data, event_stream, http, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.fleet.inspector.test_inspector import StandIn

# Health checks that soon find engines that are back.
ATTENTIVE: dict[str, Any] = {"interval_seconds": 0.02, "changing_interval_seconds": 0.02, "rise": 1}


@pytest.mark.fault(4)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_client_gets_the_shortest_retry_after_when_all_engines_are_busy(deploy: Deploy, role: str) -> None:
    gateway = await deploy(2, 2, admission={"wait_seconds": 0.5})
    body = {"error": {"message": "full", "type": "Own", "code": 503}}
    for engine, seconds in zip(engines_of(gateway, role), ("3", "9"), strict=True):
        engine.faults.add("refuse_status", status=503, body=body, headers={"Retry-After": seconds})
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.body) == (503, orjson.dumps(body))
    assert answer.headers["retry-after"] == "3"
    assert not gateway.metrics("pdproxy_instance_ejected_total")
    gateway.expects_pinned = 2 if role == "decode" else 0  # no engine could be asked to release it


@pytest.mark.fault(7)
@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "alive"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_unreachable_kv_cache_is_computed_by_another_prefiller(
    deploy: Deploy, stream: bool, is_dead: bool
) -> None:
    # The address of its KV cache refuses connections.
    gone, other = SimulatedEngine(role="prefill", kv_host="127.0.0.2"), SimulatedEngine(role="prefill")
    if is_dead:
        gone.faults.add("reset_before_headers", path=Api.CHAT.path, skip=1)
    gateway = await deploy([gone, other], 2)
    body = request(Api.CHAT, stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert (gone.state.finished, other.state.finished) == (1, 1)
    gateway.expects_pinned = 1
    gateway.expects_inexact_pins = True  # a decoder was asked to release it, and did not report the failure


@pytest.mark.fault(14)
async def test_events_with_invalid_json_are_forwarded_and_counted(deploy: Deploy) -> None:
    events = [*map(text_event, "ab"), b"data: {not json\n\n", b"data: \xff\xfe\n\n", text_event("c", "stop")]
    engine = CannedEngine("both", event_stream([*events, b"data: [DONE]\n\n"]))
    gateway = await deploy(decoders=[engine], connector="plain")
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=True))
    assert answer.is_whole
    assert answer.body == b"".join(events) + b"data: [DONE]\n\n"
    assert gateway.metrics("pdproxy_sse_bad_events_total") == {(): 2.0}


@pytest.mark.fault(35)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_missed", [True, False], ids=["missed", "unnoticed"])
async def test_requests_wait_while_all_engines_of_a_role_restart(
    deploy: Deploy, role: str, count: int, is_missed: bool
) -> None:
    gateway = await deploy(count, count, health=ATTENTIVE if is_missed else {}, admission={"wait_seconds": 60.0})
    gone = await kill_all(gateway, role, is_missed=is_missed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gateway.ask(request(Api.CHAT, stream=bool(n % 2)))) for n in range(20)]
        await until(lambda: gateway.metrics("pdproxy_queued_requests") == {(): 20.0}, "all to wait")
        await restart(gateway, role, gone, is_missed=is_missed)
    assert [task.result().status for task in tasks] == [200] * 20
    gateway.may_stay_pinned = 40  # prefilled before the first refused connection to a decoder
    gateway.expects_inexact_pins = role == "decode"


@pytest.mark.fault(35)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_waiting_for_a_restart_respects_the_queue_limit(deploy: Deploy, role: str) -> None:
    gateway = await deploy(2, 2, health=ATTENTIVE, admission={"wait_seconds": 60.0, "max_waiting": 2})
    gone = await kill_all(gateway, role)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gateway.ask(request(Api.CHAT))) for _ in range(2)]
        await until(lambda: gateway.metrics("pdproxy_queued_requests") == {(): 2.0}, "two to wait")
        refused = await gateway.ask(request(Api.CHAT))
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        for engine in gone:
            await engine.restart()
    assert [task.result().status for task in tasks] == [200, 200]


@pytest.mark.fault(35)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_do_not_wait_for_an_instance_that_was_never_healthy(deploy: Deploy, role: str) -> None:
    gateway = await deploy(1, 1, health=ATTENTIVE, admission={"wait_seconds": 60.0}, kv={"release": "never"})
    (there,) = engines_of(gateway, role)
    async with SimulatedEngine(role=role) as absent:
        await absent.kill()
        gateway.roster.add_for_administrator(Backend(Role(role), "127.0.0.1", absent.port))
        gateway.roster.remove_backend(Role(role), "127.0.0.1", there.port)
        answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, f"no_healthy_{role}")
    gateway.may_stay_pinned = 1 if role == "decode" else 0


@pytest.mark.fault(35)
@pytest.mark.parametrize("is_missed", [True, False], ids=["missed", "unnoticed"])
async def test_passed_through_requests_wait_for_a_restart_of_their_role(deploy: Deploy, is_missed: bool) -> None:
    gateway = await deploy(2, 1, health=ATTENTIVE if is_missed else {}, admission={"wait_seconds": 60.0})
    gone = await kill_all(gateway, "prefill", is_missed=is_missed)

    async def tokenize() -> int:
        body = {"model": "sim", "prompt": "Hello"}
        async with gateway.session.post(gateway.url + "/tokenize", json=body) as response:
            await response.read()
            return response.status

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(tokenize()) for _ in range(10)]
        await until(lambda: gateway.metrics("pdproxy_queued_requests") == {(): 10.0}, "all to wait")
        await restart(gateway, "prefill", gone, is_missed=is_missed)
    assert [task.result() for task in tasks] == [200] * 10


@pytest.mark.fault(35)
async def test_passed_through_requests_do_not_wait_for_the_other_role(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, health=ATTENTIVE, admission={"wait_seconds": 0.2})
    await gateway.decoders[0].kill()
    await until(gateway.worker.pools.decode.are_all_gone, "the decoder to be missed")
    statuses = []
    for mends in (True, False):
        body = {"model": "sim", "prompt": "Hello"}
        async with gateway.session.post(gateway.url + "/tokenize", json=body) as response:
            statuses.append((response.status, (await response.json()).get("error", {}).get("code")))
        if mends:
            await gateway.prefillers[0].kill()
    assert statuses == [(200, None), (503, "no_healthy_prefill")]


@pytest.mark.fault(35)
async def test_request_is_not_prefilled_again_after_waiting_in_vain(deploy: Deploy) -> None:
    """The slower request joins the queue later, and is there when the decoder is given up."""
    gateway = await deploy(1, 1, admission={"wait_seconds": 0.6}, kv={"release": "never"})
    gateway.prefillers[0].faults.add("slow_headers", seconds=0.3, times=1)
    await gateway.decoders[0].kill()
    answers = await asyncio.gather(*(gateway.ask(request(Api.CHAT)) for _ in range(2)))
    assert [(answer.status, answer.error["code"]) for answer in answers] == [(503, "no_healthy_decode")] * 2
    assert len(generations(*gateway.prefillers)) == 2
    gateway.expects_pinned = 2


@pytest.mark.fault(35)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_role_without_engines_returns_503_until_they_are_back(deploy: Deploy, role: str) -> None:
    gateway = await deploy(2, 2, health={**ATTENTIVE, "fall": 1}, admission={"wait_seconds": 0.2})
    gone = await kill_all(gateway, role)
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, f"no_healthy_{role}")
    assert int(answer.headers["retry-after"]) >= 1
    assert generations(*gateway.engines) == []
    for engine in gone:
        await engine.restart()
    await until(lambda: all_serve(gateway), "the engines to be back")
    assert (await gateway.ask(request(Api.CHAT))).is_done


@pytest.mark.fault(36)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_only_engine_of_a_role_is_not_ejected_for_failed_requests(deploy: Deploy, role: str) -> None:
    gateway = await deploy(1, 1, health={"eject_after": 1}, kv={"release": "never"})
    (engine,) = engines_of(gateway, role)
    engine.faults.add("refuse_status", status=500, times=10)
    while engine.faults.describe()[0]["fired"] < 10:
        assert (await gateway.ask(request(Api.CHAT))).status == 500
    assert (await gateway.ask(request(Api.CHAT))).is_done
    gateway.expects_pinned = len(gateway.prefillers[0].pins)


NO_FINISH = {"index": 0, "text": "so far", "finish_reason": "abort"}
ENGINE_ERROR = {"error": {"message": "the engine is dead", "type": "Own", "code": 500}}


@pytest.mark.fault(52)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_error_event_with_status_200_is_an_error(deploy: Deploy, stream: bool) -> None:
    engine = CannedEngine("both", event_stream([data(ENGINE_ERROR)]) if stream else [json_answer(ENGINE_ERROR)])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"}, retry={"max_attempts": 1})
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=stream))
    assert answer.status == (500 if stream else 502)
    assert answer.error == (ENGINE_ERROR["error"] if stream else answer.error)
    assert answer.error["message"]


@pytest.mark.fault(53)
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect"])
async def test_redirects_of_engines_are_not_followed(deploy: Deploy, status: str) -> None:
    other = CannedEngine("both", [json_answer({"choices": [NO_FINISH]})])
    async with other:
        engine = CannedEngine("both", [http(b"moved", f"{status}\r\nLocation: {other.url}/v1/completions")])
        gateway = await deploy(decoders=[engine], connector="plain")
        answer = await gateway.ask(request(Api.COMPLETIONS))
        assert (answer.status, answer.error["code"]) == (502, "decode_bad_answer")
        assert "location" not in answer.headers
        assert not other.received


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return data({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def engines_of(gateway: Deployment, role: str) -> list[Any]:
    return gateway.prefillers if role == "prefill" else gateway.decoders


async def kill_all(gateway: Deployment, role: str, *, is_missed: bool = True) -> list[Any]:
    """Kill all engines of a role, and return them. `is_missed`: wait for their failed health checks."""
    engines = engines_of(gateway, role)
    for engine in engines:
        await engine.kill()
    if is_missed:
        await until(lambda: not all_serve(gateway, any), "failed health checks")
    return engines


async def restart(gateway: Deployment, role: str, engines: list[Any], *, is_missed: bool) -> None:
    """Restart these engines. Without failed health checks before, report passed ones."""
    for engine in engines:
        await engine.restart()
    if not is_missed:
        for backend in gateway.worker.pools.pool_of(Role(role)).all_backends():
            gateway.worker.health.on_probe(backend, True, "passed its health check")


def all_serve(gateway: Deployment, which: Any = all) -> bool:
    """Return whether all (or any) engines of each role are eligible for requests."""
    pools = gateway.worker.pools
    return all(
        which(backend in pool.eligible_backends() for backend in pool.all_backends())
        for pool in (pools.prefill, pools.decode)
    )


EVENTS_WITHOUT_TOKENS = {
    "comments": b": ping\n\n",
    "events of another kind": b'event: ping\ndata: {"type":"ping"}\n\n',
    "events that are no json": b"data: ping\n\n",
    "chunks without choices": data({"id": "c", "choices": []}),
    "chunks without content": data({"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": None}]}),
    "an event without end": b"x",
}


def endlessly(piece: bytes, *first: bytes) -> Callable[[Received], Iterator[bytes]]:
    def pieces(_: Received) -> Iterator[bytes]:
        head, *chunks = event_stream(first, is_whole=False)
        yield from (head, *chunks)
        while True:
            yield event_stream([piece], is_whole=False)[1]

    return pieces


@pytest.mark.fault(69)
@pytest.mark.parametrize("sign", EVENTS_WITHOUT_TOKENS.values(), ids=EVENTS_WITHOUT_TOKENS)
async def test_events_without_tokens_do_not_count_as_first_token(deploy: Deploy, sign: bytes) -> None:
    engine = CannedEngine("both", endlessly(sign), pause_seconds=0.005)
    # An empty chunk counts as the first token. From then on, the idle timeout applies.
    timeouts = {"first_token_seconds": 0.1, "idle_seconds": 0.1}
    gateway = await deploy(decoders=[engine], connector="plain", timeouts=timeouts)
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=True))
    assert answer.error["code"] == "decode_timeout"


@pytest.mark.fault(69)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sign", EVENTS_WITHOUT_TOKENS.values(), ids=EVENTS_WITHOUT_TOKENS)
async def test_events_without_tokens_do_not_reset_the_idle_timeout(deploy: Deploy, sign: bytes, stream: bool) -> None:
    engine = CannedEngine("both", endlessly(sign, text_event("a")), pause_seconds=0.005)
    # An answer that is not streamed has the earlier of the two deadlines.
    timeouts = {"answer_seconds": 0.5, "idle_seconds": 0.1}
    gateway = await deploy(decoders=[engine], connector="plain", timeouts=timeouts)
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=stream))
    assert b'"code":"decode_timeout"' in answer.body


def drip(_: Received) -> Iterator[bytes]:
    yield http(b"x" * 1_000_000)[:200]
    while True:
        yield b"x"


@pytest.mark.fault(69)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_dripping_answer_does_not_extend_its_timeout(deploy: Deploy, role: str) -> None:
    if role == "prefill":
        timeouts = {"prefill_seconds": 0.1, "prefill_seconds_per_1k_tokens": 0.0}
        gateway = await deploy([CannedEngine("prefill", drip, pause_seconds=0.005)], 1, timeouts=timeouts)
    else:
        timeouts = {"answer_seconds": 0.1}
        engine = CannedEngine("both", drip, pause_seconds=0.005)
        gateway = await deploy(decoders=[engine], connector="plain", timeouts=timeouts, resume={"mode": "off"})
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (504, f"{role}_timeout")


@pytest.mark.fault(89)
@pytest.mark.parametrize("stream", [True, False])
async def test_unreachable_bootstrap_server_costs_one_attempt(deploy: Deploy, stream: bool) -> None:
    """The decoders try for 14 s, and then fail. The prefiller waits even longer unless it gets an abort."""
    async with SimulatedEngine(role="prefill", profile_name="sglang") as lost:
        stand_in = StandIn("prefill", port=lost.port, bootstrap_port=1)
        met = SimulatedEngine(role="prefill", profile_name="sglang")
        engine = {"profile_name": "sglang", "handshake_seconds": 1.0}
        gateway = await deploy([stand_in, met], 2, connector="sglang_bootstrap", engine=engine)
        for _ in range(4):
            answer = await gateway.ask(request(Api.COMPLETIONS, stream=stream))
            assert (answer.status, answer.is_done, answer.error) == (200, True, None)
        await lost.wait_until(lambda state: state.live == state.waiting_rooms == 0)
        assert lost.requests
