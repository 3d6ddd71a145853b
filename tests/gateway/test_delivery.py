"""The bytes that a client gets: those of the engine, whatever else the gateway requests from the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.common.terms import Action
from proxy.dialects.call import Call
from proxy.dialects.segment import Meaning, Segment
from proxy.gateway.delivery import Delivery
from proxy.resume.engines import VLLM
from proxy.resume.overlap import AnswerMismatch
from proxy.resume.seam import Seam, SeamPlan
from proxy.resume.situation import Resumption
from proxy.settings import Cost
from proxy.sim.engine import SimulatedEngine
from proxy.wire.document import Body, join_body
from proxy.wire.openai import NO_KV_PARAMS, OPENAI_APIS, Api
from proxy.wire.sse import EventSplitter
from tests.asking import api_of, ask, request
from tests.canned import data
from tests.parsing import parse

THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"city": {}, "day": {}}}}}
    for name in ("weather", "calendar")
]
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
# No prompt fills a block, so none is found in the prefix cache.
VERSIONS = ("v0.18", "v0.27", "v0.33")
STEPS: dict[str, dict[str, Any]] = {"one": {}, "three": {"tokens_per_step": 3}, "interval": {"stream_interval": 4}}
"""How many tokens engines put into a chunk."""
ENGINE: dict[str, Any] = {"tool_call_parser": "kimi_k2", "eos_after": 60, "block_size": 1 << 20}
DONE = b"data: [DONE]\n\n"


def call_of(body: dict[str, Any]) -> Call:
    return parse(api_of(body), orjson.dumps(body), Cost())


def take(delivery: Delivery, stream: bytes, details: dict[str, Any] | None = None) -> tuple[bytes, Meaning]:
    """Return the client's bytes for a stream, and how it ended: DONE is complete, CONTENT is broken off.

    `details`: the prompt details of a prefiller that has handed over its KV cache.
    """
    segment, output = delivery.begin_stream(), []
    for event in EventSplitter().split_chunk(stream):
        match segment.read_event(event):
            case Meaning.OPENING:
                delivery.take_role_chunk(segment, event)
            case Meaning.CONTENT:
                output.append(delivery.take_content(segment, event))
                if delivery.is_stopped:
                    output.append(delivery.make_missing_end(details))
                    return b"".join(output), Meaning.DONE
            case Meaning.USAGE:
                output.append(delivery.take_usage_chunk(segment, event, details, is_handed_over=details is not None))
            case Meaning.RECOMPUTED:
                output.append(delivery.take_recompute_chunk(segment))
                if not delivery.is_stopped:
                    return b"".join(output), Meaning.RECOMPUTED
                output.append(delivery.make_missing_end(details))
                return b"".join(output), Meaning.DONE
            case Meaning.DONE | Meaning.ERROR:
                break
            case _:
                output.append(delivery.pass_other_event(segment, event))
    return b"".join(output), Meaning.DONE if segment.is_complete else Meaning.CONTENT


def delivered(body: dict[str, Any], stream: bytes) -> bytes:
    """Return the client's bytes for a request, without the blanks in place of ids."""
    return re.sub(rb'("token_ids":null) +', rb"\1", take(Delivery(call_of(body), is_observed=True), stream)[0])


async def said_by(engine: SimulatedEngine, body: dict[str, Any] | Body) -> bytes:
    """Return the stream of an engine without the members that differ each time."""
    fields = body if isinstance(body, dict) else orjson.loads(join_body(body))
    async with aiohttp.ClientSession() as session:
        answer = await ask(session, engine.url, fields, x_request_id="r")
    return re.sub(rb'"created":\d+', b'"created":1', answer.body)


# The engine's own bytes

