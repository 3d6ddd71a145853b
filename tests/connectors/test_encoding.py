"""Encoders in front of connectors: what they are sent, and that nothing is left whatever they and the client do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load, Role
from proxy.connectors.encoding import find_media_parts
from proxy.settings import Cost
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, request, until
from tests.canned import CannedEngine, http
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.parsing import parse

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}, "uuid": "u1"}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
VIDEO = {"video_url": {"url": "http://v"}}
TEXT = {"type": "text", "text": "what is this?"}

# With media go one prefiller and one decoder, so that whatever is asked twice shows.
CONNECTORS = ["vllm_pull", "vllm_store", "mooncake_bootstrap", "ascend_layerwise", "plain"]


def body_with(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**request(Api.CHAT, max_tokens=3, **fields), "messages": [{"role": "user", "content": [TEXT, *parts]}]}


async def encodes(engine: SimulatedEngine, items: int) -> None:
    """Wait until an encoder has `count` requests."""
    await until(lambda: len(generations(engine)) == items, f"{items} items")


class Encoders:
    """Two encoders, and gateways in front of which they stand."""

    def __init__(self, engines: Sequence[SimulatedEngine], deploy: Deploy) -> None:
        self.engines = engines
        self._deploy = deploy

    async def deploy(self, *args: Any, engines: Sequence[Any] | None = None, **sections: Any) -> Deployment:
        engines = self.engines if engines is None else engines
        gateway = await self._deploy(*args, encode=[f"{engine.host}:{engine.port}" for engine in engines], **sections)
        for engine in engines:
            gateway.worker.joiner.join_when_ready(Backend(Role.ENCODE, engine.host, engine.port))
        pool = gateway.worker.pools.pool_of(Role.ENCODE)
        up = "pdproxy_instance_up"
        await until(lambda: sum(role == "encode" for _, role in gateway.metrics(up)) == len(engines), "encoders")
        assert len(pool.eligible_backends()) == len(engines)
        return gateway

    def leave(self, gateway: Deployment) -> None:
        """Have none any more."""
        for engine in self.engines:
            gateway.worker.joiner.remove_instance(Role.ENCODE, engine.host, engine.port)

    @property
    def seen(self) -> list[Any]:
        """The items that encoders got, in order."""
        return sorted(generations(*self.engines), key=lambda seen: int(seen.headers["x-request-id"].split(":")[1]))


@pytest.fixture
async def encoders(deploy: Deploy) -> AsyncIterator[Encoders]:
    """Start encoders before every gateway, and end them after all gateways."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(SimulatedEngine()) for _ in range(2)]
        yield Encoders(engines, deploy)
        await until(lambda: not any(engine.state.live for engine in engines), "idle encoders")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_each_item_is_encoded_before_anybody_else_is_asked(
    encoders: Encoders, connector: str, stream: bool
) -> None:
    gateway = await encoders.deploy(connector=connector)
    body = body_with(IMAGE, AUDIO, VIDEO, stream=stream, mm_processor_kwargs={"x": 1}, temperature=0)
    answer = await gateway.ask(body, traceparent="t")
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert [seen.body for seen in encoders.seen] == [
        {
            "model": "sim",
            "mm_processor_kwargs": {"x": 1},
            "messages": [{"role": "user", "content": [item]}],
            "max_tokens": 1,
            "stream": False,
        }
        for item in (IMAGE, AUDIO, VIDEO)
    ]
    ids = [seen.headers["x-request-id"].split(":") for seen in encoders.seen]
    assert [(index, len(attempt), len(random)) for attempt, index, random in ids] == [
        ("0", 32, 6),
        ("1", 32, 6),
        ("2", 32, 6),
    ]
    assert len({attempt for attempt, _, _ in ids}) == 1
    assert {seen.headers["traceparent"] for seen in encoders.seen} == {"t"}
    assert all(generations(engine) for engine in encoders.engines)
    assert all(seen.body["messages"] == body["messages"] for seen in generations(*gateway.engines))
    assert gateway.metrics("pdproxy_stage_duration_seconds_count")[("encode",)] == 1
    assert gateway.metrics("pdproxy_request_end_total") == {("--",): 1}


