"""The layerwise push: what each leg says and when, who may call back, and what becomes of a decoder that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import pytest

from proxy.common.backend import Load
from proxy.connectors.ascend_layerwise import AscendLayerwise
from proxy.dialects.call import Call
from proxy.observe.timeline import Timeline
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy
from tests.connectors.pushing import TEXT, PushDecoder, PushEngine, PushPrefiller, SideChannel, callback, engine_id
from tests.deployment import Deployment, generations
from tests.parsing import parse

Start = Callable[..., Awaitable["Pushing"]]


@dataclass
class Pushing:
    """A gateway between engines that push."""

    gateway: Deployment
    prefillers: list[PushPrefiller]
    decoders: list[PushDecoder]

    @property
    def connector(self) -> AscendLayerwise:
        connector = self.gateway.worker.request_service.connector
        assert isinstance(connector, AscendLayerwise)
        return connector

    async def post(self, body: bytes, path: str = "/v1/metaserver", method: str = "POST") -> tuple[int, Any]:
        """Call back as a stranger."""
        url = self.connector.metaserver.replace("/v1/metaserver", path)
        async with self.gateway.session.request(method, url, data=BytesIO(body)) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def start(deploy: Deploy) -> AsyncIterator[Start]:
    """Start gateways with given numbers of engines. No attempt may wait for a callback at the end of the test."""
    started: list[Pushing] = []

    async def start(prefillers: int = 1, decoders: int = 1, **sections: Any) -> Pushing:
        channel = SideChannel()
        prefilling = [PushPrefiller(channel, "prefill") for _ in range(prefillers)]
        decoding = [PushDecoder(channel, "decode") for _ in range(decoders)]
        gateway = await deploy(cast("Any", prefilling), cast("Any", decoding), connector="ascend_layerwise", **sections)
        started.append(Pushing(gateway, prefilling, decoding))
        return started[-1]

    yield start
    for pushing in started:
        await until(lambda pushing=pushing: not pushing.connector.callbacks.pending_count, "no pending callback")


def body_of(engine: PushEngine, number: int = 0) -> Any:
    return orjson.loads(engine.received[number].body)


def load(pushing: Pushing, engine: PushEngine) -> Load:
    pools = pushing.gateway.worker.pools
    backends = (*pools.prefill.all_backends(), *pools.decode.all_backends())
    (slot,) = (backend.slot for backend in backends if backend.port == engine.port)
    return pushing.gateway.scoreboard.load_of(slot)


async def is_left(*engines: PushEngine) -> None:
    """Wait until the gateway has closed a connection to each of these engines in the middle of a request."""
    await until(lambda: all(engine.state.disconnects == 1 for engine in engines), "connections to be dropped")


def waits_for(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await event.wait()

    return wait


# Bodies of the legs


@pytest.mark.parametrize("resume", ["off", "exact"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_decoder_is_asked_first_and_the_prefiller_as_it_says(
    start: Start, api: Api, stream: bool, resume: str
) -> None:
    pushing = await start(resume={"mode": resume})
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    body = request(api, stream=stream, min_tokens=3, top_p=0.5)
    answer = await pushing.gateway.ask(body, x_request_id="the-clients")
    assert (answer.is_done, answer.text) == (True, TEXT)

    (decode,), (prefill,) = decoder.received, prefiller.received
    asked = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": pushing.connector.metaserver}
    assert body_of(decoder)["kv_transfer_params"] == asked
    assert body_of(decoder)["min_tokens"] == 3
    one_token = {"stream": False, "max_tokens": 1, "min_tokens": 1}
    assert body_of(prefiller) == {**body, **one_token, "kv_transfer_params": callback(engine_id(decode))}
    assert prefill.path == decode.path == api.path
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] != "the-clients"
    assert decoder.statuses == [200]
    stages = {stage for (stage,) in pushing.gateway.metrics("pdproxy_stage_duration_seconds_count")} - {"queue"}
    assert stages == {"handoff", "prefill", "stream"} | ({"first_token"} if stream else set())


@pytest.mark.parametrize("stream", [True, False])
async def test_prefiller_knows_how_much_of_the_prompt_was_cached(start: Start, stream: bool) -> None:
    pushing = await start()
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await pushing.gateway.ask(request(Api.CHAT, **options))
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 5


async def test_every_sample_has_a_separate_id(start: Start) -> None:
    pushing = await start()
    answer = await pushing.gateway.ask(request(Api.COMPLETIONS, n=3, stream=True))
    assert answer.texts == dict.fromkeys(range(3), TEXT)
    ids = [received.headers["x-request-id"] for received in pushing.decoders[0].received]
    assert len(set(ids)) == 3
    assert {body_of(pushing.prefillers[0], n)["kv_transfer_params"]["request_id"] for n in range(3)} == {
        f"cmpl-{attempt_id}-0" for attempt_id in ids
    }


def a_call(pushing: Pushing, **kv_params: object) -> Call:
    body = orjson.dumps(request(Api.CHAT))
    return replace(parse(Api.CHAT, body, pushing.gateway.worker.settings.cost), kv_params=kv_params)


async def test_members_of_the_calls_own_are_added_on_both_legs(start: Start) -> None:
    """The members that resume a chat are such members."""
    pushing = await start()
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    call = a_call(pushing, prompt_token_ids=orjson.Fragment(b"[1, 2]"))
    async with pushing.connector.open_attempt(call, call.make_pick_request(), Timeline()) as attempt:
        await attempt.response.read_body()
        attempt.record_kv_arrival()
    theirs = callback(engine_id(decoder.received[0]))
    assert body_of(prefiller)["kv_transfer_params"] == {**theirs, "prompt_token_ids": [1, 2]}
    assert body_of(decoder)["kv_transfer_params"]["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize("field", [{"use_beam_search": True}, {"prompt_logprobs": 1}])
async def test_calls_without_handoff_are_refused_before_any_engine(start: Start, field: dict[str, Any]) -> None:
    pushing = await start()
    assert (await pushing.gateway.ask(request(Api.CHAT, **field))).status == 400
    assert not pushing.decoders[0].received


async def test_requests_name_ranks_of_engines_behind_one_address(start: Start) -> None:
    pushing = await start(balance={"prefill_dp_ranks": 2, "decode_dp_ranks": 3})
    for _ in range(2):
        assert (await pushing.gateway.ask(request(Api.CHAT))).status == 200
    for engine, ranks in ((pushing.prefillers[0], ["0", "1"]), (pushing.decoders[0], ["0", "1"])):
        assert [received.headers["x-data-parallel-rank"] for received in engine.received] == ranks


# When


async def test_both_engines_are_reserved_before_the_first_leg_and_released_at_the_end(
    start: Start,
) -> None:
    pushing = await start()
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    room, prefill = asyncio.Event(), asyncio.Event()
    decoder.before, prefiller.before, decoder.start = waits_for(room), waits_for(prefill), asyncio.Event()
    async with pushing.gateway.asking(request(Api.CHAT, stream=True)) as client:
        await until(lambda: decoder.received, "the decode leg")
        assert not prefiller.received
        whole = load(pushing, prefiller)
        assert whole.compute_tokens > 0
        assert whole.kv_tokens > 0
        room.set()
        await until(lambda: prefiller.received, "the prefill leg")
        assert load(pushing, prefiller) == whole
        prefill.set()
        await until(lambda: load(pushing, prefiller) == Load(), "the prefiller to be free")
        assert load(pushing, decoder).kv_tokens > 0
        decoder.start.set()
        await client.has_tokens(2)
        await until(lambda: load(pushing, decoder) == Load(), "the decoder to be free")


async def test_decoder_gets_its_own_time_after_all_that_comes_before(start: Start) -> None:
    """Its silence is the prefiller's as long as that is at work."""
    pushing = await start(
        layerwise={"callback_seconds": 10.0},
        timeouts={"prefill_seconds": 20.0, "prefill_seconds_per_1k_tokens": 0.0, "first_token_seconds": 40.0},
    )
    call = replace(a_call(pushing), stream=True)
    async with pushing.connector.open_attempt(call, call.make_pick_request(), Timeline()) as attempt:
        assert attempt.first_token_seconds == 70.0
        await attempt.response.read_body()