ASKED: dict[str, dict[str, Any]] = {
    "chat": request(Api.CHAT, "naïve café 日本 🙂", max_tokens=100),
    "completion": request(Api.COMPLETIONS, "naïve café 日本 🙂", max_tokens=100),
    "reasoning": request(Api.CHAT, max_tokens=120, **THINKING),
    "tools": request(Api.CHAT, max_tokens=400, tools=TOOLS),
    "reasoning and tools": request(Api.CHAT, max_tokens=400, tools=TOOLS, **THINKING),
    "cut off in a tool call": request(Api.CHAT, max_tokens=60, tools=TOOLS),
    "logprobs": request(Api.CHAT, max_tokens=60, logprobs=True, top_logprobs=2, **THINKING),
    "tools and logprobs": request(Api.CHAT, max_tokens=400, logprobs=True, tools=TOOLS),
    "logprobs of a completion": request(Api.COMPLETIONS, max_tokens=60, logprobs=2),
    "stop strings": request(Api.CHAT, max_tokens=60, stop=["garden", " s"]),
    "stop strings of a completion": request(Api.COMPLETIONS, max_tokens=60, stop=["garden", " s"]),
    "a stop string that is shown": request(Api.COMPLETIONS, stop=" s", max_tokens=60, include_stop_str_in_output=True),
}


@pytest.mark.covering("asked steps profile is_continuous", product(ASKED, STEPS, VERSIONS, (False, True)))
async def test_client_without_ids_gets_the_bytes_of_an_engine_without_ids(
    asked: str, steps: str, profile: str, is_continuous: bool
) -> None:
    body = {
        **ASKED[asked],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": is_continuous},
    }
    async with SimulatedEngine(profile_name=profile, **ENGINE, **STEPS[steps]) as engine:
        plain = await said_by(engine, body)
        watched = await said_by(engine, VLLM.make_observable_call(call_of(body)).make_body({}))
    assert b'"token_ids":[' in watched
    assert delivered(body, watched) + DONE == plain.replace(NO_KV_PARAMS, b"")


@pytest.mark.parametrize("body", ASKED.values(), ids=list(ASKED))
async def test_client_without_include_usage_gets_no_usage(body: dict[str, Any]) -> None:
    body = {**body, "stream": True}
    async with SimulatedEngine(**ENGINE) as engine:
        plain = await said_by(engine, body | WITH_USAGE)
        watched = await said_by(engine, VLLM.make_observable_call(call_of(body)).make_body({}))
    assert delivered(body, watched) == plain[: plain.rindex(b"data: {")]


