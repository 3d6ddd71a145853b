"""Whole answers whose tool calls were damaged by the engine's parser for streams are requested again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from proxy.wire.openai import DONE_EVENT, Api
from tests.asking import Answer, read, request
from tests.canned import CannedEngine, Received, data, event_stream, http, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects import messages, responses

CHAT = Api.CHAT.path
BODIES: dict[str, dict[str, Any]] = {
    CHAT: request(Api.CHAT, max_tokens=100),
    messages.PATH: messages.question(tools=messages.TOOLS),
    responses.PATH: responses.question(tools=responses.TOOLS),
}
HANDED_OVER = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1]}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def call(arguments: str) -> dict[str, Any]:
    return {"index": 0, "id": "call_a", "type": "function", "function": {"name": "find", "arguments": arguments}}


def streamed(finish: str, *calls: dict[str, Any], **last: Any) -> list[bytes]:
    """Return an answer in chunks. The first one has no tool call."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *({"tool_calls": [each]} for each in calls),
        {},
    ]
    chunks: list[dict[str, Any]] = [
        {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks[-1]["choices"][0] |= {"finish_reason": finish, **last}
    return event_stream([*map(data, chunks), data({"id": "x", "choices": [], "usage": USAGE}), DONE_EVENT])


def whole(finish: str, *calls: dict[str, Any]) -> list[bytes]:
    """Return the same answer as a body, with a member that only whole answers have."""
    message = {"role": "assistant", "content": None, "tool_calls": list(calls)}
    choice = {"index": 0, "message": message, "finish_reason": finish, "routed_experts": "AAAA"}
    return [json_answer({"id": "y", "choices": [choice], "usage": USAGE, "kv_transfer_params": HANDED_OVER})]


class Decoder(CannedEngine):
    """Answers the one way where it is to stream, the other where it is not."""

    def __init__(self, stream: Iterable[bytes], whole: Iterable[bytes]) -> None:
        super().__init__("decode", self._answered)
        self._stream, self._whole = stream, whole

    def _answered(self, received: Received) -> Iterable[bytes]:
        return self._stream if orjson.loads(received.body).get("stream") else self._whole

    @property
    def asked(self) -> list[bool]:
        """Whether each request wanted a stream."""
        return [bool(orjson.loads(received.body).get("stream")) for received in self.received]


async def answered(deploy: Deploy, decoder: Decoder, path: str = CHAT, **fields: Any) -> tuple[Answer, Deployment]:
    prefiller = CannedEngine("prefill", whole("length"))
    gateway = await deploy([prefiller], [decoder], connector="vllm_pull")
    async with gateway.session.post(gateway.url + path, data=orjson.dumps({**BODIES[path], **fields})) as response:
        return await read(response), gateway


def calls_of(answer: Answer) -> list[Any]:
    """Return the arguments of all tool calls in any dialect."""
    assert answer.status == 200, answer.body
    told = answer.json
    if "choices" in told:
        return [each["function"]["arguments"] for each in told["choices"][0]["message"].get("tool_calls") or ()]
    if "content" in told:
        return [orjson.dumps(part["input"]).decode() for part in told["content"] if part["type"] == "tool_use"]
    return [item["arguments"] for item in told["output"] if item["type"] == "function_call"]


SPOILT = {
    "lost": streamed("tool_calls"),
    "cut off": streamed("tool_calls", call('{"q": "a')),
    "doubled": streamed("tool_calls", call('{"q":1}{"q":1}')),
    "of a tool that had to be called": streamed("stop", call('{"q": ')),
}


@pytest.mark.fault(124)
@pytest.mark.parametrize("stream", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("path", BODIES)
async def test_damaged_tool_calls_are_replaced_by_those_of_a_whole_answer(
    deploy: Deploy, path: str, stream: list[bytes]
) -> None:
    decoder = Decoder(stream, whole("tool_calls", call('{"q":1}')))
    answer, gateway = await answered(deploy, decoder, path)
    assert calls_of(answer) == ['{"q":1}']
    assert decoder.asked == [True, False]
    assert gateway.metrics("pdproxy_whole_answers_repeated_total") == {(): 1.0}
    if path == CHAT:
        assert answer.json["choices"][0]["routed_experts"] == "AAAA"
        assert b"kv_transfer_params" not in answer.body


KEPT = {
    "good": (streamed("tool_calls", call('{"q":1}')), ['{"q":1}']),
    "without arguments": (streamed("tool_calls", call("")), ["{}"]),
    "line feeds": (streamed("tool_calls", call('{"q": "a\nb"}')), ['{"q": "a\nb"}']),
    "cut off by the limit": (streamed("length", call('{"q": "a')), ['{"q": "a']),
    "cut off by a stop string": (streamed("stop", call('{"q": "a'), stop_reason="a"), ['{"q": "a']),
    "no call": (streamed("stop"), []),
}


@pytest.mark.fault(124)
@pytest.mark.parametrize(("stream", "calls"), KEPT.values(), ids=KEPT)
async def test_undamaged_answers_are_not_requested_again(deploy: Deploy, stream: list[bytes], calls: list[str]) -> None:
    decoder = Decoder(stream, whole("tool_calls", call('{"q":2}')))
    answer, gateway = await answered(deploy, decoder)
    assert calls_of(answer) == calls
    assert decoder.asked == [True]
    assert gateway.metrics("pdproxy_whole_answers_repeated_total") in ({}, {(): 0.0})


@pytest.mark.fault(124)
@pytest.mark.parametrize("path", BODIES)
async def test_damaged_answer_is_requested_again_once(deploy: Deploy, path: str) -> None:
    """Some models write arguments that are no JSON; then the engine's whole answer has them, too."""
    broken = '{"q": "a"' if path != messages.PATH else '{"q": '
    decoder = Decoder(streamed("tool_calls", call('{"q"')), whole("tool_calls", call(broken)))
    answer, _ = await answered(deploy, decoder, path)
    assert decoder.asked == [True, False]
    assert answer.status == 200
    assert path == messages.PATH or calls_of(answer) == [broken]


@pytest.mark.fault(124)
async def test_damaged_answer_is_sent_when_it_cannot_be_requested_again(deploy: Deploy) -> None:
    refusal = [http(b'{"error": {"message": "no"}}', "422 Unprocessable")]
    answer, _ = await answered(deploy, Decoder(streamed("tool_calls", call('{"q": ')), refusal))
    assert calls_of(answer) == ['{"q": ']


@pytest.mark.fault(124)
async def test_answer_that_lacks_its_tool_calls_is_an_error(deploy: Deploy) -> None:
    refusal = [http(b'{"error": {"message": "no"}}', "422 Unprocessable")]
    answer, _ = await answered(deploy, Decoder(streamed("tool_calls"), refusal))
    assert (answer.status, answer.json) == (422, {"error": {"message": "no"}})


@pytest.mark.fault(124)
async def test_answer_of_an_engine_that_only_streams_is_accepted(deploy: Deploy) -> None:
    answer, _ = await answered(deploy, Decoder(streamed("tool_calls"), streamed("tool_calls")))
    assert calls_of(answer) == []


@pytest.mark.fault(124)
async def test_only_samples_with_damaged_calls_are_requested_again(deploy: Deploy) -> None:
    streams = iter([streamed("tool_calls"), streamed("tool_calls", call('{"q":1}'))])
    decoder = Decoder((), whole("tool_calls", call('{"q":2}')))
    decoder.answer = lambda received: (
        next(streams) if orjson.loads(received.body).get("stream") else whole("tool_calls", call('{"q":2}'))
    )
    answer, _ = await answered(deploy, decoder, n=2)
    told = [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in answer.json["choices"]]
    assert sorted(told) == ['{"q":1}', '{"q":2}']
    assert decoder.asked == [True, True, False]


@pytest.mark.fault(124)
async def test_assembled_answer_keeps_other_members_of_the_stream(deploy: Deploy) -> None:
    """VLLM tells the prompt's text with the first chunk, and a request's metrics with the usage."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_text": "<user>Hello there"},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": USAGE, "system_fingerprint": "f", "metrics": {"queue_time": 0.5}},
    ]
    decoder = Decoder(event_stream([*(data({"id": "x", "model": "m", **each}) for each in chunks), DONE_EVENT]), ())
    answer, _ = await answered(deploy, decoder)
    told = answer.json
    assert (told["prompt_text"], told["metrics"], told["system_fingerprint"]) == (
        "<user>Hello there",
        {"queue_time": 0.5},
        "f",
    )
