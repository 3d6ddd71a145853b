"""vLLM's own Mooncake protocol: both legs at once, which meet by a transfer id at an engine that both know."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pytest

from proxy.common.backend import Backend, Load, Role
from proxy.observe.timeline import Timeline
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.canned import data, event_stream, http, json_answer
from tests.conftest import Deploy
from tests.connectors.meeting import Act, ActingEngine, Exchange, answers, answers_when, hangs, resets, says
from tests.connectors.registering import BootstrapServer, engines_told
from tests.deployment import Deployment, generations
from tests.parsing import parse

COMPLETION = b'{"prompt":\t"Hi \\ud83d\\ude42","max_tokens":5,"max_completion_tokens":9,"x":"\\/"}'
REFUSED = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
PREFILLED = {
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "kv_transfer_params": None,
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
}


@dataclass
class Pair:
    """One prefiller with its bootstrap server, one decoder, and the gateway in front."""

    gateway: Deployment
    prefiller: ActingEngine
    decoder: ActingEngine
    bootstrap: BootstrapServer

    @property
    def results(self) -> dict[str, set[str]]:
        """How requests went, by role."""
        counted = self.gateway.metrics("pdproxy_instance_requests_total")
        return {role: {labels[1] for labels in counted if labels[2] == role} for role in ("prefill", "decode")}

    def load(self, role: Role) -> Load:
        (backend,) = self.gateway.worker.pools.pool_of(role).all_backends()
        return self.gateway.scoreboard.load_of(backend.slot)


@pytest.fixture
async def bootstrap() -> AsyncIterator[BootstrapServer]:
    async with BootstrapServer() as server:
        yield server


async def prefills(exchange: Exchange) -> None:
    exchange.write(json_answer(PREFILLED))


async def prefills_when_let_go(exchange: Exchange) -> None:
    await exchange.engine.let_go.wait()
    await prefills(exchange)


async def pair(
    deploy: Deploy, bootstrap: BootstrapServer, prefill: Act = prefills, decode: Act = answers, **sections: Any
) -> Pair:
    prefiller, decoder = ActingEngine("prefill", act=prefill), ActingEngine("decode", act=decode)
    mooncake = {"mooncake": {"bootstrap_port": bootstrap.port}, "retry": {"max_attempts": 1}, "resume": {"mode": "off"}}
    gateway = await deploy([prefiller], [decoder], connector="mooncake_bootstrap", **{**mooncake, **sections})
    return Pair(gateway, prefiller, decoder, bootstrap)


# Bodies of the legs


async def test_both_engines_get_the_meeting_point(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap)
    async with both.gateway.session.post(both.gateway.url + Api.COMPLETIONS.path, data=COMPLETION) as response:
        assert response.status == 200
        await response.read()
    (prefill,), (decode,) = both.prefiller.received, both.decoder.received
    attempt_id = decode.headers["x-request-id"]
    assert prefill.headers["x-request-id"] == attempt_id
    assert prefill.path == decode.path == Api.COMPLETIONS.path
    assert prefill.headers["x-data-parallel-rank"] == "0"
    assert "x-data-parallel-rank" not in decode.headers
    changed = COMPLETION.replace(
        b'"max_tokens":5,"max_completion_tokens":9', b'"max_tokens":1,"max_completion_tokens":1'
    )
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{attempt_id}"}
    assert orjson.loads(prefill.body) == {
        **orjson.loads(changed),
        "kv_transfer_params": asked,
        "stream": False,
        "min_tokens": 1,
    }
    told = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap.url,
        "remote_engine_id": "engine-0",
        "transfer_id": f"xfer-{attempt_id}",
    }
    assert decode.body == COMPLETION[:-1] + b',"kv_transfer_params":' + orjson.dumps(told) + b"}"


async def test_requests_go_to_the_ranks_in_turn_and_each_to_its_own_engine(
    deploy: Deploy, bootstrap: BootstrapServer
) -> None:
    both = await pair(deploy, bootstrap, balance={"decode_dp_ranks": 3})
    for _ in range(3):
        await both.gateway.ask(request(Api.CHAT), x_data_parallel_rank="7")
    assert [seen.headers["x-data-parallel-rank"] for seen in both.prefiller.received] == ["0", "1", "0"]
    assert [seen.headers["x-data-parallel-rank"] for seen in both.decoder.received] == ["0", "1", "2"]
    engines = [body["kv_transfer_params"]["remote_engine_id"] for body in both.decoder.bodies]
    assert engines == ["engine-0", "engine-1", "engine-0"]
    transfers = {body["kv_transfer_params"]["transfer_id"] for body in both.prefiller.bodies}
    assert len(transfers) == 3
    assert bootstrap.asked == ["/query"]


async def test_prefiller_may_have_a_separate_bootstrap_port(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap, mooncake={"bootstrap_port": 1})
    (backend,) = both.gateway.worker.pools.prefill.all_backends()
    both.gateway.roster.add_for_administrator(
        Backend(Role.PREFILL, backend.host, backend.port, bootstrap_port=bootstrap.port)
    )
    assert (await both.gateway.ask(request(Api.CHAT))).is_done
    assert both.decoder.bodies[0]["kv_transfer_params"]["remote_bootstrap_addr"] == bootstrap.url


async def test_every_sequence_has_a_separate_transfer(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap)
    answer = await both.gateway.ask(request(Api.CHAT, n=3))
    assert set(answer.texts) == {0, 1, 2}
    prefills, decodes = (
        sorted(body["kv_transfer_params"]["transfer_id"] for body in engine.bodies)
        for engine in (both.prefiller, both.decoder)
    )
    assert prefills == decodes
    assert len(set(prefills)) == 3


async def test_bootstrap_servers_are_given_no_credentials(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap, auth={"engine_api_key": "a-secret"})
    await both.gateway.ask(request(Api.CHAT), authorization="Bearer mine")
    assert both.decoder.received[0].headers["authorization"] == "Bearer a-secret"
    assert "authorization" not in bootstrap.headers[0].lower()


async def test_members_of_the_calls_own_are_added_on_both_legs(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    """These members resume an answer from its token ids. vLLM reads them with any KV connector."""
    both = await pair(deploy, bootstrap)
    ids = orjson.Fragment(b"[1, 2,3]")
    call = replace(
        parse(Api.COMPLETIONS, COMPLETION, both.gateway.worker.settings.cost), kv_params={"prompt_token_ids": ids}
    )
    async with both.gateway.worker.request_service.connector.open_attempt(
        call, call.make_pick_request(), Timeline()
    ) as attempt:
        await attempt.response.read_body()
        attempt.record_kv_arrival()
        assert attempt.first_token_seconds is not None  # the prefill is part of it
        assert attempt.first_token_seconds > both.gateway.worker.settings.timeouts.first_token_seconds
    for engine in (both.prefiller, both.decoder):
        assert b'"prompt_token_ids":[1, 2,3]}' in engine.received[0].body


# Both legs go well


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_both_have_the_request_before_either_answers(
    deploy: Deploy, bootstrap: BootstrapServer, first: str, stream: bool
) -> None:
    """The decoder may be done before the prefiller's answer arrives."""

    async def prefill(exchange: Exchange) -> None:
        await both.decoder.works()
        if first == "decode":
            await both.decoder.let_go.wait()
        await prefills(exchange)

    async def decode(exchange: Exchange) -> None:
        await both.prefiller.works()
        if first == "prefill":
            await until(lambda: not both.load(Role.PREFILL).compute_tokens, "the prefiller's answer")
        await answers(exchange)
        both.decoder.let_go.set()

    both = await pair(deploy, bootstrap, prefill, decode)
    answer = await both.gateway.ask(request(Api.CHAT, stream=stream))
    assert answer.is_done
    assert answer.text == "Hello"
    assert both.results == {"prefill": {"ok"}, "decode": {"ok"}}
    assert both.gateway.metrics("pdproxy_kv_orphans_total") == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_the_prefillers(deploy: Deploy, bootstrap: BootstrapServer, stream: bool) -> None:
    both = await pair(deploy, bootstrap, decode=answers_when(lambda: both.prefiller))
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await both.gateway.ask(request(Api.CHAT, **options))
    assert answer.usage["prompt_tokens_details"] == {"cached_tokens": 4}