# Accepted callbacks


def hostile(engine_id: str) -> dict[str, tuple[bytes, int]]:
    """Bodies, and the status they are worth."""
    good = callback(engine_id)
    without = {name: value for name, value in good.items() if name != "remote_cached_tokens"}

    def spelled(**members: Any) -> bytes:
        return orjson.dumps({**good, **members})

    return {
        "an id of nobody": (spelled(request_id=f"{engine_id}x"), 404),
        "an id without what the engine adds": (spelled(request_id=engine_id.removeprefix("chatcmpl-")), 404),
        "an id of another route": (spelled(request_id=f"cmpl-{engine_id.removeprefix('chatcmpl-')}-0"), 404),
        "no id": (spelled(request_id=None), 400),
        "a list of ids": (spelled(request_id=[engine_id]), 400),
        "what a decoder is sent": (spelled(do_remote_decode=False, do_remote_prefill=True), 400),
        "a truth of another kind": (spelled(do_remote_decode=1), 400),
        "what ends a prefiller": (orjson.dumps(without), 400),
        "no number": (spelled(remote_cached_tokens="0"), 400),
        "a negative number": (spelled(remote_cached_tokens=-1), 400),
        "a truth for a number": (spelled(remote_cached_tokens=True), 400),
        "two ids": (orjson.dumps(good)[:-1] + b',"request_id":"x"}', 400),
        "a list": (orjson.dumps([good]), 400),
        "nothing": (b"", 400),
        "no JSON": (orjson.dumps(good)[:-1], 400),
        "no text": (b"\xff" + orjson.dumps(good), 400),
        "many brackets": (b'{"request_id":' + b"[" * 100_000, 400),
        "far too much": (spelled(token_ids="x" * (1024 * 1024)), 413),
    }


