"""SGLang's own API through the gateway: single requests and batches, streamed and not, and what goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.asking import Answer, read, until
from tests.canned import data
from tests.conftest import Deploy
from tests.connectors.meeting import DONE, Act, ActingEngine, Exchange, hangs, says, streams
from tests.connectors.meeting import answers as answers_openai
from tests.deployment import Deployment

TEXT = "The capital of France is"
BODY: dict[str, Any] = {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
INPUT_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}


@dataclass
class Site:
    """A gateway, and its `/generate`."""

    gateway: Deployment
    url: str

    async def ask(self, body: Any, method: str = "POST", **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.gateway.session.request(method, self.url, data=raw, headers=headers) as response:
            return await read(response)

    @property
    def sent(self) -> list[Any]:
        """The bodies of the decoders' requests, in the order of the decoders."""
        return [
            orjson.loads(seen.body) if isinstance(seen.body, bytes) else seen.body
            for engine in self.gateway.decoders
            for seen in (engine.received if isinstance(engine, ActingEngine) else engine.requests)
            if seen.path == "/generate"
        ]


@dataclass
class Opener:
    deploy: Deploy

    async def __call__(self, prefillers: Any = 1, decoders: Any = 1, **sections: Any) -> Site:
        sections = {"connector": "sglang_bootstrap", "retry": {"max_attempts": 1}, **sections}
        gateway = await self.deploy(prefillers, decoders, **sections)
        return Site(gateway, gateway.url + "/generate")

    async def acting(self, prefill: Act, decode: Act, **sections: Any) -> Site:
        return await self([ActingEngine("prefill", act=prefill)], [ActingEngine("decode", act=decode)], **sections)


@pytest.fixture
def start(deploy: Deploy) -> Opener:
    return Opener(deploy)


async def alone(body: dict[str, Any]) -> Answer:
    """Return the answer of one engine without disaggregation."""
    async with (
        SimulatedEngine(profile_name="sglang") as engine,
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/generate", json=body) as response,
    ):
        return await read(response)


def known(answer: Any) -> Any:
    """Return the members that are equal in every answer to a request."""
    if isinstance(answer, list):
        return [known(item) for item in answer]
    meta = {name: value for name, value in answer["meta_info"].items() if name not in ("id", "cached_tokens")}
    return {**answer, "meta_info": meta}


def finals(answer: Answer) -> dict[int, Any]:
    """Return the last event of each answer of a stream, by its index."""
    events = answer.events
    assert events[-1] == "[DONE]"
    return {event.get("index", 0): event for event in events[:-1]}


# Answers


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}},
        {"text": TEXT, "sampling_params": None},
        {"text": TEXT},
        {**BODY, "text": [TEXT]},
        {**BODY, "text": [TEXT, "Hello", "Where"]},
        {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 3}},
        {**BODY, "return_logprob": True, "top_logprobs_num": 2},
        {**BODY, **INPUT_LOGPROBS},
        {**BODY, **INPUT_LOGPROBS, "text": [TEXT, "Hello"], "logprob_start_len": 2},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_answer_is_that_of_an_engine_which_does_it_all(start: Opener, body: dict[str, Any], stream: bool) -> None:
    site = await start(2, 2)
    body = {**body, "stream": stream}
    answer, expected = await site.ask(body), await alone(body)
    assert answer.status == expected.status == 200
    assert answer.is_done
    if not stream:
        assert known(answer.json) == known(expected.json)
        return
    assert {index: known(event) for index, event in finals(answer).items()} == {
        index: known(event) for index, event in finals(expected).items()
    }


async def test_engines_bytes_pass_where_nothing_is_to_be_changed(start: Opener) -> None:
    event = b'data: {"text" : "x\\/", "meta_info":{"finish_reason":{"type":"stop"}, "n": 1.0}}\n\n'
    site = await start.acting(streams(event, DONE), streams(event, DONE))
    assert (await site.ask({**BODY, "stream": True})).body == event + DONE
    whole = event.removeprefix(b"data: ").strip()
    site = await start.acting(says(whole), says(whole))
    assert (await site.ask(BODY)).body == whole


