"""An engine that continues another engine's answer from its token IDs gives the same IDs and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import CALL_BEGIN, END, SECTION_BEGIN, THINK_END, decode_tokens
from tests.sim.conftest import Client

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RAW = {"skip_special_tokens": False, "spaces_between_special_tokens": False, "add_special_tokens": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}, "day": {}}}}}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
CALLING: dict[str, Any] = THINKING | {
    "messages": [{"role": "user", "content": "Wetter in Köln?"}],
    "tools": [WEATHER, WEATHER],
    "max_tokens": 300,
    "return_token_ids": True,
}
ENGINE: dict[str, Any] = {"tool_call_parser": "kimi_k2"}


@dataclass
class Heard:
    """A streamed chat, put together."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)


async def hear(client: Client, engine: SimulatedEngine, body: dict[str, Any]) -> Heard:
    role, *chunks, done = await client.stream(engine, CHAT, body)
    assert done == "[DONE]"
    heard = Heard(role["prompt_token_ids"])
    for choice in (chunk["choices"][0] for chunk in chunks):
        heard.ids += choice["token_ids"] or []
        heard.reasoning += choice["delta"].get("reasoning", "")
        heard.content += choice["delta"].get("content", "")
        heard.calls += choice["delta"].get("tool_calls", ())
        heard.last = choice
    return heard


def arguments(heard: Heard, index: int) -> str:
    functions = (call["function"] for call in heard.calls if call["index"] == index)
    return "".join(function.get("arguments", "") for function in functions)


async def whole(client: Client) -> Heard:
    async with SimulatedEngine(profile_name="v0.23", **ENGINE) as engine:
        return await hear(client, engine, CALLING)


async def test_answer_has_everything_that_can_be_resumed(client: Client) -> None:
    heard = await whole(client)
    assert [heard.ids.count(marker) for marker in (THINK_END, SECTION_BEGIN, CALL_BEGIN, END)] == [1, 1, 2, 1]
    assert heard.reasoning
    assert heard.content.endswith("so:")
    assert decode_tokens(heard.ids, keep_markers=True).startswith(heard.reasoning + "</think>" + heard.content)


@pytest.mark.parametrize(
    "options", [{}, {"tokens_per_step": 3}, {"stream_interval": 4}], ids=["one", "several", "interval"]
)
@pytest.mark.parametrize("profile_name", ["v0.18", "v0.23", "v0.27", "v0.30", "v0.33"])
async def test_no_id_is_lost_wherever_a_chat_is_interrupted(
    client: Client, profile_name: str, options: dict[str, Any]
) -> None:
    expected = await whole(client)
    async with SimulatedEngine(profile_name=profile_name, **ENGINE, **options) as engine:
        for cut in range(1, len(expected.ids), 5):
            engine.faults.clear()
            engine.faults.add("recompute", tokens=cut, merged=min(cut, cut % 4))
            heard = await hear(client, engine, CALLING)
            assert heard.last["stop_reason"] == "recomputed"
            assert heard.ids == expected.ids[:cut]


@pytest.mark.parametrize("profile_name", ["v0.27", "v0.30", "v0.33"])
async def test_chat_continues_from_ids_at_every_token(client: Client, profile_name: str) -> None:
    expected = await whole(client)
    async with SimulatedEngine(profile_name=profile_name, **ENGINE) as engine:
        for cut in range(len(expected.ids)):
            ids = expected.prompt + expected.ids[:cut]
            body = CALLING | {"kv_transfer_params": {"prompt_token_ids": ids}, "max_tokens": 300 - cut}
            heard = await hear(client, engine, body)
            assert heard.prompt == ids
            assert heard.ids == expected.ids[cut:]


async def test_raw_completions_continue_a_chat_at_every_token(client: Client, engine: SimulatedEngine) -> None:
    expected = await whole(client)
    text = decode_tokens(expected.ids[:-1], keep_markers=True)
    for cut in range(len(expected.ids)):
        seen = decode_tokens(expected.ids[:cut], keep_markers=True)
        if seen.endswith("\ufffd"):
            continue
        body = RAW | {"prompt": expected.prompt + expected.ids[:cut], "max_tokens": 300 - cut, "return_token_ids": True}
        _, answer = await client.post(engine, TEXT, body)
        choice = answer["choices"][0]
        assert choice["token_ids"] == expected.ids[cut:]
        assert seen + choice["text"] == text
        assert choice["finish_reason"] == "stop"


async def test_resumed_chat_is_read_from_where_its_prompt_ends(client: Client) -> None:
    expected = await whole(client)
    async with SimulatedEngine(**ENGINE) as engine:

        async def resumed(cut: int) -> Heard:
            ids = expected.prompt + expected.ids[:cut]
            return await hear(client, engine, CALLING | {"kv_transfer_params": {"prompt_token_ids": ids}})

        in_content = await resumed(expected.ids.index(THINK_END) + 3)
        assert in_content.reasoning == ""
        assert expected.content.endswith(in_content.content)
        assert arguments(in_content, 0) == arguments(expected, 0)
        in_section = await resumed(expected.ids.index(CALL_BEGIN))
        assert in_section.content.startswith("<|tool_call_begin|>functions.weather:0")
        assert not in_section.calls
        assert in_section.last["finish_reason"] == "stop"


