"""KV that no decoder fetches: counted, released where the engines can, and otherwise accounted for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.balancer.engines import EngineFacts
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.connectors.releaser import RELEASE_MODEL, KvTransfer, PrefilledKv, may_have_pinned_kv
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations, kv_params, releases

OLD = {"profile_name": "v0.27"}
"""Engines that cannot release."""


async def leave_during_the_hand_over(gateway: Deployment, body: dict[str, Any] | None = None) -> None:
    """Disconnect a client after its decoder received the request and before it answers."""
    decoder = gateway.decoders[0]
    decoder.faults.add("hang_before_headers", times=1)
    async with gateway.asking(body or request(Api.CHAT, stream=True)) as client:
        await decoder.wait_until(lambda state: state.live == 1)
        await client.leave()
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")


async def released(gateway: Deployment) -> dict[tuple[str, ...], float]:
    """Wait for the releases, and return their metric."""
    await until(lambda: not gateway.worker.releaser.pending_count, "the releases")
    return gateway.metrics("pdproxy_kv_released_total")


def pinned(gateway: Deployment) -> tuple[float, float]:
    """How many KV caches stay pinned according to the scrape, and their tokens."""
    count, tokens = (gateway.metrics(f"pdproxy_instance_pinned_kv{name}") for name in ("", "_tokens"))
    return sum(count.values()), sum(tokens.values())


# Released


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_of_a_client_that_left_is_released(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 2)
    await leave_during_the_hand_over(gateway, request(Api.CHAT, stream=stream))
    assert gateway.metrics("pdproxy_kv_orphans_total") == {(): 1.0}
    assert pinned(gateway)[0] == len(gateway.prefillers[0].pins) == 1
    assert await released(gateway) == {("released",): 1.0}
    assert pinned(gateway) == (0, 0)
    assert gateway.decoders[1].state.releases == 1


async def test_release_is_a_request_that_no_engine_can_serve(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    gateway.decoders[0].faults.add("refuse_status", status=400, times=1)
    await gateway.ask(request(Api.CHAT, "a secret"), authorization="Bearer mine", traceparent="00-1-2-01")
    await released(gateway)
    ((decode,), (release,)) = generations(gateway.decoders[0]), releases(gateway.decoders[1])
    assert release.path == Api.COMPLETIONS.path
    params = kv_params(decode)
    assert release.body == {"model": RELEASE_MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
    assert release.headers["authorization"] == "Bearer mine"
    assert release.headers["x-request-id"] != decode.headers["x-request-id"]


async def test_decoder_that_has_failed_is_not_asked_though_it_is_the_least_loaded(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    decoders = gateway.worker.pools.decode
    gateway.decoders[0].faults.add("refuse_status", status=400, times=1)
    with decoders.make_lease(PickRequest.make_for_load(Load(1000, 1000), avoided_backends=decoders.all_backends()[:1])):
        await gateway.ask(request(Api.CHAT))
        assert await released(gateway) == {("released",): 1.0}
    assert [len(releases(decoder)) for decoder in gateway.decoders] == [0, 1]


async def test_decoder_that_has_failed_is_asked_where_there_is_no_other(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    gateway.decoders[0].faults.add("refuse_status", status=400, times=1)
    await gateway.ask(request(Api.CHAT))
    assert await released(gateway) == {("released",): 1.0}


async def test_every_unit_of_a_request_that_failed_lets_its_kv_go(deploy: Deploy) -> None:
    """One unit's decoder refuses, which ends the others in the middle of their hand-over."""
    gateway = await deploy(1, 1)
    (decoder,) = gateway.decoders
    decoder.faults.add("hang_before_headers", times=2)
    decoder.faults.add("refuse_status", status=400, skip=2, times=1)
    answer = await gateway.ask(request(Api.COMPLETIONS, n=3))
    assert answer.status == 400
    assert await released(gateway) == {("released",): 3.0}
    assert gateway.metrics("pdproxy_kv_orphans_total") == {(): 3.0}


async def test_release_leaves_no_trace_on_the_decoder(deploy: Deploy) -> None:
    """It is no request of the decoder's, neither served nor failed."""
    gateway = await deploy(1, 2)
    await leave_during_the_hand_over(gateway)
    await released(gateway)
    (name,) = [f"{decoder.host}:{decoder.port}" for decoder in gateway.decoders[1:]]
    counted = gateway.metrics("pdproxy_instance_requests_total")
    assert {labels: count for labels, count in counted.items() if name in labels} == {}
    assert gateway.metrics("pdproxy_instance_inflight") == {}


async def test_engine_that_takes_any_model_has_fetched_the_kv(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, engine={"model": RELEASE_MODEL})
    await leave_during_the_hand_over(gateway, request(Api.CHAT, stream=True, model=RELEASE_MODEL))
    assert await released(gateway) == {("released",): 1.0}
    assert gateway.decoders[1].state.pulls == 1