@pytest.mark.parametrize("body", ASKED.values(), ids=list(ASKED))
async def test_client_with_ids_gets_all_members_of_the_engine(body: dict[str, Any]) -> None:
    body = {**body, "stream": True, "return_token_ids": True, **WITH_USAGE}
    async with SimulatedEngine(**ENGINE) as engine:
        watched = await said_by(engine, VLLM.make_observable_call(call_of(body)).make_body({}))
        assert watched == await said_by(engine, body)
    assert delivered(body, watched) + DONE == watched


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["", "tools"])
@pytest.mark.parametrize("steps", [{}, {"tokens_per_step": 5}], ids=lambda steps: "".join(steps))
@pytest.mark.parametrize("profile", ["v0.27", "v0.33"])
async def test_client_without_reasoning_gets_the_events_of_an_engine_without_it(
    profile: str, steps: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = request(Api.CHAT, max_tokens=400, stream=True, include_reasoning=False, **WITH_USAGE, **THINKING, **fields)
    async with SimulatedEngine(profile_name=profile, **ENGINE, **steps) as engine:
        plain = await said_by(engine, body)
        watched = await said_by(engine, VLLM.make_observable_call(call_of(body)).make_body({}))
    assert b'"reasoning":' in watched
    got = EventSplitter().split_chunk(delivered(body, watched) + DONE)
    expected = EventSplitter().split_chunk(plain)
    assert [_parsed(event.data) for event in got] == [_without_kv_params(_parsed(event.data)) for event in expected]


def _parsed(text: bytes | None) -> Any:
    return None if text == b"[DONE]" else orjson.loads(text or b"")


def _without_kv_params(payload: Any) -> Any:
    """Remove the members of vLLM 0.33 that clients do not get."""
    if payload is not None:
        payload.pop("kv_transfer_params", None)
    return payload


CHAT = request(Api.CHAT, stream=True)
COMPLETION = request(Api.COMPLETIONS, stream=True)


def chunk(ids: list[int] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    shows = fields if "text" in fields else {"delta": fields}
    choice = {"index": 0, **shows, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


ROLE = chunk(role="assistant", content="") | {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\r\n\r\n',
        b'data:{"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        b'id: 7\nevent: x\ndata: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        b'data: {"choices":\ndata: [{"index":0,"text":"a","finish_reason":null}]}\n\n',
    ],
)
def test_event_without_ids_passes_unchanged(event: bytes) -> None:
    """However it is written."""
    assert delivered(COMPLETION, event) == event


def test_event_of_several_lines_stays_one_event() -> None:
    event = b'data: {"choices":\ndata: [{"index":0,"text":"a","finish_reason":null,"token_ids":[7]}]}\n\n'
    (got,) = EventSplitter().split_chunk(delivered(COMPLETION, event))
    assert orjson.loads(got.data or b"")["choices"] == [
        {"index": 0, "text": "a", "finish_reason": None, "token_ids": None}
    ]


def test_text_that_looks_like_ids_is_kept() -> None:
    text = '"token_ids":[1,2]'
    assert delivered(COMPLETION, data(chunk([7], text=text))) == data(chunk(None, text=text))


def test_chunks_that_lose_their_ids_keep_their_length() -> None:
    """However they travel: those that are passed on as they came could not have another."""
    for ids, written in (([3], b"null"), ([123456], b"null    "), ([1, 2], b"null ")):
        told = data(chunk(ids, content="a"))
        given = take(Delivery(call_of(CHAT), is_observed=True), told)[0]
        assert given == told.replace(orjson.dumps(ids), written)


def test_chunks_that_carry_only_ids_are_left_out() -> None:
    stream = (
        data(ROLE) + data(chunk([3])) + data(chunk([4, 5], content="日")) + data(chunk([6])) + data(chunk([7], "stop"))
    )
    role = data(ROLE | {"prompt_token_ids": None})
    assert delivered(CHAT, stream) == role + data(chunk(None, content="日")) + data(chunk(None, "stop"))


def test_delivery_sends_no_bytes_before_the_first_output() -> None:
    delivery = Delivery(call_of(CHAT), is_observed=True)
    assert take(delivery, b": hello\n\n" + data(ROLE) + data(chunk([3])) + data({"x": 1}))[0] == b""
    assert not delivery.has_output
    assert delivery.is_answer_changed
    segment, event = Segment(), EventSplitter().split_chunk(data(chunk([4], content="a")))[0]
    segment.read_event(event)
    expected = (
        b": hello\n\n" + data(ROLE | {"prompt_token_ids": None}) + data({"x": 1}) + data(chunk(None, content="a"))
    )
    assert delivery.take_content(segment, event) == expected
    assert delivery.has_output


# Unwatched answers


def unobserved(body: dict[str, Any]) -> Delivery:
    return Delivery(call_of(body), is_observed=False)


def test_unwatched_answer_passes_byte_for_byte() -> None:
    stream = data(chunk([7], text="a")) + data(chunk([8], "stop", text="b"))
    delivery = unobserved(COMPLETION)
    assert take(delivery, stream) == (stream, Meaning.CONTENT)
    assert delivery.has_output
    assert delivery.is_answer_changed


def test_last_chunk_of_an_unwatched_answer_is_dropped() -> None:
    words = chunk([8], "stop", text="b")
    words["choices"][0]["stop_reason"] = "recomputed"
    assert take(unobserved(COMPLETION), data(words)) == (b"", Meaning.RECOMPUTED)


@pytest.mark.parametrize("is_observed", [True, False])
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_prompt_ids_are_kept_in_a_merged_stream(body: dict[str, Any], is_observed: bool) -> None:
    """The payloads are written again, after the ids were cut out of them."""
    written: list[Any] = []

    def rewrite(payload: dict[str, Any]) -> bytes:
        written.append(orjson.loads(orjson.dumps(payload)))
        return b"x"

    call = call_of({**body, "return_token_ids": True})
    first = chunk([7], content="a") if body is CHAT else chunk([7], text="a")
    if body is not CHAT:
        first["choices"][0]["prompt_token_ids"] = [1, 2]
    take(
        Delivery(call, is_observed=is_observed, rewrite_chunk=rewrite),
        (data(ROLE) if body is CHAT else b"") + data(first),
    )
    owner = written[0] if body is CHAT else written[0]["choices"][0]
    assert owner["prompt_token_ids"] == [1, 2]


# The end of a decoder


def words(ids: list[int], **fields: Any) -> bytes:
    """Return the last chunk of a decoder that gives up."""
    payload = chunk(ids, "stop", **fields)
    payload["choices"][0]["stop_reason"] = "recomputed"
    return data(payload)


def test_text_of_a_decoders_last_chunk_counts_but_not_its_finish() -> None:
    delivery = Delivery(call_of(COMPLETION), is_observed=True)
    output, ended = take(delivery, data(chunk([7], text="a")) + words([8], text="b"))
    assert ended is Meaning.RECOMPUTED
    assert output == data(chunk(None, text="a")) + data(chunk(None, text="b"))
    assert (delivery.transcript.content_text, delivery.transcript.ids.tolist()) == ("ab", [7, 8])


def test_first_chunk_of_a_decoder_may_be_its_last() -> None:
    """Then the client has a part of the answer, and the prompt's ids if it asked for ids."""
    told = chunk([8], text="b")
    told["choices"][0]["prompt_token_ids"] = [1, 2]
    last = orjson.loads(orjson.dumps(told))
    last["choices"][0] |= {"finish_reason": "stop", "stop_reason": "recomputed"}
    delivery = Delivery(call_of({**COMPLETION, "return_token_ids": True}), is_observed=True)
    output, ended = take(delivery, data(last))
    assert ended is Meaning.RECOMPUTED
    assert orjson.loads(output.removeprefix(b"data: ")) == told
    assert delivery.has_output
    assert delivery.is_answer_changed


def test_empty_last_chunk_is_not_sent() -> None:
    delivery = Delivery(call_of(CHAT), is_observed=True)
    output, _ = take(delivery, data(ROLE) + data(chunk([7], content="a")) + words([8]))
    assert output.endswith(data(chunk(None, content="a")))


def test_client_with_ids_gets_those_of_the_last_chunk() -> None:
    delivery = Delivery(call_of({**CHAT, "return_token_ids": True}), is_observed=True)
    output, _ = take(delivery, data(ROLE) + data(chunk([7], content="a")) + words([8]))
    assert output.endswith(data(chunk([8])))


TOOL_CALL = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def resumed(body: dict[str, Any], kept: int, **options: Any) -> Delivery:
    """Return a delivery that resumes after `kept` ids an answer with the text "a" and the id 7."""
    delivery = Delivery(call_of(body), is_observed=True)
    is_chat = "messages" in body
    first = data(chunk([7], content="a")) if is_chat else data(chunk([7], text="a"))
    take(delivery, (data(ROLE) if is_chat else b"") + first)
    seam = Seam(
        SeamPlan(api=api_of(body), answer_head=delivery.head, transcript=delivery.transcript, kept_ids=kept, **options)
    )
    delivery.prepare_to_continue(Resumption(Action.CHAT_TOKENS, None, seam, kept))
    return delivery


@pytest.mark.parametrize("is_resumed", [False, True])
def test_tool_calls_of_the_last_chunk_are_dropped(is_resumed: bool) -> None:
    delivery = resumed(CHAT, 1) if is_resumed else Delivery(call_of(CHAT), is_observed=True)
    output, _ = take(delivery, data(ROLE) + words([8], content="b", tool_calls=[TOOL_CALL]))
    assert b'"content":"b"' in output
    assert b"tool_calls" not in output
    assert not delivery.transcript.tools


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (["STOP"], "hello "),
        (["STOP", "x"], "hello "),
        ("ab", "hello wo"),
        (["x"], "hello wor"),
        (None, "hello wor"),
        (["a long stop string"], ""),
    ],
)
@pytest.mark.parametrize("api", OPENAI_APIS)
def test_possible_stop_string_at_the_end_of_the_last_chunk_is_withheld(api: Api, stop: object, told: str) -> None:
    delivery = Delivery(call_of(request(api, stream=True, stop=stop)), is_observed=True)
    name = "text" if api is Api.COMPLETIONS else "content"
    take(delivery, words([7], **{name: "hello wor"}))
    assert delivery.transcript.content_text == told