@pytest.mark.fault(156)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "mooncake_bootstrap", "plain"])
async def test_media_are_encoded_once_and_fetched_from_their_encoder(
    deploy: Deploy, connector: str, stream: bool
) -> None:
    async with SimulatedEngine(ec_role="producer") as encoder:
        encoders = Encoders([encoder], deploy)
        gateway = await encoders.deploy(connector=connector, engine={"ec_role": "consumer"})
        for text in ("one", "two"):
            body = body_with(IMAGE, AUDIO, IMAGE | {"uuid": text}, stream=stream, ec_transfer_params={"a": "client's"})
            answer = await gateway.ask(body)
            assert answer.is_done
            assert b"ec_transfer_params" not in answer.body
        assert [engine.state.encodings for engine in gateway.engines] == [0] * len(gateway.engines)
        assert {engine.state.encodings_fetched for engine in gateway.engines} == {4}
        sent = [seen.body["ec_transfer_params"] for seen in generations(*gateway.engines)]
        assert all(len(places) == 3 and "a" not in places for places in sent)
    await until(lambda: not encoder.state.live, "an idle encoder")


@pytest.mark.fault(156)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "mooncake_bootstrap", "plain"])
async def test_encoders_send_media_to_the_engine_that_gets_the_request(
    deploy: Deploy, connector: str, stream: bool
) -> None:
    """The engine fails a request whose encoded media do not arrive (ECMooncakeConnector)."""
    media: dict[str, Any] = {"ec_connector": "ECMooncakeConnector", "dev_mode": True}
    async with SimulatedEngine(ec_role="producer", **media) as encoder:
        engines = media | {"ec_role": "consumer", "waiting_seconds": 5.0}
        gateway = await Encoders([encoder], deploy).deploy(2, 2, connector=connector, engine=engines)
        bodies = [body_with(IMAGE | {"uuid": f"{n}"}, AUDIO | {"uuid": f"a{n}"}, stream=stream) for n in range(4)]
        for body in bodies:
            assert (await gateway.ask(body | {"ec_transfer_params": {"a": "client's"}})).is_done
        assert sum(engine.state.encodings for engine in gateway.engines) == 0
        assert sum(engine.state.encodings_fetched for engine in gateway.engines) == 2 * len(bodies)
        assert encoder.state.encodings == 2 * len(bodies)
        names = [item["transfer_id"] for seen in generations(encoder) for item in items_of(seen)]
        assert len(set(names)) == 2 * len(bodies)
        assert gateway.metrics("pdproxy_request_end_total") == {("--",): len(bodies)}
    await until(lambda: not encoder.state.live, "an idle encoder")


def items_of(seen: Any) -> list[dict[str, str]]:
    """Return the transfers of media that a request names."""
    items: list[dict[str, str]] = seen.body["ec_transfer_params"]["ec_items"]
    return items


@pytest.mark.parametrize("answer", [b"no JSON", b"[]", b'{"ec_transfer_params": 1}'])
async def test_odd_answer_of_an_encoder_is_no_failure(deploy: Deploy, answer: bytes) -> None:
    async with CannedEngine("both", [http(answer)]) as encoder:
        gateway = await Encoders([], deploy).deploy(engines=[encoder])
        assert (await gateway.ask(body_with(IMAGE))).is_done
        assert all("ec_transfer_params" not in seen.body for seen in generations(*gateway.engines))
        await gateway.end()


@pytest.mark.parametrize("body", [request(Api.CHAT), request(Api.COMPLETIONS), body_with()])
async def test_text_needs_no_encoder(encoders: Encoders, body: dict[str, Any]) -> None:
    gateway = await encoders.deploy()
    encoders.leave(gateway)
    assert (await gateway.ask(body)).is_done
    assert not encoders.seen
    async with gateway.session.get(gateway.url + "/readyz") as ready:
        assert ready.status == 200


async def test_without_encoders_prefillers_get_media_at_once(deploy: Deploy) -> None:
    gateway = await deploy()
    assert (await gateway.ask(body_with(IMAGE))).is_done
    assert ("encode",) not in gateway.metrics("pdproxy_stage_duration_seconds_count")


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 503}, {"status": 429}, None], ids=str)
async def test_another_encoder_is_tried_before_any_prefill(encoders: Encoders, fault: dict[str, Any] | None) -> None:
    gateway = await encoders.deploy()
    failing, other = encoders.engines
    failing.faults.add("refuse_status" if fault else "reset_before_headers", **(fault or {}))
    # The other one is so busy that it is chosen only for want of a better one.
    pool = gateway.worker.pools.pool_of(Role.ENCODE)
    with pool.make_lease(
        PickRequest.make_for_load(Load(compute_tokens=1_000_000), avoided_backends=[_backend(gateway, failing)])
    ):
        assert (await gateway.ask(body_with(IMAGE))).is_done
    assert [len(generations(engine)) for engine in (failing, other)] == [1, 1]
    assert len(generations(*gateway.prefillers)) == 1
    results = gateway.metrics("pdproxy_instance_requests_total")
    failed = {name: count for (name, result, role), count in results.items() if role == "encode" and result != "ok"}
    assert set(failed) == {f"{failing.host}:{failing.port}"}
    assert [stage for _, stage in gateway.metrics("pdproxy_retries_total")] == ["encode"]


