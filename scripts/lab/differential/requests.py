"""Requests of clients in many spellings. Bodies are bytes, because their spelling matters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MODEL = "served"

_NOUNS = {CHAT: "chat", COMPLETIONS: "completion", GENERATE: "generate"}

_QUESTION = [{"role": "user", "content": "What runs through the night?"}]
# A PNG of one pixel.
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_train",
        "description": "Trains between two towns",
        "parameters": {
            "type": "object",
            "properties": {"from": {"type": "string"}, "to": {"type": "string", "enum": ["Bern", "Zürich"]}},
            "required": ["from", "to"],
        },
        "strict": True,
    },
}
_TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find_train", "arguments": '{"from": "Basel", "to": "Zürich"}'},
}
_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "A train, please."}], "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "07:04"},
    {"role": "assistant", "content": "At 07:04.", "reasoning_content": "The tool says so."},
    {"role": "user", "content": "And back?"},
]
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"50256": -100, "17": 1.5},
    "seed": 42,
}
# Unknown members must arrive unchanged.
_UNKNOWN = {
    "chat_template_kwargs": {"thinking": True, "nested": {"list": [1, [2, None]], "empty": {}}},
    "vllm_xargs": {"a": 1},
    "some_future_field": {"deep": [{"x": None}, 1.0, 1, -0.0, 1e-7, True]},
    "a_large_number": 9007199254740993,
    "an_empty_string": "",
    "a_null": None,
}
# Members that clients must not set: sources of KV, and ids.
_RESERVED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "203.0.113.1", "remote_port": 1},
    "bootstrap_host": "203.0.113.1",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "data_parallel_rank": 7,
    "request_id": "mine",
    "rid": "mine",
}
_HEADERS = {
    "Authorization": "Bearer sk-client",
    "X-Request-Id": "the-clients-own-id",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=value",
    "X-data-parallel-rank": "7",
    "X-Custom": "anything",
    "Cookie": "session=secret",
    "User-Agent": "a-client/1.0",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def _chat(name: str, **members: object) -> Request:
    return _request(name, CHAT, {"model": MODEL, "messages": _QUESTION, **members})


def _completion(name: str, **members: object) -> Request:
    return _request(name, COMPLETIONS, {"model": MODEL, **members})


def _generate(name: str, **members: object) -> Request:
    return _request(name, GENERATE, members)


def _request(name: str, path: str, members: dict[str, Any], headers: Mapping[str, str] | None = None) -> Request:
    return Request(f"{_NOUNS[path]}: {name}", path, json.dumps(members).encode(), headers or {})


def _spelled(name: str, text: str) -> Request:
    return Request(name, CHAT, text.encode())


OPENAI = (
    _chat("whole", max_tokens=16),
    _chat("streamed", max_tokens=16, stream=True),
    _chat("streamed with usage", max_tokens=16, stream=True, stream_options={"include_usage": True}),
    _chat(
        "streamed with usage in every chunk",
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    _chat("options of a stream that are off", stream=True, stream_options={"include_usage": False}),
    _chat("no limit"),
    _chat("max_completion_tokens", max_completion_tokens=16, stream=True),
    _chat("both limits", max_completion_tokens=16, max_tokens=8),
    _chat("min_tokens", max_tokens=16, min_tokens=5),
    _chat("nulls", max_tokens=None, stream=None, stream_options=None, n=None, stop=None, tools=None, seed=None),
    _chat("false", stream=False, logprobs=False, max_tokens=4),
    _chat("conversation with tool calls", messages=_CONVERSATION, tools=[_TOOL], max_tokens=16),
    _chat("tools, streamed", tools=[_TOOL], tool_choice="auto", parallel_tool_calls=False, stream=True),
    _chat("a tool is required", tools=[_TOOL], tool_choice="required"),
    _chat("this tool", tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "find_train"}}),
    _chat(
        "an image",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": _PIXEL, "detail": "low"}, "uuid": "pixel"},
                    {"type": "text", "text": "What is this?"},
                ],
            }
        ],
        max_tokens=16,
    ),
    _chat("sampling", max_tokens=16, **_SAMPLING),
    _chat("largest seed, streamed", seed=2**63 - 1, stream=True),
    _chat("stop string", stop="\n\n", stream=True),
    _chat("stops", stop=["END", "•"], stop_token_ids=[1, 2], ignore_eos=True, include_stop_str_in_output=True),
    _chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=4),
    _chat("logprobs, streamed", logprobs=True, top_logprobs=0, max_tokens=4, stream=True),
    _chat("structured", response_format=_SCHEMA, max_tokens=16),
    _chat("token ids, please", return_token_ids=True, max_tokens=4, stream=True),
    _chat("unknown fields", max_tokens=4, **_UNKNOWN),
    _chat("unknown fields, streamed", max_tokens=4, stream=True, **_UNKNOWN),
    _chat("fields that are not the client's", max_tokens=4, **_RESERVED),
    _request("headers", CHAT, {"model": MODEL, "messages": _QUESTION}, _HEADERS),
    _chat("three answers", n=3, max_tokens=4),
    _chat("two answers with a seed, streamed", n=2, seed=7, max_tokens=4, stream=True),
    _chat("continued message", continue_final_message=True, add_generation_prompt=False, max_tokens=4),
    _chat("reasoning effort, user, metadata", reasoning_effort="low", user="u-1", metadata={"k": "v"}, store=False),
    _chat("cache salt and priority", cache_salt="tenant", priority=3, truncate_prompt_tokens=100, max_tokens=4),
    _chat("a long prompt", messages=[{"role": "user", "content": "Say it again. " * 20_000}], max_tokens=4),
    _chat("prompt log probabilities", prompt_logprobs=1, max_tokens=4),
    _chat("beam search", use_beam_search=True, max_tokens=4, n=1),
    _spelled(
        "chat: text in many spellings",
        '{"model": "served",\n\t"messages" : [{"role":"user","content":"na\\u00efve \\ud83d\\ude00 \U0001f600 \\"q\\" '
        '\\\\ \\/ \\t 日本語 e\u0301 \u2028"}] , "max_tokens": 4}',
    ),
    _spelled(
        "chat: numbers in many spellings",
        '{"model":"served","messages":[{"role":"user","content":"x"}],"temperature":1,"top_p":1.0,"min_p":1e-3,'
        '"max_tokens":4,"frequency_penalty":0.10000000000000001,"big":123456789012345678901234567890}',
    ),
    _completion("whole", prompt="Once upon a time", max_tokens=16),
    _completion("streamed", prompt="Once upon a time", max_tokens=16, stream=True),
    _completion("streamed with usage", prompt="Once", stream=True, stream_options={"include_usage": True}),
    _completion("no limit", prompt="Once upon a time"),
    _completion("token ids", prompt=[1, 2, 3, 4], max_tokens=16, stream=True),
    _completion("one prompt in a list", prompt=["Once"], max_tokens=4),
    _completion("three prompts", prompt=["Once", "Twice", "Thrice"], max_tokens=4),
    _completion("prompts of token ids, streamed", prompt=[[1, 2], [3, 4, 5]], max_tokens=4, stream=True),
    _completion("two prompts, two answers, a seed", prompt=["Once", "Twice"], n=2, seed=7, max_tokens=4),
    _completion("best of one", prompt="Once", best_of=1, n=1, max_tokens=4, stream=True),
    _completion("echo", prompt="Once", echo=True, max_tokens=4),
    _completion("logprobs", prompt="Once", logprobs=2, max_tokens=4, stream=True),
    _completion("logprobs of nothing else", prompt="Once", logprobs=0, max_tokens=4),
    _completion("suffix and stop", prompt="Once", suffix=" end", stop=["\n"], max_tokens=4),
    _completion("unknown fields", prompt="Once", max_tokens=4, **_UNKNOWN),
)
"""Requests for every program."""

_LIMIT = {"max_new_tokens": 4, "temperature": 0, "stop": ["\n"]}

NATIVE = (
    _generate("whole", text="Once upon a time", sampling_params=_LIMIT),
    _generate("streamed", text="Once upon a time", sampling_params=_LIMIT, stream=True),
    _generate("token ids", input_ids=[1, 2, 3], sampling_params=_LIMIT),
    _generate("three texts", text=["Once", "Twice", "Thrice"], sampling_params=_LIMIT),
    _generate("lists of token ids, streamed", input_ids=[[1, 2], [3]], sampling_params=_LIMIT, stream=True),
    _generate("two answers", text="Once", sampling_params={**_LIMIT, "n": 2}),
    _generate(
        "texts with their own parameters and images",
        text=["Once", "Twice"],
        sampling_params=[_LIMIT, {**_LIMIT, "max_new_tokens": 5}],
        image_data=[_PIXEL, None],
    ),
    _generate("logprobs", text="Once", sampling_params=_LIMIT, return_logprob=True, logprob_start_len=0),
    _generate("logprobs, streamed", text="Once", sampling_params=_LIMIT, return_logprob=True, stream=True),
    _generate("an image", text="What is this?", image_data=_PIXEL, sampling_params=_LIMIT),
    _generate("unknown fields", text="Once", sampling_params=_LIMIT, **_UNKNOWN),
)
"""Requests for SGLang's native API."""
