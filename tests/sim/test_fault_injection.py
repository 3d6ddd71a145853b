"""Every fault does what its name says, to the requests its rule names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.engine.faults import Faults, UnknownFaultAction
from tests.sim.conftest import Client

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
ONCE: dict[str, Any] = {"prompt": "once upon ", "max_tokens": 20}
PREFILL: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def text(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event != "[DONE]" and "choices" in event)


async def broken_stream(client: Client, engine: SimulatedEngine, body: dict[str, Any]) -> bytes:
    """Return the part of a stream that arrived before it broke."""
    received = b""
    try:
        async with client.session.post(engine.url + TEXT, json=body | {"stream": True}) as response:
            async for piece in response.content.iter_any():
                received += piece
    except aiohttp.ClientError:
        return received
    pytest.fail("the stream ended cleanly")


async def test_rules_choose_their_requests() -> None:
    faults = Faults()
    faults.add("crlf", every=2)
    faults.add("refuse_status", path="/v1/models", times=1)
    faults.add("comments", request_id="abc", skip=1)
    plans = [faults.plan("/v1/completions", "xabcx") for _ in range(4)]
    assert ["crlf" in plan for plan in plans] == [False, True, False, True]
    assert ["comments" in plan for plan in plans] == [False, True, True, True]
    assert ["refuse_status" in faults.plan("/v1/models", "") for _ in range(2)] == [True, False]
    with pytest.raises(UnknownFaultAction, match="unknown fault 'explode'"):
        faults.add("explode")
    with pytest.raises(UnknownFaultAction, match="token"):
        faults.add("recompute", token=1)


async def test_status_can_be_refused_once(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("refuse_status", status=429, body={"oops": 1}, headers={"Retry-After": "7"}, times=1)
    async with client.session.post(engine.url + CHAT, json=HELLO) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "7"
        assert await response.json() == {"oops": 1}
    status, _ = await client.post(engine, CHAT, HELLO)
    assert status == 200


@pytest.mark.parametrize("action", ["hang_before_headers", "hang_after_headers", "stall_after_tokens"])
async def test_hanging_request_ends_when_the_client_leaves(
    client: Client, engine: SimulatedEngine, action: str
) -> None:
    engine.faults.add(action, tokens=2)
    request = asyncio.create_task(client.stream(engine, CHAT, HELLO))
    await engine.wait_until(lambda state: state.faults_applied == 1)
    if action == "stall_after_tokens":
        await engine.wait_until(lambda state: state.tokens_sent == 2)
    request.cancel()
    await engine.wait_until(lambda state: state.live == 0)
    assert engine.state.disconnects == 1
    assert engine.core.scheduler.running == 0


async def test_connections_are_reset_where_asked(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("reset_before_headers", times=1)
    with pytest.raises(aiohttp.ClientOSError):
        await client.post(engine, TEXT, ONCE)
    engine.faults.clear()
    engine.faults.add("reset_after_headers", times=1)
    assert await broken_stream(client, engine, ONCE) == b""
    engine.faults.clear()
    engine.faults.add("reset_after_tokens", tokens=3)
    assert (await broken_stream(client, engine, ONCE)).count(b"data: ") == 3
    await engine.wait_until(lambda state: state.live == 0)
    assert engine.state.disconnects == 0, "the client did not leave"


async def test_stream_can_end_without_a_finish(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("end_without_finish", tokens=2, times=1)
    engine.faults.add("end_without_finish", tokens=2, done=True)
    first = await client.stream(engine, TEXT, ONCE)
    assert [event["choices"][0]["finish_reason"] for event in first] == [None, None]
    second = await client.stream(engine, TEXT, ONCE)
    assert [event == "[DONE]" for event in second] == [False, False, True]


async def test_error_event_comes_after_the_given_tokens(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("error_event", tokens=2)
    *chunks, error, done = await client.stream(engine, TEXT, ONCE)
    assert len(chunks) == 2
    assert error["error"]["type"] == "InternalServerError"
    assert done == "[DONE]"
    status, _ = await client.post(engine, TEXT, ONCE)
    assert status == 500
    await engine.wait_until(lambda state: state.live == 0)
    assert engine.core.scheduler.running == 0


async def test_recomputed_request_finishes_with_its_reason(client: Client, engine: SimulatedEngine) -> None:
    whole = await client.stream(engine, TEXT, ONCE | {"return_token_ids": True})
    engine.faults.add("recompute", tokens=5, merged=2)
    cut = await client.stream(engine, TEXT, ONCE | {"return_token_ids": True})
    last = cut[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "recomputed")
    assert len(last["token_ids"]) == 2
    assert text(whole).startswith(text(cut))
    _, answer = await client.post(engine, TEXT, ONCE)
    assert answer["choices"][0]["stop_reason"] == "recomputed"
    assert answer["usage"]["completion_tokens"] == 5


async def test_recompute_at_once_is_swallowed_up_to_v30(client: Client) -> None:
    async with SimulatedEngine(profile_name="v0.30") as old, SimulatedEngine(profile_name="v0.33") as new:
        for engine in (old, new):
            engine.faults.add("recompute", tokens=0)
        usage = {"stream_options": {"include_usage": True}}
        role, counts, done = await client.stream(old, CHAT, HELLO | usage)
        assert role["choices"][0]["finish_reason"] is None
        assert counts["usage"]["completion_tokens"] == 0
        assert done == "[DONE]"
        _, finish, _ = await client.stream(new, CHAT, HELLO)
        assert finish["choices"][0]["stop_reason"] == "recomputed"
        _, whole = await client.post(old, CHAT, HELLO)
        assert whole["choices"][0]["stop_reason"] == "recomputed"


async def test_resumed_completion_continues_the_text(client: Client, engine: SimulatedEngine) -> None:
    _, whole = await client.post(engine, TEXT, ONCE | {"return_token_ids": True})
    choice = whole["choices"][0]
    resumed = {"prompt": choice["prompt_token_ids"] + choice["token_ids"][:7], "max_tokens": 13}
    _, rest = await client.post(engine, TEXT, resumed | {"return_token_ids": True})
    assert rest["choices"][0]["token_ids"] == choice["token_ids"][7:]


async def test_prefill_answers_can_lack_params_or_get_lost(client: Client) -> None:
    async with SimulatedEngine(role="prefill") as prefiller:
        prefiller.faults.add("missing_kv_params", times=1)
        _, answer = await client.post(prefiller, CHAT, HELLO | PREFILL)
        assert answer["kv_transfer_params"] is None
        assert not prefiller.pins
        prefiller.faults.add("lost_response")
        with pytest.raises(aiohttp.ClientOSError):
            await client.post(prefiller, CHAT, HELLO | PREFILL)
        assert [pin.announced for pin in prefiller.pins.values()] == [False]


async def test_bodies_can_be_cut_or_broken(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("invalid_json", times=1)
    with pytest.raises(orjson.JSONDecodeError):
        await client.post(engine, CHAT, HELLO)
    engine.faults.clear()
    engine.faults.add("truncated_json")
    with pytest.raises(aiohttp.ClientPayloadError):
        await client.post(engine, CHAT, HELLO)


@pytest.mark.parametrize("actions", [["split_bytes"], ["coalesce"], ["crlf", "comments"], ["coalesce", "split_bytes"]])
async def test_mangled_streams_hold_the_same_events(
    client: Client, engine: SimulatedEngine, actions: list[str]
) -> None:
    expected = text(await client.stream(engine, TEXT, ONCE))
    for action in actions:
        engine.faults.add(action, size=4)
    assert text(await client.stream(engine, TEXT, ONCE)) == expected
    async with client.session.post(engine.url + TEXT, json=ONCE | {"stream": True}) as response:
        raw = await response.read()
    assert (b"\r\n\r\n" in raw) == ("crlf" in actions)
    assert (b": keep-alive" in raw) == ("comments" in actions)


async def test_loading_kv_can_fail_or_take_long(
    client: Client, prefiller: SimulatedEngine, decoder: SimulatedEngine
) -> None:
    decoder.faults.add("load_failure", times=1)
    params = await client.prefill(prefiller, CHAT, HELLO)
    status, _ = await client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params})
    assert status == 500
    decoder.faults.add("slow_load", seconds=1000)
    params = await client.prefill(prefiller, CHAT, HELLO)
    request = asyncio.create_task(client.post(decoder, CHAT, HELLO | {"kv_transfer_params": params}))
    await decoder.wait_until(lambda state: state.faults_applied == 2)
    request.cancel()
    await decoder.wait_until(lambda state: state.releases == 1)
    assert not prefiller.pins


async def test_killed_engine_refuses_and_can_be_restarted(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("kill", tokens=3)
    assert (await broken_stream(client, engine, ONCE)).count(b"data: ") <= 3
    await engine.wait_until(lambda state: state.live == 0)
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.post(engine, TEXT, ONCE)
    engine.faults.clear()
    await engine.restart()
    status, _ = await client.post(engine, TEXT, ONCE)
    assert status == 200


async def test_no_other_process_gets_the_port_of_a_killed_engine() -> None:
    async with SimulatedEngine() as engine:
        await engine.kill()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(engine.host, engine.port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((engine.host, engine.port))


async def test_engine_dies_and_comes_back_as_another_each_time(client: Client) -> None:
    async with SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        engines = set()
        for times in (1, 2):
            params = await client.prefill(prefiller, TEXT, ONCE)
            engines.add(params["remote_engine_id"])
            decoder.faults.add("kill", tokens=3, times=1)
            assert await broken_stream(client, decoder, ONCE | {"kv_transfer_params": params})
            await decoder.wait_until(lambda state, times=times: state.kills == times)
            assert not decoder.is_running
            await prefiller.restart()
            await decoder.restart()
            assert decoder.is_running
            assert not prefiller.pins
            assert await client.stream(decoder, TEXT, ONCE)
        assert len(engines) == 2


async def test_tokens_of_one_step_are_merged_only_as_asked(client: Client) -> None:
    async with SimulatedEngine(tokens_per_step=4) as engine:
        for merged, sizes in ((0, [1, 4, 1, 0]), (1, [1, 4, 1]), (3, [1, 2, 3])):
            engine.faults.add("recompute", tokens=6, merged=merged, times=1)
            *chunks, _ = await client.stream(engine, TEXT, ONCE | {"return_token_ids": True})
            assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == sizes
    async with SimulatedEngine(stream_interval=4) as engine:
        engine.faults.add("recompute", tokens=7)
        *chunks, _ = await client.stream(engine, TEXT, ONCE | {"return_token_ids": True})
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sizes == [1, 4, 2], "what waits for its interval goes out with the finish"


async def test_faults_are_set_and_cleared_over_http(client: Client, engine: SimulatedEngine) -> None:
    status, _ = await client.post(engine, "/_mock/faults", [{"action": "refuse_status", "status": 500}])
    assert status == 200
    status, body = await client.post(engine, "/_mock/faults", {"action": "explode"})
    assert status == 400
    assert "unknown fault" in body["error"]
    status, _ = await client.post(engine, CHAT, HELLO)
    assert status == 500
    async with client.session.delete(engine.url + "/_mock/faults"):
        pass
    status, _ = await client.post(engine, CHAT, HELLO)
    assert status == 200