async def test_refusal_of_an_encoder_is_a_client_error(encoders: Encoders) -> None:
    gateway = await encoders.deploy()
    for engine in encoders.engines:
        engine.faults.add("refuse_status", status=400, body={"error": {"message": "no image"}})
    answer = await gateway.ask(body_with(IMAGE))
    assert (answer.status, answer.json) == (400, {"error": {"message": "no image"}})
    assert len(encoders.seen) == 1
    assert not generations(*gateway.engines)
    assert gateway.metrics("pdproxy_request_end_total") == {("SE",): 1}


async def test_encoder_that_hangs_costs_one_deadline(encoders: Encoders) -> None:
    gateway = await encoders.deploy(timeouts={"prefill_seconds": 0.05, "prefill_seconds_per_1k_tokens": 0.0})
    for engine in encoders.engines:
        engine.faults.add("hang_before_headers")
    answer = await gateway.ask(body_with(IMAGE))
    assert (answer.status, answer.error["code"]) == (504, "encode_timeout")
    assert len(encoders.seen) == 1
    assert not generations(*gateway.engines)
    assert gateway.metrics("pdproxy_request_end_total") == {("sE",): 1}


async def test_without_a_healthy_encoder_media_is_refused(encoders: Encoders) -> None:
    gateway = await encoders.deploy()
    encoders.leave(gateway)
    answer = await gateway.ask(body_with(IMAGE))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_encode")
    assert gateway.metrics("pdproxy_request_end_total") == {("PE",): 1}
    assert gateway.metrics("pdproxy_rejected_total") == {("no_healthy_encode",): 1}


@pytest.mark.fault(35)
@pytest.mark.parametrize("requests", [1, 3])
async def test_media_wait_while_all_encoders_are_restarting(encoders: Encoders, requests: int) -> None:
    """A single request finds out that both are gone, and waits although both have refused it."""
    gateway = await encoders.deploy(admission={"wait_seconds": 60.0})
    for engine in encoders.engines:
        await engine.kill()
    pool = gateway.worker.pools.pool_of(Role.ENCODE)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(gateway.ask(body_with(IMAGE))) for _ in range(requests)]
        await until(pool.are_all_restarting, "the encoders to be missed")
        assert (await gateway.ask(request(Api.CHAT))).status == 200, "text needs none"
        for engine in encoders.engines:
            await engine.restart()
        for backend in pool.all_backends():  # what the next health check would find
            gateway.worker.health.on_probe(backend, True, "passed its health check")
    assert [task.result().status for task in asked] == [200] * requests


@pytest.mark.fault(62)
async def test_item_of_a_removed_encoder_moves_to_another_encoder(encoders: Encoders) -> None:
    gateway = await encoders.deploy()
    for engine in encoders.engines:
        engine.faults.add("hang_before_headers")
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(gateway.ask(body_with(IMAGE)))
        await until(lambda: len(generations(*encoders.engines)) == 1, "the item at either encoder")
        leaving, other = sorted(encoders.engines, key=lambda engine: not generations(engine))
        other.faults.clear()
        body = {"type": "encode", "instances": f"{leaving.host}:{leaving.port}", "evacuate_after": 0}
        async with gateway.session.post(gateway.url + "/instances/remove", json=body) as response:
            assert response.status == 200
    assert asked.result().status == 200
    assert len(generations(other)) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_ends_what_is_being_encoded(encoders: Encoders, stream: bool) -> None:
    gateway = await encoders.deploy()
    for engine in encoders.engines:
        engine.faults.add("hang_before_headers")
    async with gateway.asking(body_with(IMAGE, AUDIO, stream=stream)) as client:
        for engine in encoders.engines:
            await encodes(engine, 1)
        await client.leave()
        for engine in encoders.engines:
            await engine.wait_until(lambda state: state.disconnects == 1)
    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")
    assert not generations(*gateway.engines)
    assert gateway.metrics("pdproxy_request_end_total") == {("CE",): 1}
    results = gateway.metrics("pdproxy_instance_requests_total")
    assert {result for (_, result, _) in results} == {"abandoned"}


