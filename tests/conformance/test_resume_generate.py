"""SGLang's own `/generate`: an answer goes on from the ids that its events tell, as a completion does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from proxy.sim.model.tokenizer import encode
from tests.asking import read
from tests.conformance.resuming import actions, serving, text_of
from tests.deployment import generations

if TYPE_CHECKING:
    from tests.asking import Answer
    from tests.deployment import Deployment

NOW, OLD = "sglang", "sglang-0.5.16"
TEXT = "What is it?"
STREAM: dict[str, Any] = {"stream": True}
VARIES = ("id", "e2e_latency", "cached_tokens")


def asked(text: Any = TEXT, **fields: Any) -> dict[str, Any]:
    prompt = {"text": text} if isinstance(text, str) else {"input_ids": text}
    sampling = {"max_new_tokens": 40, **fields.pop("sampling", {})}
    return {**prompt, "sampling_params": sampling, **fields}


async def ask(gateway: Deployment, body: dict[str, Any]) -> Answer:
    async with gateway.session.post(f"{gateway.url}/generate", data=orjson.dumps(body)) as response:
        return await read(response)


def got(answer: Answer) -> Any:
    """What the answer comes to: its last event by index, or all of it."""
    assert answer.is_done, answer.body[-300:]
    payloads = [event for event in answer.events if event != "[DONE]"] if answer.is_stream else [answer.json]
    if answer.is_stream:
        ids = [payload["meta_info"]["id"] for payload in payloads if payload.get("index", 0) == 0]
        assert len(set(ids)) == 1
        grown = [len(payload["output_ids"]) for payload in payloads if payload.get("index", 0) == 0]
        assert grown == sorted(grown)
    last = {payload.get("index", 0): payload for payload in payloads if isinstance(payload, dict)}
    return [
        {**payload, "meta_info": {name: told for name, told in payload["meta_info"].items() if name not in VARIES}}
        for payload in ([last[index] for index in sorted(last)] if last else payloads[0])
    ]


async def broken_off(body: dict[str, Any], place: int, fault: str = "error_event", profile: str = NOW) -> Any:
    """The answer, and what it would have been."""
    async with serving(profile, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = got(await ask(gateway, body))
    async with serving(profile, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add(fault, tokens=place, times=1, path="/generate")
        answer = await ask(gateway, body)
        assert got(answer) == expected
        return actions(gateway)


LOGPROBS: dict[str, Any] = {"return_logprob": True}
ROWS = [
    ("text", asked(**STREAM), 10, "completion_tokens"),
    ("first", asked(**STREAM), 1, "completion_tokens"),
    ("character", asked(**STREAM), 15, "completion_tokens"),
    ("ids", asked(encode(TEXT), **STREAM), 20, "completion_tokens"),
    ("logprobs", asked(**STREAM, **LOGPROBS), 20, "completion_tokens"),
    ("default", {"text": TEXT, **STREAM}, 100, "completion_tokens"),
    ("least", asked(**STREAM, sampling={"min_new_tokens": 30}), 20, "completion_tokens"),
    ("stop", asked(**STREAM, sampling={"stop": text_of({"prompt": TEXT}, 18, 27)}), 12, "completion_tokens"),
    ("whole", asked(sampling={"max_new_tokens": 90}), 70, "completion_tokens"),
    ("whole-logprobs", asked(sampling={"max_new_tokens": 90}, **LOGPROBS), 70, "completion_tokens"),
    ("early", asked(), 20, "restart"),
    ("batch", asked(**STREAM, sampling={"n": 2}), 20, "completion_tokens"),
    ("whole-batch", asked(sampling={"n": 2, "max_new_tokens": 90}), 70, "completion_tokens"),
    ("greedy", asked(**STREAM, sampling={"repetition_penalty": 1.1, "temperature": 0}), 20, "replay"),
    ("greedy-regex", asked(**STREAM, sampling={"stop_regex": "never", "temperature": 0}), 20, "replay"),
]


@pytest.mark.parametrize(("body", "place", "does"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_it_goes_on(body: dict[str, Any], place: int, does: str) -> None:
    assert await broken_off(body, place) == [does]


@pytest.mark.parametrize("fault", ["kill", "reset_after_tokens", "stall_after_tokens", "end_without_finish"])
async def test_it_goes_on_however_it_breaks_off(fault: str) -> None:
    body = asked(**STREAM, **LOGPROBS)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = got(await ask(gateway, body))
    async with serving(NOW, connector="sglang_bootstrap", decoders=3, timeouts={"idle_seconds": 0.3}) as gateway:
        gateway.decoders[0].faults.add(fault, tokens=10, times=1, path="/generate")
        gateway.decoders[1].faults.add("error_event", tokens=7, times=1, path="/generate")
        assert got(await ask(gateway, body)) == expected
        assert actions(gateway) == ["completion_tokens"] * 2


WHOLE = asked(sampling={"max_new_tokens": 100})


@pytest.mark.covering(
    "body begin then",
    [(body, begin, then) for body in (asked(**STREAM), WHOLE) for begin in (0, 1) for then in (None, 2)],
    lambda row: {row[2], repr(row[0])},
)
async def test_it_goes_on_behind_every_token(body: dict[str, Any], begin: int, then: int | None) -> None:
    places = range(64 + begin, 98, 2) if body is WHOLE else range(1 + begin, 38, 2)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        expected = got(await ask(gateway, body))
        for place in places:
            gateway.decoders[0].faults.clear()
            gateway.decoders[0].faults.add("error_event", tokens=place, times=1, path="/generate")
            if then is not None:
                gateway.decoders[0].faults.add("error_event", tokens=then, times=1, path="/generate")
            assert got(await ask(gateway, body)) == expected, place
        assert actions(gateway) == ["completion_tokens"] * len(places) * (1 if then is None else 2)


async def test_what_the_next_decoder_is_asked_for() -> None:
    async with serving(NOW, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add("error_event", tokens=10, path="/generate")
        await ask(gateway, asked(**STREAM, sampling={"sampling_seed": 7, "min_new_tokens": 12}))
        second = gateway.decoders[1].requests[-1].body
        assert second["input_ids"][: len(TEXT)] == encode(TEXT)
        assert len(second["input_ids"]) == len(TEXT) + 10
        assert second["sampling_params"] == {"max_new_tokens": 30, "sampling_seed": 7, "min_new_tokens": 2}
        assert "text" not in second
        assert not generations(*gateway.decoders)


@pytest.mark.parametrize(
    ("profile", "body"),
    [
        (OLD, asked(**STREAM)),
        (NOW, asked(**STREAM, return_logprob=True, logprob_start_len=0)),
        (NOW, asked(**STREAM, return_hidden_states=True)),
        (NOW, asked(**STREAM, image_data="x")),
    ],
    ids=["old", "prompt", "hidden", "image"],
)
async def test_what_is_not_watched_ends_as_it_did(profile: str, body: dict[str, Any]) -> None:
    async with serving(profile, connector="sglang_bootstrap") as gateway:
        gateway.decoders[0].faults.add("reset_after_tokens", tokens=10, path="/generate")
        answer = await ask(gateway, body)
        assert answer.error["code"] == "decode_broken"
        assert actions(gateway) == []


async def test_nothing_changes_where_nothing_goes_wrong() -> None:
    """What is watched is written anew, and comes to the same event for event."""
    body = asked(**STREAM, **LOGPROBS)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1) as gateway:
        watched = await ask(gateway, body)
    async with serving(NOW, connector="sglang_bootstrap", decoders=1, resume={"mode": "off"}) as gateway:
        as_they_came = await ask(gateway, body)

    def told(answer: Answer) -> list[Any]:
        events = [event for event in answer.events if event != "[DONE]"]
        for event in events:
            event["meta_info"].pop("id")
        return events

    assert told(watched) == told(as_they_came)
