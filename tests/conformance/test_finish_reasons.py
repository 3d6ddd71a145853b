"""Answers with unusual finish reasons, in every API."""

from __future__ import annotations

from itertools import product
from typing import Any

import orjson
import pytest

from tests.asking import Answer, read
from tests.canned import CannedEngine, data, event_stream, json_answer
from tests.conformance.resuming import chat, completion, difference, serving, uninterrupted
from tests.conftest import Deploy
from tests.deployment import Deployment

DONE = b"data: [DONE]\n\n"
HEAD: dict[str, Any] = {"id": "x", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}
ABORTED: list[Any] = ["abort", "error", {"type": "abort", "message": "Abort"}]
EMPTY: list[Any] = ["", None, {}]
UNKNOWN: list[Any] = ["eos", "paused", 7, True]


def stream_of(reason: Any, *, is_chat: bool) -> list[bytes]:
    """Return an engine's stream of two tokens with this finish reason."""
    if is_chat:
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {"content": "so "},
            {"content": "far"},
            {},
        ]
        parts: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
    else:
        parts = [{"text": text} for text in ("so ", "far", "")]
    choices = [{"index": 0, **part, "logprobs": None, "finish_reason": None} for part in parts]
    choices[-1]["finish_reason"] = reason
    chunks = [{**HEAD, "choices": [choice]} for choice in choices]
    return event_stream([*map(data, chunks), data({**HEAD, "choices": [], "usage": USAGE}), DONE])


def whole_of(reason: Any, *, is_chat: bool) -> list[bytes]:
    """Return the same answer without streaming."""
    content = {"message": {"role": "assistant", "content": "so far"}} if is_chat else {"text": "so far"}
    return [json_answer({**HEAD, "choices": [{"index": 0, **content, "finish_reason": reason}], "usage": USAGE})]


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the data of all events, named or not, without `[DONE]`."""
    lines = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
    return list(map(orjson.loads, lines))


async def ask(gateway: Deployment, path: str, **fields: Any) -> Answer:
    body = orjson.dumps({"model": "m", **BODIES[path], **fields})
    async with gateway.session.post(gateway.url + path, data=body) as response:
        return await read(response)


async def ending_with(deploy: Deploy, path: str, reason: Any, *, stream: bool, mode: str) -> tuple[Answer, Deployment]:
    is_chat = path != "/v1/completions"

    def answer(received: Any) -> list[bytes]:
        is_stream = orjson.loads(received.body).get("stream")
        return (stream_of if is_stream else whole_of)(reason, is_chat=is_chat)

    gateway = await deploy(
        decoders=[CannedEngine("both", answer)], connector="plain", resume={"mode": mode, "repeat_up_to_tokens": 0}
    )
    return await ask(gateway, path, stream=stream), gateway


@pytest.mark.fault(112)
@pytest.mark.covering("path reason stream mode", product(BODIES, ABORTED, (True, False), ("off", "exact")))
async def test_answer_aborted_by_every_engine_ends_with_an_error(
    deploy: Deploy, path: str, reason: Any, stream: bool, mode: str
) -> None:
    answer, gateway = await ending_with(deploy, path, reason, stream=stream, mode=mode)
    check_error(answer, path, stream=stream)
    assert not gateway.metrics("pdproxy_suspect_requests_total")


@pytest.mark.fault(113)
@pytest.mark.covering("path reason stream mode", product(BODIES, EMPTY, (True, False), ("off", "exact")))
async def test_empty_finish_reason_is_an_error(deploy: Deploy, path: str, reason: Any, stream: bool, mode: str) -> None:
    answer, _ = await ending_with(deploy, path, reason, stream=stream, mode=mode)
    check_error(answer, path, stream=stream)


def check_error(answer: Answer, path: str, *, stream: bool) -> None:
    """Check that the answer reports that it is not complete."""
    if stream:
        last = events(answer)[-1]
        assert DONE not in answer.body
        assert "error" in last or last["response"]["status"] == "failed"
        assert not any("stop_reason" in (event.get("delta") or {}) for event in events(answer))
    else:
        assert answer.status in (502, 503)
        assert answer.json["error"]


@pytest.mark.fault(113)
@pytest.mark.covering("path reason stream mode", product(BODIES, UNKNOWN, (True, False), ("off", "exact")))
async def test_unknown_finish_reason_is_not_reported_as_success(
    deploy: Deploy, path: str, reason: Any, stream: bool, mode: str
) -> None:
    answer, _ = await ending_with(deploy, path, reason, stream=stream, mode=mode)
    match path:
        case "/v1/messages":
            check_error(answer, path, stream=stream)
        case "/v1/responses":
            response = events(answer)[-1]["response"] if stream else answer.json
            assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": str(reason)})
            assert [item["status"] for item in response["output"]] == ["incomplete"]
        case _:
            chunks = [event for event in events(answer) if event["choices"]] if stream else [answer.json]
            assert chunks[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.fault(112)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("tokens", [0, 10])
async def test_another_decoder_continues_an_aborted_answer(make: Any, tokens: int, stream: bool) -> None:
    body = make(stream=stream)
    async with serving("v0.33") as gateway:
        gateway.decoders[0].faults.add("abort", tokens=tokens)
        gateway.expects_inexact_pins = not tokens
        answer = await gateway.ask(dict(body))
        assert answer.is_done
        assert not difference(answer.text, (await alone(body)))
        assert len(gateway.decoders[1].requests)


async def alone(body: dict[str, Any]) -> str:
    """Return the text of the same answer without faults."""
    got = await uninterrupted("v0.33", body)
    choice = got["choices"][0]
    return choice["content"] + choice["text"] if body["stream"] else choice.get("text") or choice["message"]["content"]