async def test_white_space_withheld_at_the_seam_is_not_in_either_part(client: Client) -> None:
    expected = await whole(client)
    space = expected.ids.index(ord(" "), 5) + 1
    async with SimulatedEngine(**ENGINE) as engine:
        engine.faults.add("recompute", tokens=space, times=1)
        first = await hear(client, engine, CALLING)
        assert first.reasoning == expected.reasoning[: len(first.reasoning)]
        assert expected.reasoning[len(first.reasoning)] == " "
        assert first.ids[-1] == ord(" ")
        ids = {"prompt_token_ids": expected.prompt + first.ids}
        second = await hear(client, engine, CALLING | {"kv_transfer_params": ids})
        assert first.reasoning + " " + second.reasoning == expected.reasoning.rstrip()


@pytest.mark.parametrize(
    ("profile_name", "added"), [("v0.18", '"}'), ("v0.23", '"}'), ("v0.27", ""), ("v0.30", ""), ("v0.33", "")]
)
async def test_recomputed_within_arguments_ends_as_tool_calls(client: Client, profile_name: str, added: str) -> None:
    expected = await whole(client)
    told = expected.ids.index(ord("{")) + 4
    async with SimulatedEngine(profile_name=profile_name, **ENGINE) as engine:
        engine.faults.add("recompute", tokens=told)
        heard = await hear(client, engine, CALLING)
        _, answer = await client.post(engine, CHAT, CALLING)
    choice = heard.last
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("tool_calls", "recomputed", [])
    assert arguments(heard, 0) == '{"ci' + added
    assert bool(choice["delta"]) == bool(added)
    message = answer["choices"][0]["message"]
    assert ("tool_calls" in message) == (not added), "the older parsers find whole calls only"


