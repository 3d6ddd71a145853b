"""The vLLM pull protocol: what each leg says to its engine, in which order, and what becomes of the KV parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.common.backend import Backend, Role
from proxy.connectors.legs import Attempt
from proxy.dialects.call import Call
from proxy.observe.timeline import Timeline
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.canned import CannedEngine, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment, generations, kv_params
from tests.parsing import parse

# Members spelled as no serialiser would: number forms, escapes, order and spaces have to survive.
AS_WRITTEN = (
    rb'"model" : "sim","seed":18446744073709551616,"temperature":1.50E+0,"logit_bias":{"50256": -100},'
    rb'"unknown_\u0066ield": {"b":[1,2.0],"a":"\u00fc\/"}'
)
CHAT = b'{"messages": [ {"role":"user","content":[{"type":"text","text":"Hi \\ud83d\\ude42"}]} ],%b}' % AS_WRITTEN
COMPLETION = b'{"prompt":\t"Hi \\ud83d\\ude42",%b}' % AS_WRITTEN

# KV parameters of a prefiller, which are opaque to the gateway.
KV = b'{"do_remote_prefill":true, "remote_block_ids":[[1,2, 3]],"remote_port":1e3,"n":9e99,"x":"\\u00fc"}'
PREFILLED = b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params": %b,"usage":null}' % KV
DECODED = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "y", "finish_reason": "stop"}]}

ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def canned_pair() -> tuple[CannedEngine, CannedEngine]:
    prefilled = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PREFILLED), PREFILLED)
    return CannedEngine("prefill", [prefilled]), CannedEngine("decode", [json_answer(DECODED)])


async def post(gateway: Deployment, path: str, body: bytes, **headers: str) -> None:
    async with gateway.session.post(gateway.url + path, data=body, headers=headers) as response:
        assert response.status == 200
        await response.read()


ODD_USAGE = (b'{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":1%b}}' % (b"0" * 40), b"[7]")


@pytest.mark.parametrize("usage", ODD_USAGE)
async def test_unwritable_usage_of_a_prefiller_harms_no_answer(deploy: Deploy, usage: bytes) -> None:
    prefiller, decoder = canned_pair()
    body = PREFILLED.replace(b'"usage":null', b'"usage":%b' % usage)
    prefiller.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]
    gateway = await deploy([prefiller], [decoder], resume={"mode": "off"})
    await post(gateway, Api.COMPLETIONS.path, COMPLETION)


# Bodies of the legs


@pytest.mark.parametrize(("path", "body"), [(Api.CHAT.path, CHAT), (Api.COMPLETIONS.path, COMPLETION)])
async def test_both_legs_get_the_clients_bytes_with_the_protocols_changes(
    deploy: Deploy, path: str, body: bytes
) -> None:
    prefiller, decoder = canned_pair()
    gateway = await deploy([prefiller], [decoder], resume={"mode": "off"})
    await post(gateway, path, body)

    (prefill,), (decode,) = prefiller.received, decoder.received
    assert prefill.path == decode.path == path
    ask = orjson.dumps(ASK_FOR_KV)
    assert prefill.body == body[:-1] + b',"kv_transfer_params":%b,"stream":false,"max_tokens":1,"min_tokens":1}' % ask
    assert decode.body == body[:-1] + b',"kv_transfer_params":' + KV + b"}"


async def test_prefill_leg_changes_every_limit_and_drops_what_only_streams_have(deploy: Deploy) -> None:
    gateway = await deploy()
    limits: dict[str, Any] = {"max_tokens": 3, "min_tokens": 3, "max_completion_tokens": 3}
    dropped: dict[str, Any] = {
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    body = request(Api.CHAT, stream=True, **limits, **dropped)
    await gateway.ask(body)

    (prefill,) = generations(*gateway.prefillers)
    expected = {name: value for name, value in body.items() if name not in dropped}
    changes = {"max_tokens": 1, "min_tokens": 1, "max_completion_tokens": 1, "stream": False}
    assert prefill.body == {**expected, **changes, "kv_transfer_params": ASK_FOR_KV}
    (decode,) = generations(*gateway.decoders)
    assert decode.body == {**body, "kv_transfer_params": kv_params(decode)}


async def test_max_completion_tokens_is_not_introduced(gateway: Deployment) -> None:
    await gateway.ask(request(Api.CHAT))
    assert "max_completion_tokens" not in generations(*gateway.prefillers)[0].body


async def test_early_end_of_sequence_does_not_cost_the_kv(deploy: Deploy) -> None:
    gateway = await deploy(prefiller={"first_token_eos": True})
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.decoders[0].state.pulls == 1


NAMED = {"type": "function", "function": {"name": "weather"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


@pytest.mark.parametrize(("profile", "asked_of_prefiller"), [("v0.18", "auto"), ("v0.23", NAMED)])
async def test_forced_tool_call_is_kept_from_old_prefillers_which_would_fail(
    deploy: Deploy, profile: str, asked_of_prefiller: Any
) -> None:
    gateway = await deploy(engine={"profile_name": profile, "tool_call_parser": "kimi_k2"})
    thinking: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
    answer = await gateway.ask(request(Api.CHAT, tools=TOOLS, tool_choice=NAMED, **thinking))
    assert answer.status == 200
    assert generations(*gateway.prefillers)[0].body["tool_choice"] == asked_of_prefiller
    assert generations(*gateway.decoders)[0].body["tool_choice"] == NAMED


RESERVED: dict[str, Any] = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_host": "10.6.6.6",
        "remote_port": 1,
        "remote_block_ids": [1],
    },
    "ec_transfer_params": {"a": 1},
    "bootstrap_host": "10.6.6.6",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "data_parallel_rank": 7,
    "routed_dp_rank": 7,
    "request_id": "mine",
    "rid": "mine",
    "kv_hints": {"a": 1},
    "kv_router_hint": {"source_control_endpoint": "10.6.6.6:1", "block_hashes": []},
    "vllm_xargs": {"kv_transfer_params": "10.6.6.6", "ec_transfer_params": "10.6.6.6"},
}
STEERING = {
    "X-data-parallel-rank": "7",
    "X-Request-Id": "mine",
    "Connection": "keep-alive, X-Hop",
    "X-Hop": "1",
    "Te": "x",
}


@pytest.mark.parametrize("connector", ["vllm_pull", "plain"])
@pytest.mark.parametrize("stream", [True, False])
async def test_routing_headers_of_clients_are_removed(deploy: Deploy, connector: str, stream: bool) -> None:
    gateway = await deploy(connector=connector)
    body = request(Api.COMPLETIONS, stream=stream)
    answer = await gateway.ask({**body, **RESERVED}, **STEERING)
    assert answer.text == await answer_alone(body)
    assert answer.headers["x-request-id"] == "mine"
    for seen in generations(*gateway.engines):
        assert set(seen.body) & set(RESERVED) <= {"kv_transfer_params", "vllm_xargs"}
        assert not seen.body.get("vllm_xargs")
        assert "10.6.6.6" not in str(seen.body)
        names = {"host", "content-type", "content-length", "accept-encoding", "x-request-id", "connection"}
        assert set(seen.headers) <= names
        assert "mine" not in seen.headers.values()


async def test_clients_own_key_reaches_both_engines(gateway: Deployment) -> None:
    await gateway.ask(request(Api.CHAT), authorization="Bearer mine", traceparent="00-1-2-01")
    for seen in generations(*gateway.engines):
        assert (seen.headers["authorization"], seen.headers["traceparent"]) == ("Bearer mine", "00-1-2-01")


# Hand-overs that fail


async def test_decoder_that_does_not_answer_is_left_long_before_the_kv_goes(deploy: Deploy) -> None:
    """The prefiller keeps the KV for 0.2 s, so the decoder gets half of that and not handoff_seconds."""
    gateway = await deploy(kv={"pin_seconds": 0.2}, timeouts={"idle_seconds": 0.2})
    gateway.decoders[0].faults.add("hang_before_headers", path="chat")  # a release is a completion
    answer = await gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.error["code"]) == (504, "decode_timeout")
    assert "waited 0.1 s" in answer.error["message"]


async def test_prefiller_and_a_decoder_between_which_hand_overs_fail_are_kept_apart(deploy: Deploy) -> None:
    gateway = await deploy(2, 1, health={"quarantine_after": 2}, retry={"max_attempts": 1})
    decoder, prefillers = gateway.decoders[0], gateway.prefillers
    decoder.faults.add("refuse_status", path="chat", status=500, every=2)  # whatever the second prefiller hands over

    for status in (200, 500, 200, 500):
        assert (await gateway.ask(request(Api.CHAT, stream=True))).status == status
        await until(lambda: not gateway.worker.releaser.pending_count, "a release")  # pinned KV would count as load
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1}
    decoder.faults.clear()
    asked = [len(generations(prefiller)) for prefiller in prefillers]
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT, stream=True))).status == 200

    assert [len(generations(prefiller)) for prefiller in prefillers] == [asked[0] + 4, asked[1]]


async def test_pair_is_used_all_the_same_when_there_is_no_other(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, health={"quarantine_after": 1}, retry={"max_attempts": 1})
    gateway.decoders[0].faults.add("refuse_status", path="chat", status=500, times=1)
    assert (await gateway.ask(request(Api.CHAT, stream=True))).status == 500
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1}
    assert (await gateway.ask(request(Api.CHAT, stream=True))).status == 200


@pytest.mark.parametrize("profile", ["v0.18", "v0.30", "v0.33"])
async def test_kv_that_cannot_be_loaded_is_a_failed_hand_over(deploy: Deploy, profile: str) -> None:
    gateway = await deploy(1, 1, engine={"profile_name": profile}, health={"quarantine_after": 1})
    gateway.decoders[0].faults.add("load_failure", path="chat", times=1)
    await gateway.ask(request(Api.CHAT, stream=True))
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1}


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_failure_unrelated_to_a_decoder_does_not_count_for_a_pair(deploy: Deploy, status: int) -> None:
    gateway = await deploy(1, 1, health={"quarantine_after": 1}, retry={"max_attempts": 1})
    gateway.decoders[0].faults.add("refuse_status", path="chat", status=status)
    assert (await gateway.ask(request(Api.CHAT, stream=True))).status == status
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {}


# Members of the call's own in kv_transfer_params


def a_call(gateway: Deployment, body: bytes, api: Api, **kv_params: object) -> Call:
    return replace(parse(api, body, gateway.worker.settings.cost), kv_params=kv_params)


@asynccontextmanager
async def opened(gateway: Deployment, call: Call, prefer: Backend | None = None) -> AsyncIterator[Attempt]:
    """Run one attempt of the connector alone, read its answer, and report its KV as arrived."""
    async with gateway.worker.request_service.connector.open_attempt(
        call, call.make_pick_request((), prefer), Timeline()
    ) as attempt:
        await attempt.response.read_body()
        attempt.record_kv_arrival()
        yield attempt


async def test_members_of_the_calls_own_are_added_on_both_legs(deploy: Deploy) -> None:
    prefiller, decoder = canned_pair()
    gateway = await deploy([prefiller], [decoder])
    ids = orjson.Fragment(b"[1, 2,3]")
    async with opened(gateway, a_call(gateway, COMPLETION, Api.COMPLETIONS, prompt_token_ids=ids, x={"y": 1})):
        pass
    (prefill,), (decode,) = prefiller.received, decoder.received
    extra = b',"prompt_token_ids":[1, 2,3],"x":{"y":1}}'
    assert b'"kv_transfer_params":' + orjson.dumps(ASK_FOR_KV)[:-1] + extra in prefill.body
    assert decode.body == COMPLETION[:-1] + b',"kv_transfer_params":' + KV[:-1] + extra + b"}"


@pytest.mark.parametrize("connector", ["vllm_pull", "plain"])
async def test_members_of_the_calls_own_stand_alone_without_kv(deploy: Deploy, connector: str) -> None:
    prefiller, decoder = canned_pair()
    prefilled = PREFILLED.replace(KV, b"null")
    prefiller.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(prefilled), prefilled)]
    prefillers = [prefiller] if connector == "vllm_pull" else []
    gateway = await deploy(prefillers, [decoder], connector=connector, kv={"on_missing": "local"})
    async with opened(gateway, a_call(gateway, COMPLETION, Api.COMPLETIONS, prompt_token_ids=[1])) as attempt:
        assert not attempt.has_kv_from_prefiller
    assert decoder.received[0].body == COMPLETION[:-1] + b',"kv_transfer_params":{"prompt_token_ids":[1]}}'


async def test_clients_kv_parameters_never_mix_with_the_calls_own(deploy: Deploy) -> None:
    gateway = await deploy(prefiller={"profile_name": "v0.33"}, decoder={"profile_name": "v0.33"})
    body = orjson.dumps(request(Api.CHAT) | {"kv_transfer_params": {"remote_host": "10.6.6.6"}})
    async with opened(gateway, a_call(gateway, body, Api.CHAT, prompt_token_ids=[1, 2, 3])):
        pass
    for seen in generations(*gateway.engines):
        assert seen.body["kv_transfer_params"]["prompt_token_ids"] == [1, 2, 3]
        assert "10.6.6.6" not in str(seen.body)


# Backends


async def test_attempt_names_its_prefiller(deploy: Deploy) -> None:
    gateway = await deploy(1, 2)
    await gateway.decoders[0].kill()
    call = a_call(gateway, orjson.dumps(request(Api.COMPLETIONS)), Api.COMPLETIONS)
    async with opened(gateway, call) as attempt:
        assert attempt.prefiller is not None
        assert attempt.prefiller.port == gateway.prefillers[0].port


async def test_preferred_prefiller_is_asked_and_the_decoder_chosen_as_ever(deploy: Deploy) -> None:
    gateway = await deploy(3, 2)
    call = a_call(gateway, orjson.dumps(request(Api.CHAT)), Api.CHAT)
    preferred = gateway.worker.pools.prefill.all_backends()[2]
    for _ in range(2):
        async with opened(gateway, call, preferred) as attempt:
            assert attempt.prefiller == preferred
    assert [len(generations(prefiller)) for prefiller in gateway.prefillers] == [0, 0, 2]
    assert [len(generations(decoder)) for decoder in gateway.decoders] == [1, 1]


# Ids


def attempt_id(engine: SimulatedEngine, request_number: int = 0) -> str:
    return generations(engine)[request_number].headers["x-request-id"]


async def test_one_id_serves_both_legs_and_the_next_request_has_another(gateway: Deployment) -> None:
    (prefiller,), (decoder,) = gateway.prefillers, gateway.decoders
    answer = await gateway.ask(request(Api.CHAT), x_request_id="the-clients")
    await gateway.ask(request(Api.CHAT), x_request_id="the-clients")
    assert answer.headers["x-request-id"] == "the-clients"
    assert answer.json["id"] == f"chatcmpl-{attempt_id(decoder)}"
    assert [attempt_id(prefiller, n) for n in (0, 1)] == [attempt_id(decoder, n) for n in (0, 1)]
    assert len({attempt_id(decoder, 0), attempt_id(decoder, 1), "the-clients"}) == 3


async def test_engines_that_refuse_duplicate_ids_serve_clients_that_repeat_theirs(deploy: Deploy) -> None:
    gateway = await deploy(engine={"request_id_randomization": False})
    for _ in range(2):
        assert (await gateway.ask(request(Api.CHAT), x_request_id="same")).is_done


async def test_new_attempt_has_a_new_id_and_new_kv(deploy: Deploy) -> None:
    gateway = await deploy(2, 2, retry={"max_attempts": 2})
    gateway.decoders[0].faults.add("refuse_status", status=500)
    assert (await gateway.ask(request(Api.COMPLETIONS))).is_done
    first, second = (generations(decoder)[0] for decoder in gateway.decoders)
    prefills = {seen.headers["x-request-id"] for seen in generations(*gateway.prefillers)}
    assert prefills == {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(prefills) == 2
    assert kv_params(first)["remote_request_id"] != kv_params(second)["remote_request_id"]


# Order


async def test_prefill_waits_for_room_on_a_decoder(deploy: Deploy) -> None:
    gateway = await deploy(2, 1)
    (decoder,) = gateway.decoders
    gateway.roster.remove_backend(Role.DECODE, decoder.host, decoder.port)
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_decode")
    assert answer.headers["retry-after"] == "1"
    assert generations(*gateway.prefillers) == []


async def test_decoder_is_charged_while_the_prefiller_works(deploy: Deploy) -> None:
    gateway = await deploy()
    (prefiller,) = gateway.prefillers
    prefiller.faults.add("hang_before_headers")
    async with gateway.asking(request(Api.CHAT)):
        await prefiller.wait_until(lambda state: state.live == 1)
        assert [gateway.scoreboard.open_leases(slot) for slot in (0, 1)] == [1, 1]
        assert generations(*gateway.decoders) == []


async def test_prefillers_load_goes_in_two_steps(deploy: Deploy) -> None:
    """Compute until it has answered, kv until the decoder's first token."""
    gateway = await deploy()
    (decoder,) = gateway.decoders
    decoder.faults.add("slow_load", seconds=3600.0)
    async with gateway.asking(request(Api.CHAT, stream=True)):
        await decoder.wait_until(lambda state: state.live == 1)
        load = gateway.scoreboard.load_of(0)
        assert load.compute_tokens == 0
        assert load.kv_tokens > 0
    decoder.faults.clear()
    decoder.faults.add("stall_after_tokens", tokens=1)
    async with gateway.asking(request(Api.CHAT, stream=True)) as client:
        await client.has_tokens(1)
        assert gateway.scoreboard.load_of(0).kv_tokens == 0
        assert gateway.scoreboard.open_leases(1) == 1