async def test_kv_that_arrived_is_no_orphan(gateway: Deployment) -> None:
    for api in OPENAI_APIS:
        for stream in (True, False):
            assert (await gateway.ask(request(api, stream=stream))).is_done
    assert gateway.metrics("pdproxy_kv_orphans_total") == {}
    assert releases(*gateway.decoders) == []


FAILING: list[tuple[str, dict[str, Any]]] = [
    ("refuse_status", {"status": 500}),
    ("refuse_status", {"status": 503}),
    ("refuse_status", {"status": 429}),
    ("reset_before_headers", {}),
]


@pytest.mark.fault(91)
@pytest.mark.parametrize(("action", "fields"), FAILING)
async def test_release_that_fails_is_tried_again(deploy: Deploy, action: str, fields: dict[str, Any]) -> None:
    gateway = await deploy(1, 2)
    gateway.decoders[1].faults.add(action, times=1, **fields)
    await leave_during_the_hand_over(gateway)
    assert await released(gateway) == {("released",): 1.0}
    assert len(releases(*gateway.decoders)) == 2
    assert gateway.metrics("pdproxy_instance_consecutive_failures") == {}
    assert pinned(gateway) == (0, 0)


@pytest.mark.fault(91)
async def test_release_waits_for_decoders_that_are_down(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "proxy.connectors.releaser")
    gateway = await deploy(1, 2, admission={"wait_seconds": 5.0})
    health, checks = gateway.worker.health, gateway.worker.settings.health
    decoders = gateway.worker.pools.decode.all_backends()
    await leave_during_the_hand_over(gateway)
    for backend in decoders * checks.fall:
        health.on_probe(backend, False, "down")
    await until(lambda: "yet" in caplog.text, "an attempt that finds no decoder")
    assert len(gateway.prefillers[0].pins) == 1
    facts = EngineFacts((0, 32), None)
    for backend in decoders * checks.rise:
        health.on_probe(backend, True, "up again")
        health.set_engine_facts(backend, facts)
    assert await released(gateway) == {("released",): 1.0}


# Not released


async def test_engines_that_cannot_release_are_not_asked_to(deploy: Deploy) -> None:
    gateway = await deploy(2, 2, engine=OLD)
    await leave_during_the_hand_over(gateway, request(Api.CHAT, "four words of text", stream=True))
    assert await released(gateway) == {("unsupported",): 1.0}
    assert releases(*gateway.decoders) == []
    count, tokens = pinned(gateway)
    assert count == 1
    assert tokens > 1
    gateway.expects_pinned = 1


async def test_among_several_versions_one_that_can_release_is_asked(deploy: Deploy) -> None:
    old, new = SimulatedEngine(role="decode", profile_name="v0.27"), SimulatedEngine(role="decode")
    gateway = await deploy(1, [old, new])
    await leave_during_the_hand_over(gateway)
    assert await released(gateway) == {("released",): 1.0}
    assert (releases(old), len(releases(new))) == ([], 1)


async def test_releaser_releases_no_kv_if_it_is_disabled(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, kv={"release": "never"})
    await leave_during_the_hand_over(gateway)
    assert await released(gateway) == {}
    assert releases(*gateway.decoders) == []
    assert pinned(gateway)[0] == 1
    gateway.expects_pinned = 1


async def test_release_that_is_refused_is_not_repeated(deploy: Deploy) -> None:
    """The 400 of another handler does not name the model."""
    gateway = await deploy(1, 2)
    gateway.decoders[1].faults.add("refuse_status", status=400)
    await leave_during_the_hand_over(gateway)
    assert await released(gateway) == {("failed",): 1.0}
    assert len(releases(*gateway.decoders)) == 1
    assert pinned(gateway)[0] == 1
    gateway.expects_pinned = 1


async def test_unanswered_release_is_abandoned_after_a_while(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, admission={"wait_seconds": 0.5})
    for decoder in gateway.decoders:
        decoder.faults.add("refuse_status", status=500)
    await gateway.ask(request(Api.COMPLETIONS))
    assert await released(gateway) == {("failed",): 2.0}
    assert len(releases(*gateway.decoders)) > 2
    assert pinned(gateway)[0] == 2
    gateway.expects_pinned = 2