async def test_recomputed_answer_at_a_brace_ends_with_the_brace(client: Client) -> None:
    expected = await whole(client)
    closed = expected.ids.index(ord("}")) + 1
    async with SimulatedEngine(**ENGINE) as engine:
        engine.faults.add("recompute", tokens=closed)
        heard = await hear(client, engine, CALLING)
    assert heard.last["delta"]["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    assert heard.last["token_ids"] == []


async def test_length_finish_after_tool_calls_depends_on_the_version(client: Client) -> None:
    expected = await whole(client)
    body = CALLING | {"max_tokens": expected.ids.index(ord("{")) + 4}
    for profile_name, reason in (("v0.30", "tool_calls"), ("v0.33", "length")):
        async with SimulatedEngine(profile_name=profile_name, **ENGINE) as engine:
            assert (await hear(client, engine, body)).last["finish_reason"] == reason


async def test_stop_string_that_never_came_is_let_go_with_the_finish(client: Client, engine: SimulatedEngine) -> None:
    _, free = await client.post(
        engine, CHAT, CALLING | {"tools": None, "max_tokens": 20} | {"chat_template_kwargs": {}}
    )
    text = free["choices"][0]["message"]["content"]
    body = CALLING | {"tools": None, "max_tokens": 20, "chat_template_kwargs": {}, "stop": [text[6:12] + "~"]}
    engine.faults.add("recompute", tokens=10)
    heard = await hear(client, engine, body)
    assert heard.content == decode_tokens(heard.ids)
    assert len(heard.last["delta"]["content"]) == 6
    assert heard.last["token_ids"] == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_logprobs_of_an_empty_finish_are_empty_lists(client: Client, engine: SimulatedEngine, path: str) -> None:
    engine.faults.add("recompute", tokens=2)
    asked = {"logprobs": True, "messages": CALLING["messages"]} if path == CHAT else {"logprobs": 1, "prompt": "x"}
    *_, last, _ = await client.stream(engine, path, asked)
    empty: list[Any] = []
    fields = {"content"} if path == CHAT else {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert last["choices"][0]["logprobs"] == dict.fromkeys(fields, empty)


async def test_several_ids_share_a_chunk_that_ends_within_a_character(client: Client) -> None:
    async with SimulatedEngine(tokens_per_step=3) as engine:
        prompt = "a "
        chunks = await client.stream(engine, TEXT, {"prompt": prompt, "max_tokens": 600, "return_token_ids": True})
    ids: list[int] = []
    text = ""
    broken = 0
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        ids += choice["token_ids"]
        text += choice["text"]
        so_far = decode_tokens(ids)
        broken += so_far.endswith("\ufffd")
        assert text == so_far.rstrip("\ufffd")
    assert broken
    assert len(ids) == 600


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_resumed_request_can_be_recomputed_again(client: Client, engine: SimulatedEngine, path: str) -> None:
    engine.faults.add("recompute", tokens=3, skip=1, times=2)
    body = {"prompt": "x", "messages": CALLING["messages"], "max_tokens": 10}
    reasons = []
    for is_stream in (False, True, False, True):
        if is_stream:
            events = await client.stream(engine, path, body)
            reasons.append(events[-2]["choices"][0].get("stop_reason"))
        else:
            _, answer = await client.post(engine, path, body)
            reasons.append(answer["choices"][0]["stop_reason"])
    assert reasons == [None, "recomputed", "recomputed", None]


async def test_recomputed_answer_can_end_without_done(client: Client, engine: SimulatedEngine) -> None:
    engine.faults.add("recompute", tokens=3)
    engine.faults.add("end_without_finish")
    usage = {"stream_options": {"include_usage": True}}
    *_, last = await client.stream(engine, TEXT, {"prompt": "x"} | usage)
    assert last["choices"][0]["stop_reason"] == "recomputed"


async def test_reasoning_tokens_are_counted_from_v30_on(client: Client) -> None:
    expected = await whole(client)
    thought = {"reasoning_tokens": expected.ids.index(THINK_END)}
    options: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for profile_name, counts in (("v0.27", None), ("v0.30", thought), ("v0.33", thought)):
        async with SimulatedEngine(profile_name=profile_name, **ENGINE) as engine:
            *_, last, usage, _ = await client.stream(engine, CHAT, CALLING | options)
            _, answer = await client.post(engine, CHAT, CALLING)
            _, text = await client.post(engine, TEXT, {"prompt": "x"})
        for found in (last, usage, answer):
            assert found["usage"].get("completion_tokens_details") == counts
        assert text["usage"].get("completion_tokens_details") is None
    ids = {"prompt_token_ids": expected.prompt + expected.ids[:10]}
    async with SimulatedEngine(**ENGINE) as engine:
        *_, usage, _ = await client.stream(engine, CHAT, CALLING | options | {"kv_transfer_params": ids})
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought["reasoning_tokens"] - 10}


@pytest.mark.parametrize("profile_name", ["v0.23", "v0.30"])
async def test_hidden_reasoning_hides_its_ids_and_logprobs(client: Client, profile_name: str) -> None:
    body = CALLING | {"include_reasoning": False, "logprobs": True}
    async with SimulatedEngine(profile_name=profile_name, **ENGINE) as engine:
        role, *chunks, _ = await client.stream(engine, CHAT, body)
        _, answer = await client.post(engine, CHAT, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    is_hidden = profile_name == "v0.30"
    assert role["prompt_token_ids"], "the prompt's are shown"
    assert any(choice["delta"].get("reasoning") for choice in choices) == (not is_hidden), "the older ones forgot it"
    assert any(choice["token_ids"] for choice in choices) == (not is_hidden)
    assert any(choice["logprobs"] for choice in choices) == (not is_hidden)
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices) == is_hidden
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert (answer["choices"][0]["token_ids"] is None) == is_hidden


async def test_whole_answer_resumed_in_its_content_is_taken_for_reasoning(client: Client) -> None:
    body = CALLING | {"tools": None}
    async with SimulatedEngine(eos_after=20, **ENGINE) as engine:
        _, answer = await client.post(engine, CHAT, body)
        ids = answer["choices"][0]["token_ids"]
        cut = ids.index(THINK_END) + 3
        params = {"prompt_token_ids": answer["prompt_token_ids"] + ids[:cut]}
        _, resumed = await client.post(engine, CHAT, body | {"kv_transfer_params": params})
    message = resumed["choices"][0]["message"]
    assert message["content"] is None
    assert answer["choices"][0]["message"]["content"].rstrip().endswith(message["reasoning"])
    assert ids[-1] == END
    assert resumed["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(ids) - cut - 1}


async def test_engine_without_a_tool_parser_shows_sections_as_content(client: Client) -> None:
    expected = await whole(client)
    async with SimulatedEngine() as engine:
        heard = await hear(client, engine, CALLING)
    assert heard.reasoning == expected.reasoning.rstrip()
    assert heard.content.startswith(expected.content + "<|tool_calls_section_begin|><|tool_call_begin|>functions.weath")
    assert heard.last["finish_reason"] == "stop"


async def test_ids_and_prompt_ids_can_be_withheld(client: Client, engine: SimulatedEngine) -> None:
    given = {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}
    engine.faults.add("drop_token_ids", times=1)
    role, chunk, *_ = await client.stream(engine, CHAT, CALLING | given)
    assert role["prompt_token_ids"] is None
    assert chunk["choices"][0]["token_ids"] is None
    engine.faults.add("ignore_prompt_ids", times=1)
    role, *_ = await client.stream(engine, CHAT, CALLING | given)
    assert len(role["prompt_token_ids"]) > 3
    role, *_ = await client.stream(engine, CHAT, CALLING | given)
    assert role["prompt_token_ids"] == [1, 2, 3]