async def test_refused_decoder_costs_no_second_prefill(deploy: Deploy) -> None:
    gateway = await deploy(1, 3)
    for decoder in gateway.decoders[:2]:
        await decoder.kill()
    answer = await gateway.ask(request(Api.CHAT, stream=True))
    assert answer.is_done
    assert len(generations(*gateway.prefillers)) == 1
    assert gateway.decoders[2].state.pulls == 1
    assert gateway.metrics("pdproxy_retries_total") == {("connect", "decode"): 2.0}


async def test_refusal_by_the_decoder_keeps_its_message(gateway: Deployment) -> None:
    """The limits of the prefill leg are different ones."""
    body = request(Api.CHAT, max_tokens=0)
    async with gateway.session.post(gateway.decoders[0].url + Api.CHAT.path, json=body) as response:
        engines_own = await response.read()
    answer = await gateway.ask(body)
    assert (answer.status, answer.body) == (400, engines_own)
    assert gateway.decoders[0].state.releases == 1


async def test_decoders_late_refusal_lets_the_kv_go(deploy: Deploy) -> None:
    """The decoder does not know the model: it tells the prefiller, and the client gets its words."""
    gateway = await deploy(decoder={"model": "another"})
    answer = await gateway.ask(request(Api.CHAT))
    assert answer.status == 404
    assert answer.error["type"] == "NotFoundError"
    assert gateway.decoders[0].state.releases == 1


