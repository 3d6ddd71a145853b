"""Streams that no engine may ever have sent, in pieces of any length, come to the same on both roads."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.canned import CannedEngine, data, event_stream, json_answer
from tests.fuzz.cutting import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.canned import Received
    from tests.conftest import Deploy
    from tests.fast_path.roads import Roads
    from tests.talking import Clients

STREAMS: Final = 60
USAGE: Final[dict[str, Any]] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
LONG_PROMPT: Final = [*range(100_000, 150_000)]
"""More than one read takes, and none is a port."""
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
    common: dict[str, Any] = {"id": "a", "object": "chunk", "created": 1, "model": "sim"}
    if chance.random() < 0.3:
        odd_member: list[dict[str, Any]] = [{"a": {}}, {"a": [1]}, {"a": '[{"choices":['}, {"choices": 1}, {"usage": 1}]
        common |= chance.choice(odd_member)
    prompt_ids = LONG_PROMPT if chance.random() < 0.05 else chance.choice([None, [1, 2, 3], [5]])
    found = []
    if api is Api.CHAT and chance.random() < 0.8:
        delta = {"role": "assistant", "content": ""}
        opening = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if chance.random() < 0.2:
            del opening["logprobs"]
        found.append({**common, "choices": [opening]})
        if chance.random() < 0.8:
            found[-1]["prompt_token_ids"] = prompt_ids
        if chance.random() < 0.1:
            found[-1]["id"] = "b"
    reasons = [None] * chance.choice((0, 1, 1, 1, 2, 3, 5)) + ["stop"]
    found += [{**common, "choices": [choice(chance, api, reason)]} for reason in reasons]
    if api is Api.COMPLETIONS and chance.random() < 0.8:
        found[0]["choices"][0]["prompt_token_ids"] = prompt_ids
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
    if chance.random() < 0.2:  # as vLLM 0.33 does
        tail = chance.choice([b"null", b'{"remote_host":"h","remote_port":1}'])
        told = [b'%b,"kv_transfer_params":%b}\n\n' % (event[:-3], b"null") for event in written]
        told[-2:] = [event.replace(b":null}\n\n", b":%b}\n\n" % tail) for event in told[-2:]]
        written = [new if old.startswith(b'data: {"id"') else old for new, old in zip(told, written, strict=True)]
    if chance.random() < 0.1:
        half = b'":"%b' % chance.choice([b"\\ud83d", b"\\ude00"])
        at = chance.randrange(len(written))
        written[at] = written[at].replace(b'"content":"', b'"content' + half).replace(b'"text":"', b'"text' + half)
    if chance.random() < 0.05:
        written.insert(chance.randrange(len(written)), chance.choice([b"data: {no\n\n", b"data: [1]\n\n"]))
    written.append(b"data: [DONE]\n\n")
    if chance.random() < 0.1:
        written = [event.replace(b"\n", b"\r\n") for event in written]
    return written


async def ask_for_all(clients: Clients, api: Api) -> None:
    """One stream after the other; a prompt is its number."""
    line = await clients.connect()
    for number in range(STREAMS):
        fields: dict[str, Any] = {"return_token_ids": True} if number % 5 == 0 else {}
        if number % 3 == 0:
            fields["stream_options"] = {"include_usage": True}
        await line.ask(request(api, str(number), stream=True, **fields), X_Request_Id=f"r-{number}")
        if line.received[-1][2] != "whole":
            line = await clients.connect()


@pytest.mark.parametrize("mode", ["exact", "off"])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
async def test_a_stream_of_any_events_in_any_pieces(roads: Roads, api: Api, mode: str) -> None:
    def answer(received: Received) -> list[bytes]:
        body = orjson.loads(received.body)
        number = int(body["messages"][0]["content"] if api is Api.CHAT else body["prompt"])
        chance = Random(number)
        whole = b"".join(event_stream(events(chance, api)))
        return [whole] if chance.random() < 0.3 else list(cut(number, whole))

    course = await roads.take(
        *(partial(ask_for_all, api=api),),
        engines=lambda: ([], [CannedEngine("both", answer)]),
        connector="plain",
        is_fast=STREAMS,
        resume={"mode": mode},
    )
    assert sum(ending == "whole" for _, _, ending in course.answers[0]) == STREAMS


@pytest.mark.parametrize("wants_ids", [False, True])
async def test_long_ids_of_a_prompt_are_for_clients_that_ask_for_them(deploy: Deploy, wants_ids: bool) -> None:
    common: dict[str, Any] = {"id": "a", "object": "chunk", "created": 1, "model": "sim"}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    last = {"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": "stop", "token_ids": [7]}
    events = [
        {**common, "choices": [opening], "prompt_token_ids": LONG_PROMPT},
        {**common, "choices": [last]},
        {**common, "choices": [], "usage": USAGE},
    ]
    engine = CannedEngine("both", event_stream([*map(data, events), b"data: [DONE]\n\n"]))
    gateway = await deploy([], [engine], connector="plain")
    answer = await gateway.ask(request(Api.CHAT, stream=True, max_tokens=9, return_token_ids=wants_ids))
    assert answer.is_done
    assert answer.events[0]["prompt_token_ids"] == (LONG_PROMPT if wants_ids else None)


def long_events(chance: Random, api: Api) -> list[bytes]:
    """A whole answer of many tokens that look alike, nearly all of them."""
    common: dict[str, Any] = {"id": "a", "object": "chunk", "created": 1, "model": "sim"}
    tells_ids, thinks = chance.random() < 0.8, chance.random() < 0.4
    tokens = chance.randrange(4, 40)
    found = []
    if api is Api.CHAT:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        prompt_ids = [1, 2, 3] if tells_ids else None
        found.append({**common, "choices": [opening], "prompt_token_ids": prompt_ids})
    for number in range(tokens):
        text = chance.choice(TEXTS) if chance.random() < 0.1 else f" word{number}"
        member = "reasoning" if thinks and number < tokens // 2 else "content"
        one: dict[str, Any] = {"index": 0, "delta": {member: text}} if api is Api.CHAT else {"index": 0, "text": text}
        one |= {"logprobs": None, "finish_reason": "stop" if number == tokens - 1 else None}
        if tells_ids:
            one["token_ids"] = [100 + number]
        if api is Api.COMPLETIONS and number == 0 and tells_ids:
            one["prompt_token_ids"] = [1, 2, 3]
        if chance.random() < 0.03:
            call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            one |= chance.choice([{"logprobs": {"content": []}}, {"delta": {"tool_calls": [call]}}, {"token_ids": []}])
        found.append({**common, "choices": [one]})
    found.append({**common, "choices": [], "usage": {**USAGE, "completion_tokens": tokens}})
    written = [data(payload) for payload in found]
    if chance.random() < 0.2:
        written.insert(chance.randrange(len(written)), chance.choice([b": ping\n\n", b"data: {}\n\n"]))
    return [*written, b"data: [DONE]\n\n"]


def broken_off(pieces: list[bytes], count: int) -> Iterator[bytes]:
    """Only so many of them."""
    yield from pieces[:count]
    raise ConnectionResetError


@pytest.mark.parametrize("mode", ["exact", "off"])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
async def test_a_long_stream_that_may_break_off_anywhere(roads: Roads, api: Api, mode: str) -> None:
    """Each engine that goes on with it is asked for the same."""

    def answer(received: Received) -> Iterable[bytes]:
        body = orjson.loads(received.body)
        if received.path == "/detokenize":
            return [json_answer({"prompt": "three words here"})]
        asked = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        if not isinstance(asked, str):  # it is to go on
            rest = {"index": 0, "text": " rest", "token_ids": [7], "logprobs": None, "finish_reason": "stop"}
            told = {"choices": [{**rest, "prompt_token_ids": asked}]}
            events = [told, {"choices": [], "usage": USAGE}]
            return event_stream([*map(data, events), b"data: [DONE]\n\n"])
        chance = Random(int(asked))
        pieces = event_stream(long_events(chance, api))
        if chance.random() < 0.3:
            pieces = list(cut(int(asked), b"".join(pieces)))
        elif chance.random() < 0.5:  # as engines write it
            pieces = [b"".join(pieces[:3]), *pieces[3:-4], b"".join(pieces[-4:])]
        return broken_off(pieces, chance.randrange(1, len(pieces))) if chance.random() < 0.4 else pieces

    course = await roads.take(
        *(partial(ask_for_all, api=api),),
        engines=lambda: ([], [CannedEngine("both", answer), CannedEngine("both", answer)]),
        connector="plain",
        resume={"mode": mode},
        health={"eject_after": 1_000_000, "transfer_interval_seconds": 0.0},
    )
    endings = [ending for answers in course.answers for _, _, ending in answers]
    assert len(endings) == STREAMS
    assert endings.count("whole") > STREAMS / 2
