"""Requests without a handoff: log probabilities of the prompt, and beam searches."""

from __future__ import annotations

from itertools import product
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.common.backend import Role
from proxy.connectors import CONNECTORS
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import Answer, ask, read, request, until
from tests.conftest import Deploy
from tests.deployment import generations

LISTS = [[*b"Which river is long? The Nile"], [*b"Which river is long? The Po"], [*b"Which river? None"]]
ECHOES: dict[str, dict[str, Any]] = {
    "one token": request(Api.COMPLETIONS, max_tokens=1, echo=True, logprobs=1),
    "none": request(Api.COMPLETIONS, max_tokens=0, echo=True, logprobs=2),
    "no alternatives": request(Api.COMPLETIONS, max_tokens=1, echo=True, logprobs=0),
    "prompts": request(Api.COMPLETIONS, prompt=LISTS, max_tokens=1, echo=True, logprobs=1, seed=1234, temperature=0),
    "samples": request(Api.COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=1, echo=True, logprobs=1),
}
PROMPT_LOGPROBS: dict[str, dict[str, Any]] = {
    "completion": request(Api.COMPLETIONS, max_tokens=1, prompt_logprobs=2),
    "echo": request(Api.COMPLETIONS, max_tokens=0, echo=True, prompt_logprobs=0),
    "chat": request(Api.CHAT, max_tokens=1, prompt_logprobs=0),
    "max_completion_tokens": request(Api.CHAT, max_tokens=9, max_completion_tokens=1, prompt_logprobs=1),
}
VLLM = sorted(CONNECTORS.keys() - {"plain", "sglang_bootstrap"})
UNITS = {"prompts": 3, "samples": 4}


async def answer_of_one_engine(body: dict[str, Any], connector: str) -> Answer:
    """Return the answer of a single engine, without a gateway."""
    profile: dict[str, Any] = {"profile_name": "sglang"} if connector == "sglang_bootstrap" else {}
    async with SimulatedEngine(**profile) as engine, aiohttp.ClientSession() as session:
        return await ask(session, engine.url, body)


def choices(answer: Answer) -> dict[int, list[Any]]:
    """Return the parts of each choice in order, because streams may mix the choices in any way."""
    parts: dict[int, list[Any]] = {}
    for payload in answer.events if answer.is_stream else [answer.json]:
        for choice in payload["choices"] if isinstance(payload, dict) else ():
            parts.setdefault(choice["index"], []).append(choice)
    return parts


@pytest.mark.covering("connector kind shape", product(CONNECTORS, ECHOES, ("stream", "whole")))
async def test_echoed_prompt_has_the_logprobs_of_a_single_engine(
    deploy: Deploy, connector: str, kind: str, shape: str
) -> None:
    stream = shape == "stream"
    gateway = await deploy(2, 2, connector=connector)
    body = ECHOES[kind] | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    answer, alone = await gateway.ask(body), await answer_of_one_engine(body, connector)
    if body["max_tokens"] == 0 and connector == "sglang_bootstrap":
        assert (answer.status, answer.body) == (alone.status, alone.body) == (400, answer.body)
        return
    assert (answer.status, answer.is_done) == (200, True)
    assert choices(answer) == choices(alone)
    assert [answer.usage[name] for name in ("prompt_tokens", "completion_tokens")] == [
        sum(map(len, LISTS)) if kind == "prompts" else alone.usage["prompt_tokens"],
        alone.usage["completion_tokens"],
    ]
    first = choices(answer)[0][0]["logprobs"]
    assert None not in first["token_logprobs"][1:]
    if connector != "plain":
        assert generations(*gateway.decoders) == []
        request_counts = [len(generations(engine)) for engine in gateway.prefillers]
        assert sum(request_counts) == UNITS.get(kind, 1)
        assert bool(min(request_counts)) == (kind in UNITS)


