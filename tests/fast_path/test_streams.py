"""Streams that no engine may ever have sent, in pieces of any length, come to the same on both roads."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.canned import CannedEngine, data, event_stream
from tests.fuzz.cutting import cut

if TYPE_CHECKING:
    from tests.canned import Received
    from tests.fast_path.roads import Clients, Roads

STREAMS: Final = 60
USAGE: Final[dict[str, Any]] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
TEXTS: Final = ("", "a", "b\u00e4", 'c"\\', "d" * 90, "\n", "</think>", "[DONE]", "data: x")


def choice(chance: Random, api: Api, reason: str | None) -> dict[str, Any]:
    """Most are as engines write them."""
    text = chance.choice(TEXTS)
    found: dict[str, Any] = {"index": 0}
    if api is Api.COMPLETIONS:
        found["text"] = text
    else:
        found["delta"] = chance.choice(
            [{"content": text}] * 5
            + [
                {},
                {"reasoning": text},
                {"reasoning_content": text, "content": None},
                {"role": "assistant", "content": text},
            ]
            + [{"content": text, "tool_calls": []}, {"content": text, "extra": 1}]
        )
    found["logprobs"] = chance.choice([None] * 9 + [{"content": []}])
    found["finish_reason"] = reason
    if chance.random() < 0.7:
        found["token_ids"] = chance.choice([[7], [1234], [12, 345678], [], None])
    if reason is None and chance.random() < 0.1:
        found["stop_reason"] = None
    return found


def events(chance: Random, api: Api) -> list[bytes]:
    """A whole answer."""
    common = {"id": "a", "object": "chunk", "created": 1, "model": "sim"}
    prompt_ids = chance.choice([None, [1, 2, 3], [5]])
    found = []
    if api is Api.CHAT and chance.random() < 0.8:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        found.append({**common, "choices": [opening], "prompt_token_ids": prompt_ids})
    reasons = [None] * chance.choice((0, 1, 1, 1, 2, 3, 5)) + ["stop"]
    found += [{**common, "choices": [choice(chance, api, reason)]} for reason in reasons]
    if chance.random() < 0.1:
        found[-1]["usage"] = USAGE
    if chance.random() < 0.1:
        found.append({**common, "choices": [choice(chance, api, None)]})
    if chance.random() < 0.9:
        details: dict[str, Any] = chance.choice(
            [{}, {"prompt_tokens_details": {"cached_tokens": 2}}, {"prompt_tokens_details": None}]
        )
        found.append({**common, "choices": [], "usage": {**USAGE, **details}})
    written = [data(payload) for payload in found]
    if chance.random() < 0.2:
        odd = chance.choice(
            [b": ping\n\n", b'data: {"unknown": 1}\n\n', b"event: x\ndata: {}\n\n", b"data:[]\n\n", b"\n"]
        )
        written.insert(chance.randrange(len(written)), odd)
    written.append(b"data: [DONE]\n\n")
    if chance.random() < 0.1:
        written = [event.replace(b"\n", b"\r\n") for event in written]
    return written


@pytest.mark.parametrize("mode", ["exact", "off"])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
async def test_a_stream_of_any_events_in_any_pieces(roads: Roads, api: Api, mode: str) -> None:
    def answer(received: Received) -> list[bytes]:
        body = orjson.loads(received.body)
        number = int(body["messages"][0]["content"] if api is Api.CHAT else body["prompt"])
        chance = Random(number)
        whole = b"".join(event_stream(events(chance, api)))
        return [whole] if chance.random() < 0.3 else list(cut(number, whole))

    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number in range(STREAMS):
            fields: dict[str, Any] = {"return_token_ids": True} if number % 5 == 0 else {}
            if number % 3 == 0:
                fields["stream_options"] = {"include_usage": True}
            await line.ask(request(api, str(number), stream=True, **fields), X_Request_Id=f"r-{number}")

    course = await roads.take(
        *(talk,),
        engines=lambda: ([], [CannedEngine("both", answer)]),
        connector="plain",
        is_fast=STREAMS,
        resume={"mode": mode},
    )
    assert sum(ending == "whole" for _, _, ending in course.answers[0]) == STREAMS