# Without KV parameters

LONG = "long " * 20

MISSING = [
    # policy, prompt, prefillers without KV, what the client sees, prefills, decodes
    ("retry_prefill", "Hi", 1, 200, 2, 1),
    ("retry_prefill", "Hi", 2, 200, 2, 1),
    ("retry_prefill", LONG, 1, 200, 2, 1),
    ("retry_prefill", LONG, 2, "kv_handoff_failed", 2, 0),
    ("local", LONG, 2, 200, 1, 1),
    ("error", "Hi", 1, "kv_handoff_failed", 1, 0),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("policy", "text", "without_kv", "seen", "prefills", "decodes"), MISSING)
async def test_missing_kv_parameters(
    deploy: Deploy, policy: str, text: str, without_kv: int, seen: int | str, prefills: int, decodes: int, stream: bool
) -> None:
    gateway = await deploy(2, kv={"on_missing": policy, "local_max_tokens": 10})
    for prefiller in gateway.prefillers[:without_kv]:
        prefiller.faults.add("missing_kv_params")
    body = request(Api.COMPLETIONS, text, stream=stream)
    answer = await gateway.ask(body)
    if seen == 200:
        assert answer.text == await answer_alone(body)
    else:
        assert (answer.status, answer.error["code"]) == (502, seen)
    assert len(generations(*gateway.prefillers)) == prefills
    assert len(generations(*gateway.decoders)) == decodes
    assert gateway.decoders[0].state.local_prefills == (decodes if prefills == without_kv or policy == "local" else 0)