@pytest.mark.parametrize("name", hostile("chatcmpl-x"))
async def test_invalid_callback_is_refused_without_effect(start: Start, name: str) -> None:
    pushing = await start()
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    room = asyncio.Event()
    decoder.before = waits_for(room)
    answering = asyncio.create_task(pushing.gateway.ask(request(Api.CHAT)))
    await until(lambda: decoder.received, "the decode leg")
    body, status = hostile(engine_id(decoder.received[0]))[name]
    answered, error = await pushing.post(body)
    assert answered == status
    assert set(error) == {"error"}
    assert engine_id(decoder.received[0]) not in str(error)
    room.set()
    assert (await answering).text == TEXT
    assert len(prefiller.received) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/metaserver", 405),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/metrics", 404),
        ("POST", "/instances/add", 404),
        ("POST", "/v1/metaserver/", 404),
    ],
)
async def test_callback_port_serves_no_other_routes(start: Start, method: str, path: str, status: int) -> None:
    pushing = await start()
    await pushing.gateway.ask(request(Api.CHAT))
    assert (await pushing.post(b"{}", path, method))[0] == status


async def test_clients_cannot_call_back(start: Start) -> None:
    pushing = await start()
    async with pushing.gateway.session.post(pushing.gateway.url + "/v1/metaserver", json={}) as answer:
        assert answer.status == 404


async def test_decoder_that_calls_back_twice_is_answered_and_taken_at_its_first_word(start: Start) -> None:
    """It posts again when it has not seen the answer."""
    pushing = await start()
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    decoder.calls = 3
    assert (await pushing.gateway.ask(request(Api.CHAT))).text == TEXT
    assert decoder.statuses == [200, 200, 200]
    assert len(prefiller.received) == 1