def test_delivery_withholds_no_text_if_stop_strings_are_shown() -> None:
    body = {**COMPLETION, "stop": ["STOP"], "include_stop_str_in_output": True}
    delivery = Delivery(call_of(body), is_observed=True)
    take(delivery, words([7], text="hello"))
    assert delivery.transcript.content_text == "hello"


def test_delivery_withholds_no_text_twice() -> None:
    """Text that is late, and last words: only the end of both may begin a stop string."""
    delivery = resumed({**CHAT, "stop": ["STOP"]}, 1, pending_delta={"content": "-late-"})
    output, _ = take(delivery, words([8], content="xyz"))
    assert output == data(chunk(None, content="-late-"))
    assert delivery.transcript.content_text == "a-late-"


# From one decoder to the next


def test_restarted_answer_forgets_everything() -> None:
    delivery = Delivery(call_of(CHAT), is_observed=True)
    take(delivery, data(ROLE) + b": x\n\n" + data(chunk([7])))
    delivery.restart_answer()
    assert (delivery.transcript.ids.tolist(), delivery.head, delivery.is_answer_changed) == ([], {}, False)
    output, _ = take(delivery, data(ROLE | {"id": "y"}) + data(chunk([8], content="b") | {"id": "y"}))
    expected = data(ROLE | {"id": "y", "prompt_token_ids": None}) + data(chunk(None, content="b") | {"id": "y"})
    assert output == expected