async def test_only_prefiller_is_asked_again(deploy: Deploy) -> None:
    gateway = await deploy()
    gateway.prefillers[0].faults.add("missing_kv_params", times=1)
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.decoders[0].state.pulls == 1
    ids = [seen.headers["x-request-id"] for seen in generations(*gateway.prefillers)]
    assert len(set(ids)) == 2
    assert generations(*gateway.decoders)[0].headers["x-request-id"] == ids[1]


@pytest.mark.parametrize("params", [b"null", b"{}", b"[]", b'{"do_remote_prefill":false,"remote_block_ids":[1]}'])
async def test_unusable_kv_parameters_are_missing_ones(deploy: Deploy, params: bytes) -> None:
    prefiller, decoder = canned_pair()
    prefilled = PREFILLED.replace(KV, params)
    prefiller.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(prefilled), prefilled)]
    gateway = await deploy([prefiller], [decoder], kv={"on_missing": "local"}, resume={"mode": "off"})
    await post(gateway, Api.COMPLETIONS.path, COMPLETION)
    assert decoder.received[0].body == COMPLETION
    assert gateway.metrics("pdproxy_missing_kv_total") == {("local",): 1.0}


@pytest.mark.parametrize(
    ("policy", "status", "result"), [("retry_prefill", 200, "local"), ("local", 200, "local"), ("error", 502, "error")]
)
async def test_prefill_that_ends_by_stop_is_not_repeated(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, policy: str, status: int, result: str
) -> None:
    """The decoder computes the prompt, even a long one: every prefiller would keep no KV of it."""
    prefiller, decoder = canned_pair()
    prefilled = PREFILLED.replace(KV, b"null").replace(b'"finish_reason":"length"', b'"finish_reason":"stop"')
    prefiller.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(prefilled), prefilled)]
    kv = {"on_missing": policy, "local_max_tokens": 0}
    gateway = await deploy([prefiller], [decoder], kv=kv, resume={"mode": "off"})
    for _ in range(4):
        async with gateway.session.post(gateway.url + Api.COMPLETIONS.path, data=COMPLETION) as response:
            assert response.status == status
            await response.read()
    assert len(prefiller.received) == 4
    assert gateway.metrics("pdproxy_missing_kv_total") == {(result,): 4.0}
    assert [record for record in caplog.records if "kv-transfer-config" in record.getMessage()] == []


