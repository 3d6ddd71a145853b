"""Streams, chunk by chunk, as vLLM writes them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import encode_text, render_chat
from proxy.sim.model.writer import DeterministicWriter
from tests.sim.conftest import Client

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def tokens(prompt: list[int], count: int) -> list[int]:
    writer = DeterministicWriter(prompt)
    return [writer.next() for _ in range(count)]


async def raw_stream(client: Client, engine: SimulatedEngine, path: str, body: dict[str, Any]) -> list[str]:
    """Return the bytes of each event, with a fixed time of creation."""
    headers = {"X-Request-Id": "R"}
    async with client.session.post(engine.url + path, json=body | {"stream": True}, headers=headers) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    created = text.split('"created":')[1].split(",")[0]
    events = text.replace(f'"created":{created}', '"created":1').split("\n\n")
    assert events.pop() == ""
    return events


async def test_chat_stream_is_role_deltas_finish_done(client: Client, engine: SimulatedEngine) -> None:
    first, second, third = map(chr, tokens(render_chat(HELLO), 3))
    head = 'data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":1,"model":"sim","choices":[{"index":0,'
    assert await raw_stream(client, engine, CHAT, HELLO) == [
        head
        + '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,'
        + '"prompt_text":null}',
        head + f'"delta":{{"content":"{first}"}},"logprobs":null,"finish_reason":null,"token_ids":null}}]}}',
        head + f'"delta":{{"content":"{second}"}},"logprobs":null,"finish_reason":null,"token_ids":null}}]}}',
        head
        + f'"delta":{{"content":"{third}"}},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        + '"token_ids":null}],"system_fingerprint":"vllm-0.30.0-sim"}',
        "data: [DONE]",
    ]


async def test_usage_and_token_ids_have_their_places_in_a_chat_stream(client: Client, engine: SimulatedEngine) -> None:
    prompt = render_chat(HELLO)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = HELLO | {"stream_options": options, "return_token_ids": True, "max_tokens": 2}
    role, first, last, usage, done = await client.stream(engine, CHAT, body)
    out = tokens(prompt, 2)
    assert role["prompt_token_ids"] == prompt
    thought = {"completion_tokens_details": {"reasoning_tokens": 0}}
    counts = {"prompt_tokens": len(prompt), "total_tokens": len(prompt), "completion_tokens": 0}
    assert role["usage"] == counts | thought
    assert first["choices"][0]["token_ids"] == out[:1]
    assert first["usage"]["completion_tokens"] == 1
    assert last["choices"][0]["token_ids"] == out[1:]
    assert "system_fingerprint" not in last
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + 2,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
        **thought,
    }
    assert done == "[DONE]"


async def test_completion_chunks_of_two_versions(client: Client) -> None:
    body = {"prompt": "once ", "max_tokens": 1, "return_token_ids": True}
    (token,) = tokens(encode_text("once "), 1)
    chunk = (
        'data: {"id":"cmpl-R","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,'
        f'"text":"{chr(token)}","logprobs":null,"finish_reason":"length","stop_reason":null,'
        f'"prompt_token_ids":[111,110,99,101,32],"token_ids":[{token}]}}]'
    )
    async with SimulatedEngine(profile_name="v0.18") as old, SimulatedEngine(profile_name="v0.33") as new:
        assert await raw_stream(client, old, TEXT, body) == [chunk + ',"usage":null}', "data: [DONE]"]
        end = ',"system_fingerprint":"vllm-0.33.0-sim","kv_transfer_params":null}'
        expected = [chunk + end, "data: [DONE]"]
        assert await raw_stream(client, new, TEXT, body) == expected


async def test_reasoning_and_content_come_in_their_own_fields(client: Client, engine: SimulatedEngine) -> None:
    body = HELLO | {"chat_template_kwargs": {"thinking": True}, "max_tokens": 120}
    events = await client.stream(engine, CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events[1:-1]]
    kinds = [next(iter(delta), None) for delta in deltas]
    turn = kinds.index("content")
    assert set(kinds[:turn]) == {"reasoning"}
    assert set(kinds[turn:]) <= {"content", None}
    _, whole = await client.post(engine, CHAT, body)
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == "".join(delta.get("reasoning", "") for delta in deltas)
    assert message["content"] == "".join(delta.get("content", "") for delta in deltas)


async def test_tool_calls_are_streamed_and_whole(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
    body = HELLO | {"tools": [tool], "max_tokens": 200}
    async with SimulatedEngine(tool_call_parser="kimi_k2") as engine:
        events = await client.stream(engine, CHAT, body)
        _, whole = await client.post(engine, CHAT, body)
        _, plain = await client.post(engine, CHAT, body | {"tool_choice": "none", "max_tokens": 60})
    calls = [
        call for event in events[:-1] for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())
    ]
    function = {"name": "weather", "arguments": "{"}
    assert calls[0] == {"id": "functions.weather:0", "type": "function", "index": 0, "function": function}
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments.startswith('{"city":"')
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call == {
        "id": "functions.weather:0",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert "tool_calls" not in plain["choices"][0]["message"]


async def test_text_is_held_back_as_long_as_it_may_begin_a_stop_string(client: Client, engine: SimulatedEngine) -> None:
    _, free = await client.post(engine, CHAT, HELLO | {"max_tokens": 60})
    text = free["choices"][0]["message"]["content"]
    stop = text[20:26]
    events = await client.stream(engine, CHAT, HELLO | {"max_tokens": 60, "stop": [stop]})
    choices = [event["choices"][0] for event in events[1:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text[: text.index(stop)]
    assert choices[3]["delta"] == {"content": ""}, "five characters are held back"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == stop


async def test_several_samples_and_prompts_have_their_indices(client: Client, engine: SimulatedEngine) -> None:
    body = {"prompt": ["one ", "two "], "n": 2, "max_tokens": 4}
    _, whole = await client.post(engine, TEXT, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    streamed = ["", "", "", ""]
    for event in (await client.stream(engine, TEXT, body))[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


async def test_every_chunk_with_ids_is_sent_when_ids_are_asked_for(client: Client, engine: SimulatedEngine) -> None:
    body = HELLO | {"chat_template_kwargs": {"thinking": True}, "max_tokens": 60}
    _, *plain, _ = await client.stream(engine, CHAT, body)
    _, *chunks, _ = await client.stream(engine, CHAT, body | {"return_token_ids": True})
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 60
    assert {} in [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {} not in [chunk["choices"][0]["delta"] for chunk in plain[:-1]]
    assert {chunk["choices"][0]["token_ids"] for chunk in plain} == {None}


async def test_prompt_ids_of_a_completion_are_on_its_first_chunk(client: Client, engine: SimulatedEngine) -> None:
    body = {"prompt": ["one ", "two "], "max_tokens": 3, "return_token_ids": True}
    prompts: dict[int, list[Any]] = {0: [], 1: []}
    for event in (await client.stream(engine, TEXT, body))[:-1]:
        prompts[event["choices"][0]["index"]].append(event["choices"][0]["prompt_token_ids"])
    assert prompts == {0: [[*b"one "], None, None], 1: [[*b"two "], None, None]}


async def test_offsets_follow_the_text_up_to_v30_and_then_the_tokens(client: Client) -> None:
    body = {"prompt": "once ", "max_tokens": 12, "logprobs": 0, "stop": ["~~~~~"]}
    for profile_name, expected in (("v0.30", [0, 0, 0, 0, 0, 1]), ("v0.33", [0, 1, 2, 3, 4, 5])):
        async with SimulatedEngine(profile_name=profile_name) as engine:
            events = await client.stream(engine, TEXT, body)
        choices = [event["choices"][0] for event in events[:-1]]
        offsets = [choice["logprobs"]["text_offset"] for choice in choices]
        assert offsets[:6] == [[offset] for offset in expected], "four characters are held back"
        assert all(len(top) == 1 for choice in choices for top in choice["logprobs"]["top_logprobs"])


async def test_character_of_several_tokens_is_spelled_by_its_last(client: Client, engine: SimulatedEngine) -> None:
    body = {"prompt": "a ", "max_tokens": 400, "logprobs": 0, "return_token_ids": True}
    events = await client.stream(engine, TEXT, body)
    choices = [event["choices"][0] for event in events[:-1]]
    spelled = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert "".join(spelled) == "".join(choice["text"] for choice in choices)
    assert {"", "é"} <= set(spelled)
    chat = await client.stream(engine, CHAT, HELLO | {"max_tokens": 400, "logprobs": True})
    entries = [entry for event in chat[1:-1] for entry in event["choices"][0]["logprobs"]["content"]]
    assert all(entry["bytes"] == [*entry["token"].encode()] for entry in entries)
    assert "" in {entry["token"] for entry in entries}


async def test_completions_show_markers_and_spaces_around_them_as_asked(client: Client) -> None:
    chat = HELLO | {"chat_template_kwargs": {"thinking": True}}
    async with SimulatedEngine(eos_after=10) as engine:

        async def text(**fields: Any) -> str:
            body = {"prompt": render_chat(chat), "max_tokens": 200, **fields}
            _, answer = await client.post(engine, TEXT, body)
            assert answer["choices"][0]["finish_reason"] == "stop"
            return str(answer["choices"][0]["text"])

        raw = await text(skip_special_tokens=False, spaces_between_special_tokens=False)
        reasoning, content = raw.split("</think>")
        assert "<|im_end|>" not in content
        assert await text() == reasoning + content
        assert await text(skip_special_tokens=False) == f" {reasoning} </think> {content}"


async def test_completions_end_at_their_stop_strings(client: Client, engine: SimulatedEngine) -> None:
    _, default = await client.post(engine, TEXT, {"prompt": "once "})
    assert default["usage"]["completion_tokens"] == 16
    _, free = await client.post(engine, TEXT, {"prompt": "once ", "max_tokens": 60})
    text = free["choices"][0]["text"]
    stop = text[20:26]
    body = {"prompt": "once ", "max_tokens": 60, "stop": stop}
    events = await client.stream(engine, TEXT, body)
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert (choices[3]["text"], choices[-1]["stop_reason"]) == ("", stop)
    _, late = await client.post(engine, TEXT, body | {"min_tokens": 60})
    assert late["choices"][0]["text"] == text
    async with SimulatedEngine(first_token_eos=True) as hasty:
        _, ended = await client.post(hasty, TEXT, body)
        assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")


async def test_logprobs_of_both_shapes(client: Client, engine: SimulatedEngine) -> None:
    _, chat = await client.post(engine, CHAT, HELLO | {"logprobs": True, "top_logprobs": 2})
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert [entry["token"] for entry in content] == list(chat["choices"][0]["message"]["content"])
    assert len(content[0]["top_logprobs"]) == 2
    events = await client.stream(engine, TEXT, {"prompt": "once ", "max_tokens": 3, "logprobs": 1})
    logprobs = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry["text_offset"] for entry in logprobs] == [[0], [1], [2]]


@pytest.mark.parametrize(("option", "sizes"), [("tokens_per_step", [1, 3, 3]), ("stream_interval", [1, 3, 3])])
async def test_several_tokens_share_a_chunk(client: Client, option: str, sizes: list[int]) -> None:
    options: dict[str, Any] = {option: 3}
    async with SimulatedEngine(**options) as engine:
        events = await client.stream(engine, TEXT, {"prompt": "once ", "max_tokens": 7, "return_token_ids": True})
    assert [len(event["choices"][0]["token_ids"]) for event in events[:-1]] == sizes