async def test_first_item_that_fails_ends_the_others(encoders: Encoders) -> None:
    failing, hanging = encoders.engines
    gateway = await encoders.deploy()
    hanging.faults.add("hang_before_headers")
    failing.faults.add("refuse_status", status=400)
    assert (await gateway.ask(body_with(*[IMAGE] * 4))).status == 400
    await hanging.wait_until(lambda state: state.disconnects >= 1)
    assert not generations(*gateway.engines)


async def test_bounded_number_of_items_is_encoded_at_a_time(encoders: Encoders) -> None:
    gateway = await encoders.deploy(engines=encoders.engines[:1], fanout={"concurrency": 3})
    engine = encoders.engines[0]
    engine.faults.add("hang_before_headers")
    async with gateway.asking(body_with(*[IMAGE] * 10)):
        await encodes(engine, 3)
        tasks = [task for task in asyncio.all_tasks() if "Encoding" in getattr(task.get_coro(), "__qualname__", "")]
        assert len(tasks) == 3
        assert len(encoders.seen) == 3
    await engine.wait_until(lambda state: not state.live)


async def test_item_is_charged_to_its_encoder_only(encoders: Encoders) -> None:
    gateway = await encoders.deploy(
        engines=encoders.engines[:1], cost={"image_tokens": 100, "audio_tokens": 7}, fanout={"concurrency": 8}
    )
    (engine,) = encoders.engines[:1]
    engine.faults.add("hang_before_headers")
    async with gateway.asking(body_with(IMAGE, AUDIO)):
        await encodes(engine, 2)
        assert gateway.scoreboard.load_of(_backend(gateway, engine).slot).compute_tokens == 107
    await engine.wait_until(lambda state: not state.live)


async def test_room_for_a_request_is_kept_while_it_is_encoded(encoders: Encoders) -> None:
    """Otherwise the next one would take what admission saw for this one, and both would crowd the decoder."""
    gateway = await encoders.deploy(
        engines=encoders.engines[:1], admission={"max_running_prefill": 1, "max_running_decode": 1}
    )
    (engine,) = encoders.engines[:1]
    engine.faults.add("hang_before_headers", path=Api.CHAT.path, times=1)
    async with gateway.asking(body_with(IMAGE)) as client:
        await encodes(engine, 1)
        other = asyncio.create_task(gateway.ask(request(Api.CHAT)))
        await until(
            lambda: gateway.worker.request_service.admission_queue.waiting_count or other.done(), "the other to wait"
        )
        assert not other.done()
        assert not generations(*gateway.engines)
        await client.leave()
        assert (await other).is_done
    # Neither engine knows the room, so no abort is sent.
    results = gateway.metrics("pdproxy_instance_requests_total")
    assert sorted((role, result) for _, result, role in results) == [
        ("decode", "ok"),
        ("encode", "abandoned"),
        ("prefill", "ok"),
    ]


async def test_item_is_sent_again_where_a_connection_was_closed_just_then(encoders: Encoders) -> None:
    """An item that was encoded twice leaves nothing behind, so it costs no attempt and counts against no encoder."""
    gateway = await encoders.deploy(engines=encoders.engines[:1])
    encoders.engines[0].faults.add("close_reused")
    for _ in range(3):
        assert (await gateway.ask(body_with(IMAGE))).is_done
    results = gateway.metrics("pdproxy_instance_requests_total")
    assert {result for _, result, role in results if role == "encode"} == {"ok"}