# Usage


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_cached_tokens_are_the_prefillers(deploy: Deploy, stream: bool, api: Api) -> None:
    gateway = await deploy(engine={"block_size": 4})
    body = request(api, "The same prompt twice", stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    first, second = (await gateway.ask(body)).usage, (await gateway.ask(body)).usage
    prompt = first["prompt_tokens"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": (prompt - 1) // 4 * 4}
    assert (first["completion_tokens"], first["total_tokens"]) == (8, prompt + 8)


@pytest.mark.parametrize("stream", [True, False])
async def test_decoders_cached_tokens_are_withdrawn_when_the_prefiller_does_not_tell(
    deploy: Deploy, stream: bool
) -> None:
    gateway = await deploy(prefiller={"prompt_tokens_details": False})
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await gateway.ask(request(Api.CHAT, **options))
    assert answer.usage["prompt_tokens_details"] is None


@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_usage_is_in_a_stream_only_when_asked_for(gateway: Deployment, api: Api) -> None:
    silent = await gateway.ask(request(api, stream=True))
    assert silent.is_done
    assert all("usage" not in event or event["usage"] is None for event in silent.events[:-1])
    assert all(event["choices"] for event in silent.events[:-1])
    told = await gateway.ask(request(api, stream=True, stream_options={"include_usage": True}))
    assert told.events[-2]["choices"] == []
    assert told.events[-2]["usage"]["completion_tokens"] == 8


async def test_usage_in_every_chunk_stays_there(gateway: Deployment) -> None:
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=True, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in answer.events[:-2]] == list(range(1, 9))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("samples", [1, 2])
async def test_kv_parameters_never_reach_the_client(gateway: Deployment, stream: bool, api: Api, samples: int) -> None:
    answer = await gateway.ask(request(api, stream=stream, n=samples))
    assert answer.is_done
    assert b"kv_transfer_params" not in answer.body
    assert b"remote_" not in answer.body


# Limits of the protocol

REFUSED = [
    (Api.CHAT, {"use_beam_search": True}),
    (Api.CHAT, {"prompt_logprobs": 1}),
    (Api.COMPLETIONS, {"best_of": 3}),
    (Api.COMPLETIONS, {"echo": True, "logprobs": 1}),
]


@pytest.mark.parametrize(("api", "fields"), REFUSED)
async def test_requests_that_need_both_legs_are_refused(gateway: Deployment, api: Api, fields: dict[str, Any]) -> None:
    answer = await gateway.ask(request(api, **fields))
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] in fields
    assert generations(*gateway.engines) == []