async def test_late_callback_is_rejected(start: Start) -> None:
    pushing = await start()
    await pushing.gateway.ask(request(Api.CHAT))
    late = callback(engine_id(pushing.decoders[0].received[0]))
    assert (await pushing.post(orjson.dumps(late)))[0] == 404
    assert len(pushing.prefillers[0].received) == 1


async def test_attempt_that_failed_cannot_be_called_back_while_another_is_under_way(start: Start) -> None:
    pushing = await start(1, 2)
    (prefiller,), (first, second) = pushing.prefillers, pushing.decoders
    first.refusal = 503
    room = asyncio.Event()
    second.before = waits_for(room)
    answering = asyncio.create_task(pushing.gateway.ask(request(Api.CHAT)))
    await until(lambda: second.received, "the second attempt")
    assert (await pushing.post(orjson.dumps(callback(engine_id(first.received[0])))))[0] == 404
    assert not prefiller.received
    room.set()
    assert (await answering).text == TEXT
    assert len({received.headers["x-request-id"] for received in (*first.received, *second.received)}) == 2


async def test_decoders_can_call_back_however_few_clients_are_let_in(start: Start) -> None:
    """A decoder takes the rejection for an answer, and waits."""
    pushing = await start(listen={"max_connections": 1})
    url = urlsplit(pushing.connector.metaserver)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        assert (await pushing.gateway.ask(request(Api.CHAT))).text == TEXT
    finally:
        writer.close()
        await writer.wait_closed()


async def test_decoders_can_call_back_while_clients_are_not_served_any_more(start: Start) -> None:
    pushing = await start()
    (decoder,) = pushing.decoders
    room = asyncio.Event()
    decoder.before = waits_for(room)
    answering = asyncio.create_task(pushing.gateway.ask(request(Api.CHAT, stream=True)))
    await until(lambda: decoder.received, "the decode leg")
    pushing.gateway.worker.drain_manager.is_draining = True
    await pushing.gateway.stop_accepting()
    room.set()
    assert (await answering).text == TEXT


# Legs that fail


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("resume", ["off", "exact"])
async def test_decoder_whose_prefill_fails_is_left_and_the_work_is_repeated(
    start: Start, stream: bool, resume: str
) -> None:
    pushing = await start(2, 1, resume={"mode": resume})
    (sick, well), (decoder,) = pushing.prefillers, pushing.decoders
    sick.refusal = 500
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=stream))
    assert (answer.is_done, answer.text) == (True, TEXT)
    await is_left(decoder)
    assert (len(sick.received), len(well.received)) == (1, 1)
    assert len({received.headers["x-request-id"] for received in decoder.received}) == 2


async def test_decoder_whose_prefiller_cannot_be_reached_is_left(start: Start) -> None:
    pushing = await start(2, 1)
    (gone, _), (decoder,) = pushing.prefillers, pushing.decoders
    await gone._runner.cleanup()
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.is_done, answer.text) == (True, TEXT)
    await is_left(decoder)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_prefillers_own_error_reaches_the_client(start: Start, status: int, stream: bool) -> None:
    pushing = await start(retry={"max_attempts": 1})
    pushing.prefillers[0].refusal = status
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=stream))
    assert (answer.status, answer.error["message"]) == (status, "no")
    await is_left(pushing.decoders[0])


async def test_slow_prefill_counts_against_prefiller_only(start: Start) -> None:
    pushing = await start(timeouts={"prefill_seconds": 0.1, "first_token_seconds": 30.0})
    pushing.prefillers[0].before = waits_for(asyncio.Event())
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.error["code"]) == (504, "prefill_timeout")