def test_next_decoder_continues_the_same_stream() -> None:
    delivery = resumed(CHAT, 1)
    stream = (
        data(ROLE | {"id": "y"}) + data(chunk([8], content="b") | {"id": "y"}) + data(chunk([9], "stop") | {"id": "y"})
    )
    output, _ = take(delivery, stream)
    assert output == data(chunk(None, content="b")) + data(chunk(None, "stop"))
    assert delivery.transcript.ids.tolist() == [7, 8, 9]


def test_ids_to_be_generated_again_are_forgotten() -> None:
    delivery = Delivery(call_of(CHAT), is_observed=True)
    take(delivery, data(ROLE) + data(chunk([7], content="a")) + data(chunk([8])))
    seam = Seam(SeamPlan(api=Api.CHAT, answer_head=delivery.head, transcript=delivery.transcript, kept_ids=1))
    delivery.prepare_to_continue(Resumption(Action.CHAT_TOKENS, None, seam, 1))
    assert delivery.transcript.ids.tolist() == [7]
    assert not delivery.is_answer_changed


def test_replay_keeps_the_transcript() -> None:
    delivery = Delivery(call_of(CHAT), is_observed=True)
    take(delivery, data(ROLE) + data(chunk([7], content="a")) + data(chunk([8])))
    seam = Seam(SeamPlan(api=Api.CHAT, answer_head=delivery.head, transcript=delivery.transcript, replays_answer=True))
    delivery.prepare_to_continue(Resumption(Action.REPLAY, None, seam))
    output, _ = take(delivery, data(ROLE) + data(chunk([7, 8, 9], content="ab")))
    assert output == data(chunk(None, content="b"))
    assert delivery.transcript.ids.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("told", "is_right"),
    [([1, 2, 7], True), ([1, 2], False), ([1, 2, 8], False), (None, False)],
)
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_decoder_with_another_prompt_is_a_mismatch(body: dict[str, Any], told: Any, is_right: bool) -> None:
    delivery = resumed(body, 1)
    delivery.prepare_to_continue(
        Resumption(
            Action.CHAT_TOKENS,
            None,
            Seam(SeamPlan(api=api_of(body), answer_head={}, transcript=delivery.transcript, kept_ids=1)),
            1,
            b"[1, 2,7]",
        )
    )
    if body is CHAT:
        stream = data(ROLE | {"prompt_token_ids": told}) + data(chunk([8], content="b"))
    else:
        first = chunk([8], text="b")
        first["choices"][0]["prompt_token_ids"] = told
        stream = data(first)
    if is_right:
        assert take(delivery, stream)[0]
    else:
        with pytest.raises(AnswerMismatch):
            take(delivery, stream)


def test_resumed_chat_without_a_role_chunk_is_a_mismatch() -> None:
    delivery = resumed(CHAT, 1)
    delivery.prepare_to_continue(
        Resumption(
            Action.CHAT_TOKENS,
            None,
            Seam(SeamPlan(api=Api.CHAT, answer_head={}, transcript=delivery.transcript, kept_ids=1)),
            1,
            b"[1,2,7]",
        )
    )
    with pytest.raises(AnswerMismatch):
        take(delivery, data(chunk([8], content="b")))


