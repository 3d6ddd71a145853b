"""Requests that are answered: every API, members that change the answer, and every connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.canned import CannedEngine, data, event_stream, http, json_answer
from tests.deployment import Deployment
from tests.dialects import messages, responses
from tests.recorded.conversation import Conversation, asking

TOOLS: Final = responses.TOOLS
CHAT_TOOLS: Final = [
    {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}} for tool in TOOLS
]
THINKING: Final[dict[str, Any]] = {"chat_template_kwargs": {"thinking": True}}
WRITES: Final[dict[str, Any]] = {"tool_call_parser": "kimi_k2", "eos_after": 100, "default_max_tokens": 100_000}
"""Options of engines that write reasoning, text and two tool calls."""
PACED: Final[dict[str, Any]] = {"decode_step_ms": 1.0}
"""Options of engines whose tokens come one by one."""
LARGE: Final = "A large prompt. " * 6_000
PICTURE: Final = "data:image/png;base64,aGk="
FORMS: Final = {"stream": True, "whole": False}

OF_BOTH: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "usage-with-each-token": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token-ids": {"return_token_ids": True},
    "stop-string": {"stop": ["a", "e"], "max_tokens": 20},
    "two-samples": {"n": 2},
    "two-samples-with-usage": {"n": 2, "stream_options": {"include_usage": True}},
    "large-prompt": {"prompt": LARGE},
}
OF_CHATS: Final[dict[str, dict[str, Any]]] = {
    "one-token": {"max_tokens": 1},
    "no-usage": {"stream_options": {"include_usage": False}},
    "seed": {"seed": 7, "temperature": 0.5, "min_tokens": 3},
    "unknown-members": {"user": "somebody", "unknown": {"a": [1, 2.50, None]}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": CHAT_TOOLS, "tool_choice": "required"},
    "named-tool": {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    "story": {**THINKING, "tools": CHAT_TOOLS, "max_tokens": 300},
    "hidden-reasoning": {**THINKING, "include_reasoning": False, "max_tokens": 60},
    "format": {"response_format": {"type": "json_object"}},
    "picture": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}],
    },
}
OF_COMPLETIONS: Final[dict[str, dict[str, Any]]] = {
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "two-prompts": {"prompt": ["One", "Two"]},
    "prompt-as-ids": {"prompt": [72, 101, 108, 108, 111]},
}
OF_MESSAGES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "system": {"system": [{"type": "text", "text": "Be brief."}], "temperature": 0.2, "metadata": {"user_id": "u"}},
    "stop-sequence": {"stop_sequences": ["a", "e"]},
    "thinking": {**messages.THINKING, "max_tokens": 60},
    "story": {**messages.THINKING, "tools": messages.TOOLS, "max_tokens": 300},
    "tool-result": {
        "tools": messages.TOOLS,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {"q": "é"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}]},
        ],
    },
    "large-prompt": {"messages": [{"role": "user", "content": LARGE}]},
}
OF_RESPONSES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "instructions": {"instructions": "Be brief.", "temperature": 0.2, "metadata": {"a": "b"}, "store": False},
    "turns": {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "t", "name": "find", "arguments": '{"q":"a"}'},
            {"type": "function_call_output", "call_id": "t", "output": "42"},
        ],
        "tools": TOOLS,
    },
    "reasoning": {**THINKING, "max_output_tokens": 60},
    "story": {**THINKING, "tools": TOOLS, "max_output_tokens": 300},
    "format": {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}},
    "large-prompt": {"input": LARGE},
}
OF_GENERATE: Final[dict[str, dict[str, Any]]] = {
    "plain": {"text": "What is it?"},
    "ids": {"input_ids": [72, 101, 108, 108, 111]},
    "logprobs": {"text": "What is it?", "return_logprob": True},
    "batch": {"text": ["One", "Two"]},
    "two-samples": {"text": "What is it?", "sampling_params": {"n": 2, "max_new_tokens": 4}},
    "stop-string": {"text": "What is it?", "sampling_params": {"stop": ["a", "e"], "max_new_tokens": 20}},
    "large-prompt": {"text": LARGE},
}
# Both engines of a pair work at the same time, or one after the other, or there is only one.
CONNECTORS: Final = ("vllm_store", "mooncake_bootstrap", "sglang_bootstrap", "ascend_layerwise", "plain")
WITHOUT_RESUME: Final = ("plain", "usage-with-each-token", "token-ids", "logprobs", "stop-string")
MANY: Final = ("batch", "two-prompts", "two-samples", "two-samples-with-usage")
"""Several sequences, which engines write in any order."""


def openai(api: Api, **fields: Any) -> list[dict[str, Any]]:
    """Return the bodies of one shape, streamed and not."""
    if api is Api.CHAT and "prompt" in fields:
        fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
    whole = {name: value for name, value in fields.items() if name != "stream_options"}
    return [request(api, **{"max_tokens": 4, **each}) for each in ({**fields, "stream": True}, whole)]


def of_openai() -> Iterator[Conversation]:
    for api in (Api.CHAT, Api.COMPLETIONS):
        for shape, fields in {**OF_BOTH, **(OF_CHATS if api is Api.CHAT else OF_COMPLETIONS)}.items():
            yield Conversation(
                name=f"{api.value}-{shape}",
                talk=asking(*openai(api, **fields)),
                engine=WRITES,
                is_unordered=shape in MANY,
            )


def of_others() -> Iterator[Conversation]:
    question = responses.question
    for shape, fields in OF_MESSAGES.items():
        bodies = [messages.question(**{"max_tokens": 4, "stream": stream, **fields}) for stream in (True, False)]
        yield Conversation(name=f"messages-{shape}", talk=asking(*bodies, path="/v1/messages"), engine=WRITES)
    for shape, fields in OF_RESPONSES.items():
        bodies = [{**question(max_output_tokens=4, stream=stream), **fields} for stream in (True, False)]
        yield Conversation(name=f"responses-{shape}", talk=asking(*bodies, path="/v1/responses"), engine=WRITES)
    for shape, fields in OF_GENERATE.items():
        common = {"sampling_params": {"max_new_tokens": 4}, **fields}
        yield Conversation(
            name=f"generate-{shape}",
            talk=asking({**common, "stream": True}, common, path="/generate"),
            connector="sglang_bootstrap",
            is_unordered=shape in MANY,
        )


def of_connectors() -> Iterator[Conversation]:
    """Ask for a chat and a large completion through each connector."""
    for connector, (form, stream) in product(CONNECTORS, FORMS.items()):
        bodies = [
            request(Api.CHAT, stream=stream, max_tokens=4),
            request(Api.COMPLETIONS, LARGE, stream=stream, max_tokens=2),
        ]
        yield Conversation(name=f"{connector}-{form}", talk=asking(*bodies), connector=connector)


def two_models() -> tuple[Sequence[SimulatedEngine], Sequence[SimulatedEngine]]:
    """One prefiller and one decoder of each."""
    prefillers = [SimulatedEngine(role="prefill", model=model) for model in "ab"]
    return prefillers, [SimulatedEngine(role="decode", model=model) for model in "ab"]


async def models_are_known(gateway: Deployment) -> None:
    await until(lambda: gateway.worker.lanes.served_models.has_several_groups, "the engines' models")


def written(*pieces: bytes) -> Any:
    """Return a function that creates one engine for both stages, which answers with these pieces."""
    return lambda: ([], [CannedEngine("both", pieces)])


def chunk(text: str, end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return data({"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "sim", "choices": [choice]})


STREAM: Final = request(Api.CHAT, stream=True, max_tokens=4)
WHOLE: Final = request(Api.CHAT, stream=False, max_tokens=4)
EVENTS: Final = (chunk("a"), b": a comment\n\n", chunk("bä"), b'event: x\ndata: {"unknown": 1}\n\n', chunk("", "stop"))
CRLF: Final = [event.replace(b"\n", b"\r\n") for event in (*EVENTS, b"data: [DONE]\n\n")]


def of_setups() -> Iterator[Conversation]:
    """Yield settings and engines that change the way of a request."""
    both = (STREAM, WHOLE)
    yield Conversation(name="paced", talk=asking(*both, *both), engine=PACED)
    yield Conversation(name="four-engines", talk=asking(*both * 2), prefillers=2, decoders=2)
    for api in (Api.CHAT, Api.COMPLETIONS):  # whole answers that could be resumed are streams of engines
        shapes = {**OF_BOTH, **OF_CHATS} if api is Api.CHAT else {**OF_BOTH, **OF_COMPLETIONS}
        bodies = [body for shape in WITHOUT_RESUME for body in openai(api, **shapes[shape])]
        settings = {"resume": {"mode": "off"}}
        yield Conversation(name=f"resume-off-{api.value}", talk=asking(*bodies), engine=WRITES, settings=settings)
    yield Conversation(name="prefill-skipped", talk=asking(*both), settings={"kv": {"prefill_min_tokens": 100}})
    yield Conversation(name="own-request-id", talk=asking(*both, X_Request_Id="own", traceparent="00-1-2-01"))
    yield Conversation(
        name="two-models",
        talk=asking(*({**WHOLE, "model": model} for model in ("a", "b", "")), {**STREAM, "model": "x"}),
        engines=two_models,
        prepare=models_are_known,
        settings={"models": {"aliases": ["*=b"]}},
    )
    streams = {
        "odd-events": event_stream([*EVENTS, b"data: [DONE]\n\n"]),
        "crlf": event_stream(CRLF),
        "one-piece": [b"".join(event_stream([*EVENTS, b"data: [DONE]\n\n"]))],
        "bytewise": [b"%c" % byte for byte in b"".join(event_stream([*EVENTS, b"data: [DONE]\n\n"]))],
        "without-done": event_stream(EVENTS),
        "unreadable-event": event_stream([chunk("a"), b"data: {no\n\n", chunk("b", "stop"), b"data: [DONE]\n\n"]),
        "no-stream": [json_answer({"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]})],
        "html": [http(b"<html>busy</html>", content_type="text/html")],
        "no-http": [b"nonsense\r\n\r\n"],
    }
    for name, pieces in streams.items():
        yield Conversation(
            name=f"engine-writes-{name}",
            talk=asking(STREAM),
            connector="plain",
            engines=written(*pieces),
            settings={"resume": {"mode": "off"}, "retry": {"max_attempts": 1}},
        )


CONVERSATIONS: Final = (*of_openai(), *of_others(), *of_connectors(), *of_setups())