async def test_decoder_that_does_not_call_back_is_given_up(start: Start) -> None:
    pushing = await start(layerwise={"callback_seconds": 0.1})
    pushing.decoders[0].calls = 0
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.error["code"]) == (504, "decode_timeout")
    assert "did not call back within 0.1 s" in answer.error["message"]
    assert not pushing.prefillers[0].received
    await is_left(pushing.decoders[0])


@pytest.mark.parametrize("status", [400, 404])
async def test_decoder_that_refuses_a_request_spares_the_prefiller(start: Start, status: int) -> None:
    pushing = await start()
    pushing.decoders[0].refusal = status
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.error["message"]) == (status, "no")
    assert not pushing.prefillers[0].received


@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_ends_with_its_decoder(start: Start, stream: bool) -> None:
    once_only = {"retry": {"max_attempts": 1}, "resume": {"mode": "off"}}
    pushing = await start(**once_only, health={"quarantine_after": 1})
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    prefiller.before = waits_for(asyncio.Event())
    answering = asyncio.create_task(pushing.gateway.ask(request(Api.CHAT, stream=stream)))
    await until(lambda: prefiller.received, "the prefill leg")
    await decoder._runner.cleanup()
    assert (await answering).status == 502
    await is_left(prefiller)
    assert pushing.gateway.metrics("pdproxy_pair_quarantines_total") == {}  # there was nothing to hand over yet


async def test_prefill_whose_answer_is_lost_costs_nothing_once_the_decoder_answers(start: Start) -> None:
    pushing = await start()
    (prefiller,), (decoder,) = pushing.prefillers, pushing.decoders
    prefiller.loss, decoder.holds = asyncio.Event(), asyncio.Event()
    async with pushing.gateway.asking(request(Api.CHAT, stream=True)) as client:
        await client.has_tokens(1)
        assert load(pushing, prefiller).compute_tokens > 0
        assert load(pushing, prefiller).kv_tokens == 0
        prefiller.loss.set()
        await until(lambda: not prefiller.state.live, "the loss")
        decoder.holds.set()
        await client.has_tokens(2)
    assert len(decoder.received) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_between_which_kv_gets_lost_are_kept_apart(start: Start, stream: bool) -> None:
    pushing = await start(health={"quarantine_after": 1}, retry={"max_attempts": 1}, resume={"mode": "off"})
    pushing.decoders[0].fails_to_load = True
    answer = await pushing.gateway.ask(request(Api.CHAT, stream=stream))
    assert answer.status == 500
    assert pushing.gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1}


@pytest.mark.parametrize("status", [400, 500])
async def test_prefill_that_fails_says_nothing_about_a_pair(start: Start, status: int) -> None:
    pushing = await start(health={"quarantine_after": 1}, retry={"max_attempts": 1})
    pushing.prefillers[0].refusal = status
    assert (await pushing.gateway.ask(request(Api.CHAT, stream=True))).status == status
    assert pushing.gateway.metrics("pdproxy_pair_quarantines_total") == {}


# Between simulated engines


async def test_decoder_that_asks_for_recomputation_is_given_another_prefill(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, connector="ascend_layerwise")
    body = request(Api.CHAT, stream=True, max_tokens=30)
    gateway.decoders[0].faults.add("recompute", tokens=10, times=1)
    answer = await gateway.ask(body)
    assert (answer.is_done, answer.text) == (True, await answer_alone(body))
    assert len(generations(*gateway.prefillers)) == 2


async def test_long_callback_reaches_the_prefiller(deploy: Deploy) -> None:
    """The block numbers of a long prompt need more than 4 KB, which are read member by member."""
    gateway = await deploy(1, 1, connector="ascend_layerwise")
    answer = await gateway.ask(request(Api.COMPLETIONS, "word " * 26_000, stream=True, max_tokens=3))
    assert answer.is_done
    (prefill,) = generations(*gateway.prefillers)
    params = prefill.body["kv_transfer_params"]
    assert len(orjson.dumps(params)) > 4 * 1024