async def test_echo_without_logprobs_is_served(gateway: Deployment) -> None:
    body = request(Api.COMPLETIONS, "Say it", echo=True)
    answer = await gateway.ask(body)
    assert answer.text == await answer_alone(body)
    assert answer.text.startswith("Say it")


# Short prompts


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("text", "prefills"), [("Hi", 0), (LONG, 1)])
async def test_short_prompts_go_to_a_decoder_alone(deploy: Deploy, text: str, prefills: int, stream: bool) -> None:
    gateway = await deploy(kv={"prefill_min_tokens": 20})
    body = request(Api.CHAT, text, stream=stream)
    assert (await gateway.ask(body)).text == await answer_alone(body)
    assert len(generations(*gateway.prefillers)) == prefills
    assert gateway.decoders[0].state.local_prefills == 1 - prefills
    assert gateway.metrics("pdproxy_prefills_skipped_total") == ({} if prefills else {(): 1.0})
    assert gateway.metrics("pdproxy_missing_kv_total") == {}
    stages = {stage for (stage,) in gateway.metrics("pdproxy_stage_duration_seconds_count")} - {"queue"}
    if stream:
        assert stages == {"first_token", "stream"} | ({"prefill", "handoff"} if prefills else set())


async def test_decoder_reports_the_prompt_that_was_not_prefilled(deploy: Deploy) -> None:
    gateway = await deploy(kv={"prefill_min_tokens": 100}, engine={"block_size": 4})
    body = request(Api.CHAT, "The same prompt twice")
    await gateway.ask(body)
    assert (await gateway.ask(body)).usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_access_line_of_a_short_prompt_names_no_prefiller(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(kv={"prefill_min_tokens": 100})
    with caplog.at_level("INFO"):
        await gateway.ask(request(Api.CHAT))
    (fields,) = [fields for record in caplog.records if "term" in (fields := getattr(record, "fields", {}))]
    assert (fields["p"], fields["d"], fields["term"]) == ("-", gateway.decoders[0].url.removeprefix("http://"), "--")
    assert fields["t_prefill"] == fields["t_handoff"] == 0


@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("least", [20, 1000])
async def test_answer_to_a_short_prompt_survives_its_decoder(deploy: Deploy, api: Api, least: int) -> None:
    """The prompt and the partial answer may be long enough for a prefiller."""
    gateway = await deploy(1, 2, kv={"prefill_min_tokens": least})
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=70)
    body = request(api, "Hi", stream=True, max_tokens=100)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert len(generations(*gateway.prefillers)) == (least == 20)