async def test_prefiller_that_is_down_has_nothing_to_release(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    prefillers = gateway.worker.pools.prefill
    (prefiller,) = prefillers.all_backends()
    await leave_during_the_hand_over(gateway)
    for _ in range(gateway.worker.settings.health.fall):
        gateway.worker.health.on_probe(prefiller, False, "gone")
    assert await released(gateway) == {("failed",): 1.0}
    assert releases(*gateway.decoders) == []
    gateway.expects_pinned = 1


async def test_releases_are_few_at_a_time(deploy: Deploy) -> None:
    gateway = await deploy(1, 1)
    releaser = gateway.worker.releaser
    (prefiller,) = gateway.worker.pools.prefill.all_backends()
    kv = PrefilledKv(prefiller, b'{"do_remote_prefill":true}', KvTransfer.ASCEND_MOONCAKE, 1, {})
    for _ in range(300):
        releaser.add_orphan(kv, ())
    assert releaser.pending_count == 256
    assert await released(gateway) == {("released",): 256.0, ("failed",): 44.0}
    gateway.expects_inexact_pins = True


# Accounted for


async def test_prefiller_that_keeps_orphans_is_passed_over(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, engine=OLD)
    await leave_during_the_hand_over(gateway)
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    assert [len(generations(prefiller)) for prefiller in gateway.prefillers] == [1, 4]
    gateway.expects_pinned = 1


async def test_pinned_kv_goes_when_its_time_is_over(deploy: Deploy) -> None:
    gateway = await deploy(engine={**OLD, "pin_seconds": 0.05}, kv={"pin_seconds": 0.05})
    await leave_during_the_hand_over(gateway)
    await until(lambda: pinned(gateway) == (0, 0), "the end of the pin")


async def test_instance_with_pinned_kv_can_be_removed_and_takes_it_along(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, engine=OLD)
    await leave_during_the_hand_over(gateway)
    gone = gateway.prefillers[0]
    gateway.roster.remove_backend(Role.PREFILL, gone.host, gone.port)
    assert [backend.port for backend in gateway.roster.drop_drained_backends()] == [gone.port]
    assert pinned(gateway) == (0, 0)
    gateway.expects_pinned = 1
    gateway.expects_inexact_pins = True


SUSPECTS = [
    # how the prefiller fails, and whether it may have pinned KV
    ("lost_response", {}, 1),
    ("reset_before_headers", {}, 1),
    ("invalid_json", {}, 1),
    ("truncated_json", {}, 1),
    ("refuse_status", {"status": 500}, 1),
    ("refuse_status", {"status": 503}, 0),
    ("refuse_status", {"status": 429}, 0),
    ("refuse_status", {"status": 400}, 0),
    ("missing_kv_params", {}, 0),
]


@pytest.mark.parametrize(("action", "fields", "suspected"), SUSPECTS)
async def test_lost_answer_of_a_prefiller_may_have_left_kv(
    deploy: Deploy, action: str, fields: dict[str, Any], suspected: int
) -> None:
    gateway = await deploy(2, 1)
    gateway.prefillers[0].faults.add(action, times=1, **fields)
    await gateway.ask(request(Api.CHAT))
    assert pinned(gateway)[0] == suspected
    assert [pin.is_suspected for pin in gateway.worker.pinned_kv.current_pins()] == [True] * suspected
    assert gateway.metrics("pdproxy_kv_orphans_total") == {}
    assert releases(*gateway.decoders) == []
    gateway.expects_pinned = len(gateway.prefillers[0].pins)


async def test_client_that_leaves_during_the_prefill_leaves_no_kv(deploy: Deploy) -> None:
    gateway = await deploy()
    (prefiller,) = gateway.prefillers
    prefiller.faults.add("hang_before_headers")
    async with gateway.asking(request(Api.CHAT)) as client:
        await prefiller.wait_until(lambda state: state.live == 1)
        await client.leave()
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")
    assert pinned(gateway) == (0, 0)


BACKEND = Backend(Role.PREFILL, "p", 1)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure.CONNECT, False),
        (Failure.RESET, True),
        (Failure.TIMEOUT, True),
        (Failure.BAD_ANSWER, True),
        (Failure.BROKEN, True),
        (Failure.MISSING_KV, False),
    ],
)
def test_answer_that_was_lost_may_have_pinned(failure: Failure, expected: bool) -> None:
    assert may_have_pinned_kv(UpstreamError(failure, BACKEND, "")) is expected


@pytest.mark.parametrize(
    ("status", "expected"), [(500, True), (502, True), (503, False), (429, False), (400, False), (404, False)]
)
def test_error_status_may_have_pinned_if_it_came_after_the_work(status: int, expected: bool) -> None:
    error = UpstreamError(Failure.STATUS, BACKEND, "", engine_status=status, body=orjson.dumps({}))
    assert may_have_pinned_kv(error) is expected


# At the end of the worker


async def test_worker_that_ends_lets_pending_releases_finish(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    await leave_during_the_hand_over(gateway)
    assert gateway.worker.releaser.pending_count == 1
    await gateway.end()
    assert gateway.worker.releaser.pending_count == 0
    assert not gateway.prefillers[0].pins
    assert gateway.worker.pinned_kv.current_pins() == []


async def test_worker_that_ends_does_not_wait_for_a_release_that_hangs(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    gateway.decoders[1].faults.add("hang_before_headers")
    await leave_during_the_hand_over(gateway)
    await gateway.end()
    assert gateway.worker.releaser.pending_count == 0
    assert gateway.metrics("pdproxy_kv_released_total") == {}, "it was cut off before its time was up"
    gateway.expects_pinned = 1