def test_prompt_of_a_continuation_is_hidden_from_the_client() -> None:
    delivery = resumed({**CHAT, "return_token_ids": True}, 1)
    take(delivery, data(ROLE | {"prompt_token_ids": [1, 2, 7]}) + data(chunk([8], content="b")))
    assert delivery.transcript.prompt_ids == b"[1,2]"


# Usage

COUNTS = {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}
USAGE = {"id": "y", "object": "chat.completion.chunk", "created": 2, "model": "m", "choices": [], "usage": COUNTS}


@pytest.mark.parametrize("fields", [{}, WITH_USAGE])
@pytest.mark.parametrize("details", [None, {"cached_tokens": 1}])
def test_usage_has_the_prompt_details_of_the_prefiller(fields: dict[str, Any], details: Any) -> None:
    delivery = Delivery(call_of({**CHAT, **fields}), is_observed=True)
    output, _ = take(delivery, data(chunk([7], "stop")) + data(USAGE), details)
    expected = COUNTS if details is None else COUNTS | {"prompt_tokens_details": details}
    assert delivery.last_usage == expected
    assert output == data(chunk(None, "stop")) + (data(USAGE | {"usage": expected}) if fields else b"")


def test_usage_of_an_unfinished_answer_is_not_sent() -> None:
    """VLLM 0.18 to 0.30 ends a request in this way if it was preempted before its first token."""
    delivery = Delivery(call_of({**CHAT, **WITH_USAGE}), is_observed=True)
    assert take(delivery, data(ROLE) + data(USAGE) + DONE)[0] == b""


def test_usage_of_a_resumed_answer_covers_the_whole_answer() -> None:
    delivery = resumed({**CHAT, **WITH_USAGE}, 1)
    told = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    output, _ = take(delivery, data(chunk([8, 9], "stop")) + data(USAGE | {"usage": told}))
    expected = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    assert delivery.last_usage == expected
    assert output.endswith(data(USAGE | {"id": "x", "created": 1, "usage": expected}))


def ending(output: bytes) -> Sequence[Any]:
    return [orjson.loads(event.data or b"") for event in EventSplitter().split_chunk(output)]


def test_answer_without_an_end_of_an_engine_is_ended() -> None:
    delivery = resumed({**CHAT, **WITH_USAGE}, 1, pending_delta={"content": "lo"})
    late, finish, usage = ending(delivery.make_missing_end({"cached_tokens": 1}))
    assert late["choices"][0]["delta"] == {"content": "lo"}
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["delta"]) == ("length", {})
    assert {finish["id"], late["id"], usage["id"]} == {"x"}
    assert usage["choices"] == []
    expected = {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
    assert usage["usage"] == expected | {"prompt_tokens_details": {"cached_tokens": 1}}
    assert delivery.transcript.content_text == "alo"


@pytest.mark.parametrize(("counts", "details"), [(True, {"reasoning_tokens": 1}), (False, None)])
def test_reasoning_tokens_are_counted_when_engines_count_them(counts: bool, details: Any) -> None:
    """A completion's usage does not, and no engine's is there at the end."""
    delivery = Delivery(call_of({**CHAT, **WITH_USAGE}), is_observed=True)
    take(delivery, data(ROLE) + data(chunk([7], reasoning="a")) + data(chunk([8], content="b")))
    delivery.counts_reasoning = counts
    delivery.prepare_to_continue(
        Resumption(
            Action.FINISH,
            None,
            Seam(SeamPlan(api=Api.CHAT, answer_head={}, transcript=delivery.transcript, kept_ids=2)),
            2,
        )
    )
    assert ending(delivery.make_missing_end(None))[-1]["usage"].get("completion_tokens_details") == details


def test_ended_answer_has_usage_only_on_request() -> None:
    delivery = resumed(CHAT, 1)
    assert [event["choices"][0]["finish_reason"] for event in ending(delivery.make_missing_end(None))] == ["length"]
    assert delivery.last_usage == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}


def test_finish_reason_is_not_sent_twice() -> None:
    """The decoder was lost between the finish and the end of its stream."""
    delivery = Delivery(call_of({**CHAT, **WITH_USAGE}), is_observed=True)
    take(delivery, data(ROLE) + data(chunk([7], "stop", content="a")))
    (usage,) = ending(delivery.make_missing_end(None))
    assert usage["usage"] == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