@asynccontextmanager
async def halted(deploy: Deploy, bootstrap: BootstrapServer) -> AsyncIterator[Pair]:
    """Begin a stream whose prefiller answers when it is released, and whose decoder then begins and hangs."""
    first, rest = event_stream([data({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})])[
        :2
    ]

    async def decode(exchange: Exchange) -> None:
        exchange.write(first)
        await exchange.engine.let_go.wait()
        exchange.write(rest)
        await exchange.hang()

    both = await pair(deploy, bootstrap, prefills_when_let_go, decode)
    async with both.gateway.asking(request(Api.CHAT, stream=True)) as client:
        await both.prefiller.works()
        await both.decoder.works()
        yield both
        await client.leave()
        await until(lambda: both.decoder.hung_up == 1, "the decoder to be left")


async def test_prefillers_load_goes_in_two_steps(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    """Compute until it has answered, kv until the decoder's first token."""
    async with halted(deploy, bootstrap) as both:
        assert both.load(Role.PREFILL).compute_tokens
        both.prefiller.let_go.set()
        await until(lambda: not both.load(Role.PREFILL).compute_tokens, "the prefiller to be done")
        assert both.load(Role.PREFILL).kv_tokens
        both.decoder.let_go.set()
        await until(lambda: both.load(Role.PREFILL) == Load(), "the first token")
        assert both.load(Role.DECODE) != Load()
    assert both.gateway.metrics("pdproxy_kv_orphans_total") == {}


async def test_rank_is_free_when_its_prefill_is_done(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    async with halted(deploy, bootstrap) as both:
        both.prefiller.let_go.set()
        await until(lambda: not both.load(Role.PREFILL).compute_tokens, "the prefiller to be done")
        both.decoder.act = answers
        for _ in range(2):
            await both.gateway.ask(request(Api.CHAT))
        ranks = [seen.headers["x-data-parallel-rank"] for seen in both.prefiller.received]
        assert ranks == ["0", "1", "0"]
        both.decoder.let_go.set()
        await until(lambda: both.load(Role.PREFILL) == Load(), "the first token")


# One leg fails

FAILURES: dict[str, tuple[Act, int, str]] = {
    # what it does, the status for the client, what it is called
    "400": (says(REFUSED, "400 Bad Request"), 400, "invalid_request"),
    "503": (says(REFUSED, "503 Service Unavailable"), 503, "status"),
    "500": (says(REFUSED, "500 Internal Server Error"), 500, "status"),
    "reset": (resets, 502, "reset"),
    "broken HTTP": (says(b"", "999 What"), 502, "bad_answer"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_failing_leg_ends_the_other_at_once(
    deploy: Deploy, bootstrap: BootstrapServer, role: Role, name: str
) -> None:
    act, status, failure = FAILURES[name]

    async def fail(exchange: Exchange) -> None:
        await other.works()
        await act(exchange)

    legs = (fail, hangs) if role is Role.PREFILL else (hangs, fail)
    both = await pair(deploy, bootstrap, *legs)
    other = both.decoder if role is Role.PREFILL else both.prefiller
    answer = await both.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.status == status
    await until(lambda: other.hung_up == 1, "the other leg to end")
    other_role = "decode" if role is Role.PREFILL else "prefill"
    assert both.results == {role.value: {failure}, other_role: {"abandoned"}}
    # Nothing is kept by a prefill that was broken off; one that failed may have come to its end before.
    suspected = role is Role.PREFILL and name in ("500", "reset", "broken HTTP")
    assert len(both.gateway.worker.pinned_kv.current_pins()) == suspected
    assert both.gateway.metrics("pdproxy_kv_orphans_total") == {}


async def test_decoder_that_begins_and_breaks_off_in_the_prefill_is_noticed_at_once(
    deploy: Deploy, bootstrap: BootstrapServer
) -> None:
    async def decode(exchange: Exchange) -> None:
        exchange.write(event_stream([], is_whole=False)[0])
        await both.prefiller.works()
        exchange.reset()

    both = await pair(deploy, bootstrap, hangs, decode)
    answer = await both.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.error["code"] == "decode_broken"
    await until(lambda: both.prefiller.hung_up == 1, "the prefill to end")


async def test_prefiller_that_fails_behind_the_decoders_status_ends_the_stream(
    deploy: Deploy, bootstrap: BootstrapServer
) -> None:
    async def decode(exchange: Exchange) -> None:
        exchange.write(event_stream([], is_whole=False)[0])
        await exchange.hang()

    async def prefill(exchange: Exchange) -> None:
        await both.decoder.works()
        exchange.write(http(REFUSED, "400 Bad Request"))

    both = await pair(deploy, bootstrap, prefill, decode)
    answer = await both.gateway.ask(request(Api.CHAT, stream=True))
    assert (answer.status, answer.body) == (400, REFUSED)
    await until(lambda: both.decoder.hung_up == 1, "the decode leg to end")


async def test_kv_that_was_prefilled_in_vain_is_accounted_for(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    async def decode(exchange: Exchange) -> None:
        await until(lambda: not both.load(Role.PREFILL).compute_tokens, "the prefiller to be done")
        exchange.reset()

    both = await pair(deploy, bootstrap, decode=decode)
    assert (await both.gateway.ask(request(Api.CHAT, stream=True))).status == 502
    assert both.gateway.metrics("pdproxy_kv_orphans_total") == {(): 1.0}
    (pin,) = both.gateway.worker.pinned_kv.current_pins()
    assert not pin.is_suspected
    assert pin.backend.port == both.prefiller.port


async def test_prefillers_failure_is_nothing_to_a_decoder_that_has_the_kv(
    deploy: Deploy, bootstrap: BootstrapServer
) -> None:
    chunks = [
        data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": end}]})
        for text, end in (("a", None), ("b", "stop"))
    ]
    head, first, *rest = event_stream([*chunks, b"data: [DONE]\n\n"])

    async def prefill(exchange: Exchange) -> None:
        await until(lambda: not both.load(Role.PREFILL).kv_tokens, "the decoder's first token")
        exchange.write(http(REFUSED, "500 Internal Server Error"))
        both.decoder.let_go.set()

    async def decode(exchange: Exchange) -> None:
        exchange.write(head, first)
        await exchange.engine.let_go.wait()
        exchange.write(*rest)

    both = await pair(deploy, bootstrap, prefill, decode)
    answer = await both.gateway.ask(request(Api.CHAT, stream=True))
    assert answer.is_done
    assert answer.text == "ab"
    assert both.gateway.worker.pinned_kv.current_pins() == []


# Engines that are others


@pytest.mark.parametrize("stream", [True, False])
async def test_restarted_prefiller_is_queried_for_its_engines(
    deploy: Deploy, bootstrap: BootstrapServer, stream: bool
) -> None:
    """The decoder cannot find the engine that the request names, and reports an error or sends nothing."""

    async def decode(exchange: Exchange) -> None:
        if exchange.body["kv_transfer_params"]["remote_engine_id"] == "new":
            await answers(exchange)
        else:
            exchange.write(http(REFUSED, "500 Internal Server Error"))

    bootstrap.answer = engines_told("old")
    both = await pair(deploy, bootstrap, decode=answers, retry={"max_attempts": 2})
    assert (await both.gateway.ask(request(Api.CHAT, stream=stream))).is_done
    bootstrap.answer = engines_told("new")
    both.decoder.act = decode
    # There is no other prefiller and no other decoder: the one attempt fails, the next request does not.
    assert (await both.gateway.ask(request(Api.CHAT, stream=stream))).status == 500
    assert (await both.gateway.ask(request(Api.CHAT, stream=stream))).is_done
    assert len(bootstrap.asked) == 2


async def test_decoder_that_gives_up_before_its_first_token_makes_the_engines_doubtful(
    deploy: Deploy, bootstrap: BootstrapServer
) -> None:
    """The engine (vLLM up to 0.30) ends a stream like this if the KV cache cannot be loaded."""
    silent = event_stream([b"data: [DONE]\n\n"])

    async def decode(exchange: Exchange) -> None:
        exchange.write(*silent)
        exchange.engine.act = answers

    both = await pair(deploy, bootstrap, decode=decode, resume={"mode": "exact"})
    assert (await both.gateway.ask(request(Api.CHAT, stream=True))).is_done
    assert len(bootstrap.asked) == 2


@pytest.mark.parametrize("answer", [engines_told(), http(b"nonsense"), http(b"", "500 No")])
async def test_prefiller_whose_engines_are_unknown_is_not_used(
    deploy: Deploy, bootstrap: BootstrapServer, answer: bytes
) -> None:
    bootstrap.answer = answer
    both = await pair(deploy, bootstrap)
    assert (await both.gateway.ask(request(Api.CHAT))).status in (502, 503)
    assert both.prefiller.received == both.decoder.received == []
    assert both.results["decode"] == {"abandoned"}


async def test_prefiller_without_a_bootstrap_server_costs_another_attempt(deploy: Deploy) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(BootstrapServer())
        prefillers = [ActingEngine("prefill", act=prefills) for _ in range(2)]
        decoder = ActingEngine("decode", act=answers)
        gateway = await deploy(
            prefillers,
            [decoder],
            connector="mooncake_bootstrap",
            mooncake={"bootstrap_port": 1},
            resume={"mode": "off"},
        )
        _, second = gateway.worker.pools.prefill.all_backends()
        gateway.roster.add_for_administrator(
            Backend(Role.PREFILL, second.host, second.port, bootstrap_port=server.port)
        )
        assert (await gateway.ask(request(Api.CHAT))).is_done
        assert [len(prefiller.received) for prefiller in prefillers] == [0, 1]
        assert gateway.metrics("pdproxy_retries_total") == {("bootstrap", "prefill"): 1.0}


async def test_requests_for_several_caches_are_refused(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap)
    answer = await both.gateway.ask(request(Api.CHAT, prompt_logprobs=1))
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
    assert both.prefiller.received == both.decoder.received == bootstrap.asked == []


async def test_short_prompts_are_prefilled_all_the_same(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap, kv={"prefill_min_tokens": 1000})
    assert (await both.gateway.ask(request(Api.CHAT))).is_done
    assert len(both.prefiller.received) == 1


async def test_changed_settings_hold_for_the_next_attempt(deploy: Deploy, bootstrap: BootstrapServer) -> None:
    both = await pair(deploy, bootstrap)
    async with BootstrapServer(answer=engines_told("elsewhere")) as other:
        mooncake = both.gateway.worker.settings.mooncake.model_copy(update={"bootstrap_port": other.port})
        both.gateway.worker.live_configuration.replace_settings(
            both.gateway.worker.settings.model_copy(update={"mooncake": mooncake})
        )
        assert (await both.gateway.ask(request(Api.CHAT))).is_done
    assert both.decoder.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "elsewhere"


# An answer that breaks off


def told(text: str, ids: list[int], **choice: Any) -> bytes:
    """Return a chunk of a completion as vLLM streams it with token IDs."""
    return data(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": None, **choice}],
        }
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_goes_on_by_its_token_ids_with_another_transfer(
    deploy: Deploy, bootstrap: BootstrapServer, stream: bool
) -> None:
    begun = [told("x" * 70, [7] * 70, prompt_token_ids=[1, 2]), told("a", [8])]

    async def decode(exchange: Exchange) -> None:
        exchange.write(*event_stream(begun, is_whole=False))
        exchange.engine.act = finish
        await until(lambda: not both.load(Role.PREFILL).kv_tokens, "the first token")
        exchange.reset()

    async def finish(exchange: Exchange) -> None:
        rest = told("b", [9], prompt_token_ids=exchange.body["prompt"], finish_reason="stop")
        exchange.write(*event_stream([rest, b"data: [DONE]\n\n"]))

    both = await pair(deploy, bootstrap, decode=decode, resume={"mode": "exact"})
    answer = await both.gateway.ask(request(Api.COMPLETIONS, stream=stream, max_tokens=100))
    assert answer.is_done
    assert answer.text == "x" * 70 + "ab"
    for engine in (both.prefiller, both.decoder):
        assert engine.bodies[0]["prompt"] == "Hello there"
        assert engine.bodies[1]["prompt"] == [1, 2, *[7] * 70, 8]
    transfers = [body["kv_transfer_params"]["transfer_id"] for body in both.decoder.bodies]
    assert transfers == [body["kv_transfer_params"]["transfer_id"] for body in both.prefiller.bodies]
    assert transfers[0] != transfers[1]
    assert both.gateway.metrics("pdproxy_resumes_total") == {("completion_tokens", "broken"): 1.0}


# With engines that meet


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("samples", [1, 2])
async def test_answer_is_the_engines(deploy: Deploy, api: Api, stream: bool, samples: int) -> None:
    gateway = await deploy(2, 2, connector="mooncake_bootstrap", engine={"dp_size": 3})
    body = request(api, stream=stream, n=samples, temperature=0)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert set(answer.texts) == set(range(samples))
    assert answer.texts[0] == await answer_alone({**body, "n": 1})
    assert sum(decoder.state.pulls for decoder in gateway.decoders) == samples
    assert sum(decoder.state.local_prefills for decoder in gateway.decoders) == 0
    if stream:
        stages = {stage for (stage,) in gateway.metrics("pdproxy_stage_duration_seconds_count")} - {"queue"}
        assert stages == {"prefill", "first_token", "stream"}


async def test_every_rank_of_a_prefiller_has_its_turn(deploy: Deploy) -> None:
    gateway = await deploy(connector="mooncake_bootstrap", prefiller={"dp_size": 3})
    for _ in range(6):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    ranks = [seen.headers["x-data-parallel-rank"] for seen in generations(*gateway.prefillers)]
    assert ranks == ["0", "1", "2"] * 2


@pytest.mark.parametrize("profile", ["v0.23", "v0.30", "v0.33"])
@pytest.mark.parametrize("fault", ["reset_after_tokens", "recompute"])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_answer_survives_its_decoder(deploy: Deploy, api: Api, fault: str, profile: str) -> None:
    engine = {"profile_name": profile, "dp_size": 2}
    gateway = await deploy(1, 2, connector="mooncake_bootstrap", engine=engine)
    gateway.decoders[0].faults.add(fault, tokens=70)
    body = request(api, stream=True, max_tokens=100)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    ((action, _),) = gateway.metrics("pdproxy_resumes_total")
    native = "raw_tokens" if profile == "v0.23" else "chat_tokens"
    assert action == ("completion_tokens" if api is Api.COMPLETIONS else native)
    assert sum(decoder.state.local_prefills for decoder in gateway.decoders) == 0


async def test_prefillers_that_are_restarted_are_met_under_their_new_names(deploy: Deploy) -> None:
    """A failed handoff makes the gateway query the engines again, and the next one succeeds."""
    # Time that a decoder waits for engines that it knows and that are gone.
    engine = {"waiting_seconds": 0.2}
    gateway = await deploy(2, 1, connector="mooncake_bootstrap", engine=engine, health={"quarantine_after": 2})
    for _ in range(2):
        assert (await gateway.ask(request(Api.CHAT))).is_done
    for prefiller in gateway.prefillers:
        await prefiller.restart()
    for _ in range(4):
        assert (await gateway.ask(request(Api.CHAT, stream=True))).is_done
    # No decoder fetches the KV if its request named an old engine.
    gateway.expects_pinned = 2
    assert gateway.metrics("pdproxy_kv_orphans_total") == {(): 2.0}
    assert gateway.metrics("pdproxy_resumes_total") == {("restart", "recomputed"): 2.0}


async def test_hand_overs_that_fail_keep_the_pair_apart(deploy: Deploy) -> None:
    gateway = await deploy(1, 1, connector="mooncake_bootstrap", health={"quarantine_after": 1})
    gateway.decoders[0].faults.add("load_failure", times=1)
    assert (await gateway.ask(request(Api.CHAT, stream=True))).is_done
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1.0}
    gateway.may_stay_pinned = 1
    gateway.expects_inexact_pins = True


async def test_late_answer_of_the_prefiller_does_not_set_the_stage_back(
    deploy: Deploy, bootstrap: BootstrapServer, caplog: pytest.LogCaptureFixture
) -> None:
    head, first = event_stream([told("a", [8])], is_whole=False)

    async def prefill(exchange: Exchange) -> None:
        await until(lambda: not both.load(Role.PREFILL).kv_tokens, "the first token")
        await prefills(exchange)

    async def decode(exchange: Exchange) -> None:
        exchange.write(head, first)
        await until(lambda: not both.load(Role.PREFILL).compute_tokens, "the prefiller's answer")
        exchange.reset()

    both = await pair(deploy, bootstrap, prefill, decode)
    with caplog.at_level("INFO"):
        assert not (await both.gateway.ask(request(Api.COMPLETIONS, stream=True))).is_done
    (term,) = [fields["term"] for record in caplog.records if "term" in (fields := getattr(record, "fields", {}))]
    assert term == "SD"
