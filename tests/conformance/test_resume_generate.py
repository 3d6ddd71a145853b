"""Exact resume of SGLang's `/generate` from the token ids in its events."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.sim.model.tokenizer import encode_text
from tests.asking import Answer, read
from tests.conformance.resuming import actions, serving, text_of
from tests.deployment import Deployment, generations

NOW, OLD = "sglang", "sglang-0.5.16"
TEXT = "What is it?"
STREAM: dict[str, Any] = {"stream": True}
VARIES = ("id", "e2e_latency", "cached_tokens")


def generate(text: Any = TEXT, **fields: Any) -> dict[str, Any]:
    prompt = {"text": text} if isinstance(text, str) else {"input_ids": text}
    sampling = {"max_new_tokens": 40, **fields.pop("sampling", {})}
    return {**prompt, "sampling_params": sampling, **fields}


async def ask(gateway: Deployment, body: dict[str, Any]) -> Answer:
    async with gateway.session.post(f"{gateway.url}/generate", data=orjson.dumps(body)) as response:
        return await read(response)


def content_of(answer: Answer) -> Any:
    """Return the content of the answer: the last event of each index, or the whole answer."""
    assert answer.is_done, answer.body[-300:]
    payloads = [event for event in answer.events if event != "[DONE]"] if answer.is_stream else [answer.json]
    if answer.is_stream:
        ids = [payload["meta_info"]["id"] for payload in payloads if payload.get("index", 0) == 0]
        assert len(set(ids)) == 1
        grown = [len(payload["output_ids"]) for payload in payloads if payload.get("index", 0) == 0]
        assert grown == sorted(grown)
    last = {payload.get("index", 0): payload for payload in payloads if isinstance(payload, dict)}
    return [
        {**payload, "meta_info": {name: value for name, value in payload["meta_info"].items() if name not in VARIES}}
        for payload in ([last[index] for index in sorted(last)] if last else payloads[0])
    ]


async def resume_actions(body: dict[str, Any], place: int, fault: str = "error_event", profile: str = NOW) -> Any:
    """Compare the resumed answer with the uninterrupted one, and return the actions of the resume."""
    async with serving(profile, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = content_of(await ask(gateway, body))
    async with serving(profile, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add(fault, tokens=place, times=1, path="/generate")
        answer = await ask(gateway, body)
        assert content_of(answer) == expected
        return actions(gateway)


LOGPROBS: dict[str, Any] = {"return_logprob": True}
ROWS = [
    ("text", generate(**STREAM), 10, "completion_tokens"),
    ("first", generate(**STREAM), 1, "completion_tokens"),
    ("character", generate(**STREAM), 15, "completion_tokens"),
    ("ids", generate(encode_text(TEXT), **STREAM), 20, "completion_tokens"),
    ("logprobs", generate(**STREAM, **LOGPROBS), 20, "completion_tokens"),
    ("default", {"text": TEXT, **STREAM}, 100, "completion_tokens"),
    ("least", generate(**STREAM, sampling={"min_new_tokens": 30}), 20, "completion_tokens"),
    ("stop", generate(**STREAM, sampling={"stop": text_of({"prompt": TEXT}, 18, 27)}), 12, "completion_tokens"),
    ("whole", generate(sampling={"max_new_tokens": 90}), 70, "completion_tokens"),
    ("whole-logprobs", generate(sampling={"max_new_tokens": 90}, **LOGPROBS), 70, "completion_tokens"),
    ("early", generate(), 20, "restart"),
    ("batch", generate(**STREAM, sampling={"n": 2}), 20, "completion_tokens"),
    ("whole-batch", generate(sampling={"n": 2, "max_new_tokens": 90}), 70, "completion_tokens"),
    ("greedy", generate(**STREAM, sampling={"repetition_penalty": 1.1, "temperature": 0}), 20, "replay"),
    ("greedy-regex", generate(**STREAM, sampling={"stop_regex": "never", "temperature": 0}), 20, "replay"),
]


@pytest.mark.parametrize(("body", "place", "does"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_generate_is_resumed(body: dict[str, Any], place: int, does: str) -> None:
    assert await resume_actions(body, place) == [does]


@pytest.mark.parametrize("fault", ["kill", "reset_after_tokens", "stall_after_tokens", "end_without_finish"])
async def test_generate_is_resumed_after_any_fault(fault: str) -> None:
    body = generate(**STREAM, **LOGPROBS)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = content_of(await ask(gateway, body))
    async with serving(NOW, connector="sglang_bootstrap", decoders=3, timeouts={"idle_seconds": 0.3}) as gateway:
        gateway.decoders[0].faults.add(fault, tokens=10, times=1, path="/generate")
        gateway.decoders[1].faults.add("error_event", tokens=7, times=1, path="/generate")
        assert content_of(await ask(gateway, body)) == expected
        assert actions(gateway) == ["completion_tokens"] * 2


WHOLE = generate(sampling={"max_new_tokens": 100})


@pytest.mark.covering(
    "body begin then",
    [(body, begin, then) for body in (generate(**STREAM), WHOLE) for begin in (0, 1) for then in (None, 2)],
    lambda row: {row[2], repr(row[0])},
)
async def test_generate_is_resumed_after_every_token(body: dict[str, Any], begin: int, then: int | None) -> None:
    places = range(64 + begin, 98, 2) if body is WHOLE else range(1 + begin, 38, 2)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = content_of(await ask(gateway, body))
        for place in places:
            gateway.decoders[0].faults.clear()
            gateway.decoders[0].faults.add("error_event", tokens=place, times=1, path="/generate")
            if then is not None:
                gateway.decoders[0].faults.add("error_event", tokens=then, times=1, path="/generate")
            assert content_of(await ask(gateway, body)) == expected, place
        assert actions(gateway) == ["completion_tokens"] * len(places) * (1 if then is None else 2)


async def test_next_decoder_gets_the_remaining_limits() -> None:
    async with serving(NOW, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add("error_event", tokens=10, path="/generate")
        await ask(gateway, generate(**STREAM, sampling={"sampling_seed": 7, "min_new_tokens": 12}))
        second = gateway.decoders[1].requests[-1].body
        assert second["input_ids"][: len(TEXT)] == encode_text(TEXT)
        assert len(second["input_ids"]) == len(TEXT) + 10
        assert second["sampling_params"] == {"max_new_tokens": 30, "sampling_seed": 7, "min_new_tokens": 2}
        assert "text" not in second
        assert not generations(*gateway.decoders)


@pytest.mark.parametrize(
    ("profile", "body"),
    [
        (OLD, generate(**STREAM)),
        (NOW, generate(**STREAM, return_logprob=True, logprob_start_len=0)),
        (NOW, generate(**STREAM, return_hidden_states=True)),
        (NOW, generate(**STREAM, image_data="x")),
    ],
    ids=["old", "prompt", "hidden", "image"],
)
async def test_unwatched_generate_ends_with_an_error(profile: str, body: dict[str, Any]) -> None:
    async with serving(profile, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add("reset_after_tokens", tokens=10, path="/generate")
        answer = await ask(gateway, body)
        assert answer.error["code"] == "decode_broken"
        assert actions(gateway) == []


async def test_watching_generate_does_not_change_its_events() -> None:
    """Watched events are written again, and must have the same contents."""
    body = generate(**STREAM, **LOGPROBS)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        watched = await ask(gateway, body)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1, resume={"mode": "off"}) as gateway:
        unwatched = await ask(gateway, body)

    def events_of(answer: Answer) -> list[Any]:
        events = [event for event in answer.events if event != "[DONE]"]
        for event in events:
            event["meta_info"].pop("id")
        return events

    assert events_of(watched) == events_of(unwatched)