async def test_repeated_attempt_encodes_again_and_is_counted(
    encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gateway = await encoders.deploy(prefillers=2)
    for prefiller in gateway.prefillers:
        prefiller.faults.add("refuse_status", status=500, times=1)
    encoders.engines[0].faults.add("refuse_status", path=Api.CHAT.path, status=503, times=1)
    assert (await gateway.ask(body_with(IMAGE))).is_done
    lines = [fields for record in caplog.records if "t_stream" in (fields := getattr(record, "fields", {}))]
    (line,) = lines
    assert line["attempts"] == len(encoders.seen)
    assert line["t_encode"] >= 0.0
    assert len({seen.headers["x-request-id"] for seen in encoders.seen}) == len(encoders.seen)


async def test_encoders_are_instances_like_others(encoders: Encoders) -> None:
    gateway = await encoders.deploy(engines=encoders.engines[:1])
    one, other = (f"{engine.host}:{engine.port}" for engine in encoders.engines)
    url = gateway.url + "/instances/"
    async with gateway.session.post(url + "add", json={"type": "encode", "instances": other}) as answer:
        told = await answer.json()
    assert (told["current_encode_instances"], told["joining_encode_instances"]) == ([one], [other])
    await until(lambda: len(gateway.worker.pools.pool_of(Role.ENCODE).eligible_backends()) == 2, "the other one")
    async with gateway.session.post(url + "remove", json={"type": "encode", "instances": one}) as answer:
        assert (await answer.json())["current_encode_instances"] == [other]
    assert (await gateway.ask(body_with(IMAGE))).is_done
    assert [len(generations(engine)) for engine in encoders.engines] == [0, 1]
    bad = {"type": "decode", "instances": other}
    async with gateway.session.post(url + "add", json=bad) as answer:
        assert answer.status == 400


async def test_gateway_without_encoders_says_so(deploy: Deploy) -> None:
    gateway = await deploy()
    url = gateway.url + "/instances/add"
    async with gateway.session.post(url, json={"type": "encode", "instances": "h:1"}) as answer:
        assert (answer.status, (await answer.json())["error"]["message"]) == (
            400,
            "this gateway has no encode instances",
        )


async def test_answer_that_is_no_http_blames_the_encoder(encoders: Encoders) -> None:
    async with CannedEngine("both", [b"nonsense\r\n\r\n"]) as broken, CannedEngine("both", [http(b"{}")]) as good:
        gateway = await encoders.deploy(engines=[broken, good])
        for _ in range(2):
            assert (await gateway.ask(body_with(IMAGE))).is_done
        assert broken.received
        assert len(good.received) == 2
        await gateway.end()


@pytest.mark.parametrize(
    ("messages", "items"),
    [
        ([{"role": "system", "content": "s"}, {"role": "user", "content": [IMAGE, TEXT, AUDIO]}], [IMAGE, AUDIO]),
        ([{"role": "user", "content": [IMAGE]}, {"role": "tool", "content": [VIDEO]}], [IMAGE, VIDEO]),
        (
            [{"content": [{"type": "audio_url", "audio_url": {"url": "u"}}]}],
            [{"type": "audio_url", "audio_url": {"url": "u"}}],
        ),
        ([{"content": [{"type": "image_embeds", "image_embeds": "x"}]}], []),
        ([{"content": [{"type": ["image_url"]}, 7, None, "x", []]}], []),
        ([{"content": {"image_url": 1}}, {"content": None}, {}, None, 7, []], []),
        ({"content": [IMAGE]}, []),
        (None, []),
    ],
)
def test_media_is_what_an_encoder_works_on(messages: Any, items: list[Any]) -> None:
    call = parse(Api.CHAT, orjson.dumps({"messages": messages}), Cost())
    assert list(find_media_parts(call)) == items


def _backend(gateway: Deployment, engine: Any) -> Any:
    pool = gateway.worker.pools.pool_of(Role.ENCODE)
    return next(backend for backend in pool.all_backends() if backend.port == engine.port)


@pytest.mark.fault(104)
async def test_encoder_that_refuses_costs_no_request(encoders: Encoders) -> None:
    gateway = await encoders.deploy(retry={"max_attempts": 2, "budget_share": 0.0, "budget_wait_seconds": 0.0})
    bad, _ = encoders.engines
    bad.faults.add("refuse_status", status=503)
    for _ in range(20):
        assert (await gateway.ask(body_with(IMAGE, AUDIO))).is_done
    assert len(generations(bad)) <= 8


@pytest.mark.fault(105)
async def test_requests_wait_while_all_encoders_refuse(encoders: Encoders) -> None:
    gateway = await encoders.deploy(admission={"wait_seconds": 60.0})
    for engine in encoders.engines:
        engine.faults.add("refuse_status", status=503)
    waiting = [asyncio.create_task(gateway.ask(body_with(IMAGE))) for _ in range(3)]
    await until(lambda: all(generations(engine) for engine in encoders.engines), "the refusals")
    for engine in encoders.engines:
        engine.faults.clear()
    assert all(answer.is_done for answer in await asyncio.gather(*waiting))