async def test_every_answer_of_a_batch_has_a_separate_room(start: Opener) -> None:
    site = await start()
    batch = {
        "text": ["a", "b"],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        "return_logprob": [True, False],
        "stop_here": ["x"],
    }
    answer = await site.ask(batch)
    assert [len(item["output_ids"]) for item in answer.json] == [2, 3]
    assert {body["text"]: (body["sampling_params"], body["return_logprob"]) for body in site.sent} == {
        "a": ({"max_new_tokens": 2}, True),
        "b": ({"max_new_tokens": 3}, False),
    }
    assert len({body["bootstrap_room"] for body in site.sent}) == len({body["rid"] for body in site.sent}) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_samples_are_asked_for_one_by_one(start: Opener, stream: bool) -> None:
    """An engine would meet itself: it gives them all the same room."""
    site = await start()
    answer = await site.ask({"text": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 2}, "stream": stream})
    assert len(finals(answer) if stream else answer.json) == 4
    assert [body["sampling_params"]["n"] for body in site.sent] == [1] * 4
    assert sorted(body["text"] for body in site.sent) == ["a", "a", "b", "b"]


async def test_one_sample_of_one_prompt_is_a_list_if_several_were_asked_for(start: Opener) -> None:
    site = await start()
    assert len((await site.ask({**BODY, "sampling_params": {"n": 2, "max_new_tokens": 2}})).json) == 2
    assert isinstance((await site.ask({**BODY, "sampling_params": {"n": 1, "max_new_tokens": 2}})).json, dict)


async def test_log_probabilities_of_the_prompt_may_come_after_the_first_token(start: Opener) -> None:
    """The prefiller's answer and the decoder's first words are on their way at the same time."""

    def event(text: str, finish: Any = None, logprobs: Any = ()) -> bytes:
        meta = {"finish_reason": finish, "input_token_logprobs": list(logprobs), "input_top_logprobs": list(logprobs)}
        return data({"text": text, "meta_info": meta})

    async def prefill(exchange: Exchange) -> None:
        await exchange.engine.let_go.wait()
        await streams(event("x", {"type": "length"}, [[-1.0, 5, None]]), DONE)(exchange)

    async def decode(exchange: Exchange) -> None:
        await streams(event("x"), event("xy", {"type": "stop"}), DONE)(exchange)
        for _ in range(20):  # turns of the loop, in which the gateway reads it
            await asyncio.sleep(0)
        site.gateway.prefillers[0].let_go.set()  # type: ignore[attr-defined]

    site = await start.acting(prefill, decode)
    answer = await site.ask({**BODY, **INPUT_LOGPROBS, "stream": True})
    assert answer.is_done
    assert [event["text"] for event in answer.events[:-1]] == ["x", "xy"]
    for told in answer.events[:-1]:
        assert told["meta_info"]["input_token_logprobs"] == told["meta_info"]["input_top_logprobs"] == [[-1.0, 5, None]]