async def test_short_prompts_need_no_prefiller(deploy: Deploy) -> None:
    gateway = await deploy(kv={"prefill_min_tokens": 100})
    (prefiller,) = gateway.prefillers
    gateway.roster.remove_backend(Role.PREFILL, prefiller.host, prefiller.port)
    assert (await gateway.ask(request(Api.CHAT))).is_done


async def test_every_short_prompt_of_several_is_counted(deploy: Deploy) -> None:
    gateway = await deploy(kv={"prefill_min_tokens": 20})
    answer = await gateway.ask({**request(Api.COMPLETIONS), "prompt": ["Hi", LONG, "Ho"]})
    assert set(answer.texts) == {0, 1, 2}
    assert len(generations(*gateway.prefillers)) == 1
    assert gateway.metrics("pdproxy_prefills_skipped_total") == {(): 2.0}


# Data-parallel ranks

RANKS = {"prefill_dp_ranks": 2, "decode_dp_ranks": 3}


def ranks(*engines: CannedEngine) -> list[str | None]:
    return [received.headers.get("x-data-parallel-rank") for engine in engines for received in engine.received]


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store"])
async def test_both_legs_are_spread_over_ranks_and_clients_have_no_say(deploy: Deploy, connector: str) -> None:
    prefiller, decoder = canned_pair()
    gateway = await deploy([prefiller], [decoder], connector=connector, balance=RANKS, resume={"mode": "off"})
    for _ in range(4):
        await post(gateway, Api.COMPLETIONS.path, COMPLETION, **{"X-data-parallel-rank": "7"})
    assert ranks(prefiller) == ["0", "1", "0", "1"]
    assert ranks(decoder) == ["0", "1", "2", "0"]


