"""SGLang's hand-over: prefiller and decoder meet in a room, and neither can do without the other."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client, simulated_pair

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6},
    COMPLETIONS: {"prompt": "Hello there", "max_tokens": 6},
    GENERATE: {"text": "Hello there", "sampling_params": {"max_new_tokens": 6}},
}
MISSING = "Invalid request: Disaggregated request received without bootstrap room id. req.rid="


pair = partial(simulated_pair, profile_name="sglang")


def leg(body: dict[str, Any], prefiller: SimulatedEngine, room: Any = 7, **fields: Any) -> dict[str, Any]:
    place = {"bootstrap_host": prefiller.host, "bootstrap_port": prefiller.bootstrap_port, "bootstrap_room": room}
    return body | place | fields


def text(answer: Any) -> str:
    if "text" in answer:
        return str(answer["text"])
    (choice,) = answer["choices"]
    return str(choice.get("text") or choice["message"]["content"])


async def alone(client: Client, path: str, body: dict[str, Any]) -> Any:
    async with SimulatedEngine(profile_name="sglang") as engine:
        return (await client.post(engine, path, body))[1]


@pytest.mark.parametrize("path", BODIES)
async def test_both_legs_answer_once_they_have_met(client: Client, path: str) -> None:
    body = BODIES[path]
    async with pair() as (prefiller, decoder):
        request = leg(body, prefiller)
        (_, prefilled), (_, decoded) = await asyncio.gather(
            client.post(prefiller, path, request), client.post(decoder, path, request)
        )
        assert text(decoded) == text(await alone(client, path, body))
        assert text(decoded).startswith(text(prefilled))
        assert len(text(prefilled)) == 1
        assert decoder.state.pulls == 1
        assert decoder.state.local_prefills == 0
        assert prefiller.state.waiting_rooms == decoder.state.waiting_rooms == 0
        assert (await client.get(prefiller, "/_mock/state"))["rooms"] == 0


@pytest.mark.parametrize("path", BODIES)
async def test_streams_meet_as_well(client: Client, path: str) -> None:
    async with pair() as (prefiller, decoder):
        request = leg(BODIES[path], prefiller)
        prefilled, decoded = await asyncio.gather(
            client.stream(prefiller, path, request), client.stream(decoder, path, request)
        )
        assert prefilled[-1] == decoded[-1] == "[DONE]"
        assert len(decoded) > len(prefilled)


@pytest.mark.parametrize("late", ["prefill", "decode"])
async def test_order_of_the_legs_does_not_matter(client: Client, late: str) -> None:
    async with pair() as engines:
        first, second = engines if late == "decode" else reversed(engines)
        request = leg(BODIES[COMPLETIONS], engines[0])
        waiting = asyncio.create_task(client.post(first, COMPLETIONS, request))
        await first.wait_until(lambda state: state.waiting_rooms == 1)
        assert not waiting.done()
        assert (await client.post(second, COMPLETIONS, request))[0] == 200
        assert (await waiting)[0] == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_without_a_room_is_refused(client: Client, role: str, path: str) -> None:
    async with SimulatedEngine(role=role, profile_name="sglang") as engine:
        status, answer = await client.post(engine, path, BODIES[path])
        assert status == 400
        assert (answer if path != GENERATE else answer["error"])["message"].startswith(MISSING)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_leg_without_its_partner_waits_and_then_fails(client: Client, role: str) -> None:
    async with pair(waiting_seconds=0.05) as engines:
        engine = engines[0] if role == "prefill" else engines[1]
        status, answer = await client.post(engine, COMPLETIONS, leg(BODIES[COMPLETIONS], engines[0]))
        assert (status, answer["object"], answer["code"]) == (500, "error", 500)
        assert "bootstrap_room=7" in answer["message"]
        assert engine.state.waiting_rooms == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_that_fails_says_so_in_an_event(client: Client, path: str) -> None:
    async with pair(waiting_seconds=0.05) as (prefiller, decoder):
        error, end = await client.stream(decoder, path, leg(BODIES[path], prefiller))
        assert error["error"]["object"] == "error"
        assert error["error"]["code"] == 500
        assert end == "[DONE]"


async def test_native_stream_that_fails_is_an_aborted_answer(client: Client) -> None:
    async with pair(waiting_seconds=0.05) as (prefiller, decoder):
        said, _ = await client.stream(decoder, GENERATE, leg(BODIES[GENERATE], prefiller))
        assert said["meta_info"]["finish_reason"]["type"] == "abort"
        assert said["meta_info"]["finish_reason"]["status_code"] == 500


async def test_stream_has_no_status_before_its_first_token(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        request = leg(BODIES[CHAT], prefiller, stream=True)
        opening = asyncio.create_task(client.session.post(decoder.url + CHAT, json=request).__aenter__())
        await decoder.wait_until(lambda state: state.waiting_rooms == 1)
        await client.get(decoder, "/server_info")
        assert not opening.done()
        await client.post(prefiller, CHAT, leg(BODIES[CHAT], prefiller))
        response = await opening
        assert response.status == 200
        await response.read()


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_leg_does_not_notice_that_its_partner_has_left(client: Client, who: str) -> None:
    async with pair() as (prefiller, decoder):
        left, stays = (prefiller, decoder) if who == "prefill" else (decoder, prefiller)
        left.faults.add("stall_after_tokens", path="/", tokens=0)
        request = leg(BODIES[COMPLETIONS], prefiller)
        both = [asyncio.create_task(client.post(engine, COMPLETIONS, request)) for engine in (left, stays)]
        if who == "prefill":
            await left.wait_until(lambda state: state.waiting_rooms == 0 and state.prompt_tokens > 0)
        else:
            await stays.wait_until(lambda state: state.finished == 1)
        both[0].cancel()
        await left.wait_until(lambda state: state.live == 0)
        assert stays.state.waiting_rooms == (1 if who == "prefill" else 0)
        both[1].cancel()
        await asyncio.gather(*both, return_exceptions=True)
        await stays.wait_until(lambda state: state.waiting_rooms == state.live == 0)


async def test_prefiller_answers_when_the_decoder_has_the_kv_and_not_before(client: Client) -> None:
    async with (
        SimulatedEngine(
            role="prefill", profile_name="sglang", waiting_seconds=2.0, prefill_ms_per_1k_tokens=200_000.0
        ) as prefiller,
        SimulatedEngine(role="decode", profile_name="sglang", waiting_seconds=0.3) as decoder,
    ):
        request = leg(BODIES[COMPLETIONS], prefiller)
        prefilling = asyncio.create_task(client.stream(prefiller, COMPLETIONS, request))
        decoding = asyncio.create_task(client.post(decoder, COMPLETIONS, request))
        await prefiller.wait_until(lambda state: state.prompt_tokens > 0)
        # The prefill takes two seconds, after which the decoder, whose client has left, waits no more.
        decoding.cancel()
        error, end = await prefilling
        assert error["error"]["code"] == 500
        assert end == "[DONE]"
        assert prefiller.state.tokens_generated == 1


async def test_dead_prefiller_is_noticed(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        request = leg(BODIES[COMPLETIONS], prefiller)
        decoding = asyncio.create_task(client.post(decoder, COMPLETIONS, request))
        await prefiller.wait_until(lambda _: bool(prefiller.core.protocol.describe()["rooms"]))
        await prefiller.kill()
        status, answer = await decoding
        assert status == 500
        assert answer["message"].startswith("Decode transfer failed")


async def test_decoder_looks_for_a_bootstrap_server_for_a_while(client: Client) -> None:
    """SGLang 0.5.23 gives this answer after 14 s if no server listens at the port."""
    async with pair(handshake_seconds=0.05) as (prefiller, decoder):
        request = leg(BODIES[COMPLETIONS], prefiller) | {"bootstrap_port": 1}
        status, answer = await client.post(decoder, COMPLETIONS, request)
        message = answer.pop("message")
        assert (status, answer) == (500, {"object": "error", "type": "500", "param": None, "code": 500})
        assert message.startswith("Decode handshake failed for request rank=0 decode_req.req.rid=")
        assert message.endswith("with exception KVTransferError(bootstrap_room=7): Aborted by AbortReq.")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_two_in_the_same_place_of_a_room_abort_all(client: Client, role: str) -> None:
    async with pair() as (prefiller, decoder):
        engine = prefiller if role == "prefill" else decoder
        request = leg(BODIES[COMPLETIONS], prefiller)
        first = asyncio.create_task(client.post(engine, COMPLETIONS, request))
        await engine.wait_until(lambda state: state.waiting_rooms == 1)
        if role == "decode":  # the room is empty until it has asked the prefiller
            await prefiller.wait_until(lambda state: bool(prefiller.core.protocol.describe()["rooms"]))
        assert (await client.post(engine, COMPLETIONS, request))[0] == 500
        assert (await first)[0] == 500


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_samples_share_a_room_and_hang(client: Client, role: str) -> None:
    async with pair(waiting_seconds=0.2) as (prefiller, decoder):
        engine = prefiller if role == "prefill" else decoder
        request = leg(BODIES[CHAT], prefiller, n=2)
        both = asyncio.gather(client.post(prefiller, CHAT, request), client.post(decoder, CHAT, request))
        await engine.wait_until(lambda state: state.waiting_rooms == 2)
        answers = await both
        assert [status for status, _ in answers] == [500, 500]
        assert all("timed out" in answer["message"] for _, answer in answers)


@pytest.mark.parametrize("rooms", [20, [20, 21, 22]])
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_every_prompt_of_a_batch_has_a_room(client: Client, path: str, rooms: Any) -> None:
    prompts = ["one", "two", "three"]
    key, rest = ("prompt", {"max_tokens": 4}) if path == COMPLETIONS else ("text", {})
    async with pair() as (prefiller, decoder):
        request = leg({key: prompts, **rest}, prefiller, rooms)
        _, (_, decoded) = await asyncio.gather(
            client.post(prefiller, path, request), client.post(decoder, path, request)
        )
        expected = [text(await alone(client, path, {key: prompt, **rest})) for prompt in prompts]
        answers = decoded if path == GENERATE else decoded["choices"]
        assert [answer["text"] for answer in answers] == expected


async def test_room_chooses_the_rank_of_both(client: Client) -> None:
    async with pair(dp_size=4) as (prefiller, decoder):
        request = leg(BODIES[COMPLETIONS], prefiller, room=6)
        await asyncio.gather(*[client.post(engine, COMPLETIONS, request) for engine in (prefiller, decoder)])
        for engine in (prefiller, decoder):
            assert (await client.get(engine, "/_mock/state"))["dp_ranks"] == {"2": 1}


async def test_rank_that_the_decoder_does_not_know_of_is_another_room(client: Client) -> None:
    for waiting_seconds, fields, status in ((0.1, {}, 500), (60.0, {"disagg_prefill_dp_rank": 1}, 200)):
        async with pair(dp_size=4, waiting_seconds=waiting_seconds) as engines:
            request = leg(BODIES[COMPLETIONS], engines[0], room=6, routed_dp_rank=1, **fields)
            answers = await asyncio.gather(*[client.post(engine, COMPLETIONS, request) for engine in engines])
            assert [told for told, _ in answers] == [status, status]


async def test_different_prompts_in_one_room_are_nonsense(client: Client) -> None:
    async with pair() as (prefiller, decoder):
        request = leg(BODIES[COMPLETIONS], prefiller)
        other = request | {"prompt": "Something else"}
        _, (_, decoded) = await asyncio.gather(
            client.post(prefiller, COMPLETIONS, request), client.post(decoder, COMPLETIONS, other)
        )
        assert text(decoded) != text(await alone(client, COMPLETIONS, {"prompt": "Something else", "max_tokens": 6}))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_waiting_leg_is_aborted_by_its_name(client: Client, role: str) -> None:
    async with pair() as (prefiller, decoder):
        engine = prefiller if role == "prefill" else decoder
        request = leg(BODIES[CHAT], prefiller, rid="abc")
        waiting = asyncio.create_task(client.post(engine, CHAT, request))
        await engine.wait_until(lambda state: state.waiting_rooms == 1)
        assert (await client.post(engine, "/abort_request", {"rid": "other"}))[0] == 200
        assert not waiting.done()
        await client.post(engine, "/abort_request", {"rid": "abc"})
        status, answer = await waiting
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
        assert engine.state.waiting_rooms == 0


async def test_leg_that_is_left_may_wait_on_until_it_is_aborted(client: Client) -> None:
    async with pair() as (prefiller, _):
        prefiller.faults.add("ignore_leaving")
        request = leg(BODIES[COMPLETIONS], prefiller, rid="abc", stream=True)
        waiting = asyncio.create_task(client.post(prefiller, COMPLETIONS, request))
        await prefiller.wait_until(lambda state: state.waiting_rooms == 1)
        waiting.cancel()
        await prefiller.wait_until(lambda state: state.live == 0)
        assert prefiller.state.waiting_rooms == 1
        await client.post(prefiller, "/abort_request", {"rid": "abc"})
        await prefiller.wait_until(lambda state: state.waiting_rooms == 0)


async def test_room_without_partners_ends_with_the_engine(client: Client) -> None:
    async with pair() as (prefiller, _):
        prefiller.faults.add("ignore_leaving")
        waiting = asyncio.create_task(client.post(prefiller, COMPLETIONS, leg(BODIES[COMPLETIONS], prefiller)))
        await prefiller.wait_until(lambda state: state.waiting_rooms == 1)
        waiting.cancel()
        await prefiller.wait_until(lambda state: state.live == 0)
    assert prefiller.state.waiting_rooms == 0