async def test_experts_of_the_prompt_are_the_prefillers(start: Opener) -> None:
    def answer(experts: str) -> bytes:
        return orjson.dumps({"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "routed_experts": experts}})

    site = await start.acting(says(answer("AAEC")), says(answer("/////w==")))  # 0, 1, 2 and four times 255
    told = (await site.ask({**BODY, "return_routed_experts": True})).json
    assert told["meta_info"]["routed_experts"] == "AAEC/w=="


async def test_reserved_members_of_clients_are_not_sent_to_engines(start: Opener) -> None:
    site = await start()
    mine = {"rid": "mine", "bootstrap_room": 5, "bootstrap_host": "10.6.6.6", "http_worker_ipc": "ipc://x"}
    assert (await site.ask({**BODY, **mine, "kv_hints": {}, "background": True, "routed_dp_rank": 3})).status == 200
    (sent,) = site.sent
    assert sent["rid"] != "mine"
    assert sent["bootstrap_room"] != 5
    assert sent["bootstrap_host"] == "127.0.0.1"
    assert not set(sent) & {"http_worker_ipc", "kv_hints", "background", "routed_dp_rank"}


async def test_put_is_accepted_like_post(start: Opener) -> None:
    """The answer is the engine's."""
    site = await start()
    assert (await site.ask(BODY, method="PUT")).status == 200


async def test_each_prompt_of_a_batch_has_its_own_log_probabilities(start: Opener) -> None:
    site = await start()
    batch = {**BODY, "text": [TEXT, TEXT], "return_logprob": True, "logprob_start_len": [-1, 3]}
    for stream in (True, False):
        answer = await site.ask({**batch, "stream": stream})
        told = list(finals(answer).values()) if stream else answer.json
        told.sort(key=lambda item: item.get("index", 0))
        first, second = (item["meta_info"]["input_token_logprobs"] for item in told)
        assert first == []
        assert len(second) == told[1]["meta_info"]["prompt_tokens"] - 3


# Accounts


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_are_counted(start: Opener, stream: bool) -> None:
    site = await start()
    await site.ask({**BODY, "stream": stream})
    tokens = site.gateway.metrics("pdproxy_tokens_total")
    assert tokens["completion",] == 6
    assert tokens["prompt",] > 0
    assert site.gateway.metrics("pdproxy_requests_total") == {("generate", "200"): 1}


async def test_request_is_let_in_like_any_other(start: Opener) -> None:
    """One that finds no room waits, and one that has no key is not served."""
    site = await start.acting(hangs, hangs, admission={"max_running_decode": 1, "max_waiting": 0})
    waiting = asyncio.create_task(site.ask(BODY))
    decoder = site.gateway.decoders[0]
    await decoder.works()  # type: ignore[attr-defined]
    answer = await site.ask(BODY)
    assert answer.status == 503
    assert answer.error["code"] == "queue_full"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("connector", ["plain", "vllm_pull"])
async def test_generate_is_served_only_by_engines_that_speak_it(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(connector=connector)
    answer = await Site(gateway, gateway.url + "/generate").ask(BODY)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


# Failures


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        ({"text": TEXT, "stream": "yes"}, "stream"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a"] * 5}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 5}}, "sampling_params"),
        ({"text": []}, None),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, 5]}, "sampling_params"),
    ],
)
async def test_unservable_requests_are_refused(start: Opener, body: Any, param: str | None) -> None:
    site = await start(fanout={"max_units": 4})
    answer = await site.ask(body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert site.sent == []


TOLD = b'{"error":{"message":"The input is too long"}}'
ABORT = {"type": "abort", "message": "transfer failed", "status_code": 500, "err_type": "InternalServerError"}
ABORTED = {"text": "", "meta_info": {"finish_reason": ABORT}}


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_refusal_reaches_the_client_byte_for_byte(start: Opener, stream: bool) -> None:
    site = await start.acting(says(TOLD, "400 Bad Request"), hangs)
    answer = await site.ask({**BODY, "stream": stream})
    assert (answer.status, answer.body) == (400, TOLD)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_abort_before_the_first_token_is_an_error(start: Opener, role: str, stream: bool) -> None:
    fails = streams(data(ABORTED), DONE) if stream else says(orjson.dumps(ABORTED))
    site = await start.acting(*((fails, hangs) if role == "prefill" else (hangs, fails)))
    answer = await site.ask({**BODY, "stream": stream})
    assert answer.status == 500
    assert not answer.is_stream
    assert b"transfer failed" in answer.body
    failed = site.gateway.prefillers[0] if role == "prefill" else site.gateway.decoders[0]
    results = site.gateway.metrics("pdproxy_instance_requests_total")
    assert results[f"{failed.host}:{failed.port}", "status", role] == 1


async def test_abort_in_the_middle_ends_the_stream_as_an_error(start: Opener) -> None:
    async def decode(exchange: Exchange) -> None:
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in (data({"text": "x", "meta_info": {"finish_reason": None}}), data(ABORTED), DONE):
            exchange.write(b"%x\r\n%b\r\n" % (len(event), event))
            await exchange.engine.let_go.wait()

    site = await start.acting(answers_openai, decode)
    async with site.gateway.session.post(site.url, json={**BODY, "stream": True}) as response:
        assert b'"x"' in await response.content.readuntil(b"\n\n")
        site.gateway.decoders[0].let_go.set()  # type: ignore[attr-defined]
        rest = await read(response)
    assert not rest.is_whole
    assert rest.events[-1]["error"]


async def test_generate_reports_an_abort_without_a_status_as_an_error(start: Opener) -> None:
    ended = {"text": "x", "meta_info": {"finish_reason": {"type": "abort", "message": "Abort", "status_code": None}}}
    site = await start.acting(answers_openai, says(orjson.dumps(ended)))
    answer = await site.ask(BODY)
    assert (answer.status, answer.json["error"]["code"]) == (503, "decode_aborted")


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_clears_a_pair_whose_hand_over_failed(start: Opener, stream: bool) -> None:
    ended = orjson.dumps({"text": "x", "meta_info": {"finish_reason": {"type": "stop"}}})
    well = streams(b"data: " + ended + b"\n\n", DONE) if stream else says(ended)
    fails = says(TOLD, "500 Internal Server Error")
    turns = iter([fails, well, fails])

    async def decode(exchange: Exchange) -> None:
        await next(turns)(exchange)

    site = await start.acting(hangs, decode)
    assert [(await site.ask({**BODY, "stream": stream})).status for _ in range(3)] == [500, 200, 500]
    assert site.gateway.metrics("pdproxy_pair_quarantines_total") == {}


async def test_answer_without_finish_reason_is_an_error(start: Opener) -> None:
    half = {"text": "x", "meta_info": {"finish_reason": None}}
    site = await start.acting(answers_openai, says(orjson.dumps(half)))
    assert (await site.ask(BODY)).status == 502
    site = await start.acting(answers_openai, streams(data(half), DONE))
    answer = await site.ask({**BODY, "stream": True})
    assert answer.status == 502 or not answer.is_whole


async def test_failure_before_the_first_token_is_tried_again(start: Opener) -> None:
    refused: list[str] = []
    whole = orjson.dumps({"text": "x", "meta_info": {"finish_reason": {"type": "stop"}}})

    async def prefill(exchange: Exchange) -> None:
        if refused:
            await says(whole)(exchange)
        else:
            refused.append(exchange.body["rid"])
            await says(TOLD, "503 Service Unavailable")(exchange)

    async def decode(exchange: Exchange) -> None:
        await until(lambda: refused, "the refusal")
        await (hangs if exchange.body["rid"] in refused else says(whole))(exchange)

    prefillers = [ActingEngine("prefill", act=prefill) for _ in range(2)]
    decoders = [ActingEngine("decode", act=decode) for _ in range(2)]
    site = await start(prefillers, decoders, retry={"max_attempts": 3})
    assert (await site.ask(BODY)).body == whole
    assert [len(engine.received) for engine in prefillers] == [1, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_ends_every_leg_of_its_batch(start: Opener, stream: bool) -> None:
    site = await start.acting(hangs, hangs)
    prefiller, decoder = site.gateway.prefillers[0], site.gateway.decoders[0]
    asked = asyncio.create_task(site.ask({"text": ["a", "b", "c"], "stream": stream}))
    await prefiller.works(3)  # type: ignore[attr-defined]
    await decoder.works(3)  # type: ignore[attr-defined]
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    for engine in (prefiller, decoder):
        await until(lambda engine=engine: engine.hung_up == len(engine.aborted) == 3, "all legs to end")