async def test_engines_choose_their_ranks_unless_told_otherwise(deploy: Deploy) -> None:
    prefiller, decoder = canned_pair()
    gateway = await deploy([prefiller], [decoder], resume={"mode": "off"})
    await post(gateway, Api.COMPLETIONS.path, COMPLETION)
    assert ranks(prefiller, decoder) == [None, None]


async def test_short_prompt_goes_to_a_rank_too(deploy: Deploy) -> None:
    prefiller, decoder = canned_pair()
    kv = {"prefill_min_tokens": 100}
    gateway = await deploy([prefiller], [decoder], balance=RANKS, kv=kv, resume={"mode": "off"})
    for _ in range(2):
        await post(gateway, Api.COMPLETIONS.path, COMPLETION)
    assert (ranks(prefiller), ranks(decoder)) == ([], ["0", "1"])


async def test_changed_settings_hold_for_the_next_attempt(deploy: Deploy) -> None:
    prefiller, decoder = canned_pair()
    gateway = await deploy([prefiller], [decoder], resume={"mode": "off"})
    balance = gateway.worker.settings.balance.model_copy(update=RANKS)
    kv = gateway.worker.settings.kv.model_copy(update={"prefill_min_tokens": 100})
    settings = gateway.worker.settings.model_copy(update={"balance": balance})
    gateway.worker.live_configuration.replace_settings(settings)
    await post(gateway, Api.COMPLETIONS.path, COMPLETION)
    gateway.worker.live_configuration.replace_settings(settings.model_copy(update={"kv": kv}))
    await post(gateway, Api.COMPLETIONS.path, COMPLETION)
    assert (ranks(prefiller), ranks(decoder)) == (["0"], ["0", "1"])