@pytest.mark.parametrize("kind", PROMPT_LOGPROBS)
@pytest.mark.parametrize("connector", ["plain", *VLLM])
async def test_prompt_logprobs_equal_those_of_a_single_engine(deploy: Deploy, connector: str, kind: str) -> None:
    gateway = await deploy(2, 2, connector=connector)
    body = PROMPT_LOGPROBS[kind]
    answer, alone = (await gateway.ask(body)).json, (await answer_of_one_engine(body, connector)).json
    assert answer["choices"] == alone["choices"]
    logprobs = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    assert None not in logprobs[1:]
    assert answer.get("prompt_logprobs") == alone.get("prompt_logprobs")
    if connector != "plain":
        assert generations(*gateway.decoders) == []


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("new_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["Which river?", ["Which river?", "That one"]], ids=["one", "list"])
async def test_input_logprobs_of_generate_need_no_decoder(
    deploy: Deploy, prompt: Any, new_tokens: int, stream: bool
) -> None:
    gateway = await deploy(2, 2, connector="sglang_bootstrap")
    body = {"text": prompt, "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    body["sampling_params"] = {"max_new_tokens": new_tokens}
    async with SimulatedEngine(profile_name="sglang") as engine:
        answers = [await ask_generate(gateway.session, url, body) for url in (gateway.url, engine.url)]
    assert answers[0] == answers[1]
    assert [len(meta["input_token_logprobs"]) for _, meta in answers[0]] == (
        [12, 8] if isinstance(prompt, list) else [12]
    )
    assert not any(seen.path == "/generate" for engine in gateway.decoders for seen in engine.requests)
    assert sum(seen.path == "/generate" for engine in gateway.prefillers for seen in engine.requests) == len(answers[0])


async def ask_generate(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return text, tokens and metadata for each prompt from `/generate`."""
    async with session.post(url + "/generate", data=orjson.dumps(body)) as response:
        answer = await read(response)
    assert answer.is_done
    payloads = answer.events[:-1] if answer.is_stream else answer.json
    last = (
        {payload.get("index", number): payload for number, payload in enumerate(payloads)}
        if isinstance(payloads, list)
        else {0: payloads}
    )
    return [
        ((payload["text"], payload["output_ids"]), {n: v for n, v in payload["meta_info"].items() if n != "id"})
        for _, payload in sorted(last.items())
    ]


@pytest.mark.parametrize("connector", VLLM)
@pytest.mark.parametrize("fault", ["refuse_status", "reset_before_headers", "truncated_json"])
async def test_logprobs_are_retried_on_another_prefiller(deploy: Deploy, connector: str, fault: str) -> None:
    gateway = await deploy(2, 1, connector=connector)
    gateway.prefillers[0].faults.add(fault, path=Api.COMPLETIONS.path)
    answers = [await gateway.ask(ECHOES["one token"]) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert generations(*gateway.decoders) == []


@pytest.mark.parametrize("connector", [*VLLM, "sglang_bootstrap"])
async def test_logprobs_count_as_load_of_the_prefiller_only(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(connector=connector)
    gateway.prefillers[0].faults.add("hang_before_headers", path=Api.COMPLETIONS.path)
    board, pools = gateway.scoreboard, gateway.worker.pools
    (prefiller,), (decoder,) = pools.pool_of(Role.PREFILL).all_backends(), pools.pool_of(Role.DECODE).all_backends()
    async with gateway.asking(ECHOES["one token"]):
        await until(lambda: board.open_leases(prefiller.slot), "the prefiller to be at work")
        assert board.load_of(prefiller.slot).compute_tokens > 3000
        assert board.open_leases(decoder.slot) == 0


async def test_logprobs_need_no_healthy_decoder(deploy: Deploy) -> None:
    gateway = await deploy()
    await gateway.decoders[0].kill()
    assert (await gateway.ask(ECHOES["one token"])).status == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    (request(Api.COMPLETIONS, echo=True, logprobs=1), "echo"),
    (request(Api.COMPLETIONS, echo=True, logprobs=1, max_tokens=None), "echo"),
    (request(Api.COMPLETIONS, prompt_logprobs=1, max_tokens=2), "prompt_logprobs"),
    (request(Api.CHAT, prompt_logprobs=1, max_tokens=1, max_completion_tokens=2), "prompt_logprobs"),
    (request(Api.CHAT, prompt_logprobs=1, max_tokens=None), "prompt_logprobs"),
    (request(Api.CHAT, use_beam_search=True, n=2), "use_beam_search"),
    (request(Api.COMPLETIONS, best_of=3, n=2), "best_of"),
    # A prefiller could serve this, but would decode all the beams.
    (request(Api.COMPLETIONS, best_of=3, max_tokens=1), "best_of"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
@pytest.mark.parametrize("connector", VLLM)
async def test_request_that_no_handoff_can_serve_is_rejected(
    deploy: Deploy, connector: str, body: dict[str, Any], param: str
) -> None:
    gateway = await deploy(connector=connector)
    answer = await gateway.ask(body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert generations(*gateway.engines) == []


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
@pytest.mark.parametrize("connector", VLLM)
async def test_request_without_handoff_is_served_by_a_decoder_if_configured(
    deploy: Deploy, connector: str, body: dict[str, Any], param: str
) -> None:
    gateway = await deploy(connector=connector, kv={"on_unsupported": "local"})
    answer, alone = await gateway.ask(body), await answer_of_one_engine(body, connector)
    assert answer.status == 200
    assert choices(answer) == choices(alone)
    assert generations(*gateway.prefillers) == []
    if param in ("use_beam_search", "best_of"):  # a search gets the request unchanged
        (seen,) = generations(*gateway.decoders)
        assert seen.body == body
