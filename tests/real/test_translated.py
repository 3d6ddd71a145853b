"""Messages and responses, which the gateway translates to chats, beside those of a single engine, which has both APIs.

Two things differ. The gateway goes on with an answer that the client has begun, as Anthropic does, and vLLM does so in
responses only. An item of a response that the limit of tokens cuts off is `completed` to vLLM, and `incomplete` to
OpenAI and here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.dialects.left_out import OmittedParts
from proxy.dialects.messages_request import translate_to_chat as chat_of_message
from proxy.dialects.responses_request import translate_to_chat as chat_of_response
from tests.real.answers import CHAT, late_piece, request
from tests.real.cluster import Cluster
from tests.real.report import Show

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

pytestmark = pytest.mark.only("nixl", "mooncake", "store", "mooncake-store", "plain")

# A call must be complete: vLLM tells one that is cut off as text if it is asked for a whole answer, and the gateway
# asks for a stream. Greedy nonsense fills it with white space.
LIMITS = {"calls": 600}

# With an end that greedy nonsense reaches, too.
SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["fox", "dog"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOLS = [{"name": "find", "description": "Finds a word.", "input_schema": SCHEMA, "strict": True}]
FUNCTIONS = [{"type": "function", "name": "find", "description": "Finds a word.", "parameters": SCHEMA, "strict": True}]

ASKED_MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": "Hi"}]},
    "blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You jump over the lazy dog.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " Be quick."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What does a proxy send? " * 8}]},
            {"role": "assistant", "content": [{"type": "text", "text": "The prompt."}]},
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "then?"}]},
        ],
    },
    "reminders": {
        "system": "Be quick.",
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "system", "content": "A reminder."},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
        ],
    },
    "tools": {
        "tools": TOOLS,
        "tool_choice": {"type": "none"},
        "messages": [
            {"role": "user", "content": "Where is the fox?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look for it.", "signature": "0"},
                    {"type": "text", "text": "I look."},
                    {
                        "type": "tool_use",
                        "id": "functions.find:0",
                        "name": "find",
                        "input": {"word": "fox", "é": [1, {}]},
                    },
                    {"type": "tool_use", "id": "functions.find:1", "name": "find", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "functions.find:0", "content": "here"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "functions.find:1",
                        "content": [{"type": "text", "text": "there"}, {"type": "text", "text": "and there"}],
                    },
                    {"type": "text", "text": "Which?"},
                ],
            },
        ],
    },
    "calls": {
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "find"},
        "messages": [{"role": "user", "content": "Find the fox."}],
    },
}
ASKED_RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Hi"},
    "items": {
        "instructions": "You jump over the lazy dog.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What does a proxy send? " * 8}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "The prompt.", "annotations": []}],
            },
            {"role": "user", "content": "And then?"},
        ],
    },
    "tools": {
        "tools": FUNCTIONS,
        "tool_choice": "none",
        "input": [
            {"role": "user", "content": "Where is the fox?"},
            {"type": "function_call", "call_id": "functions.find:0", "name": "find", "arguments": '{"word": "fox"}'},
            {"type": "function_call_output", "call_id": "functions.find:0", "output": "here"},
            {"role": "user", "content": "Which?"},
        ],
    },
    "calls": {
        "tools": FUNCTIONS,
        "tool_choice": {"type": "function", "name": "find"},
        "input": "Find the fox.",
    },
    "begun": {
        "input": [
            {"role": "user", "content": "Say it."},
            {
                "type": "message",
                "id": "msg_1",
                "status": "incomplete",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "The quick brown", "annotations": []}],
            },
        ],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED_MESSAGES)
def test_translated_messages_equal_those_of_a_single_engine(
    cluster: Cluster, name: str, stream: bool, show: Show
) -> None:
    body = {**ASKED_MESSAGES[name], "max_tokens": LIMITS.get(name, 64), "stream": stream}
    message = ask_both(cluster, MESSAGES, body)
    assert {block["type"] for block in message["content"]} == {"tool_use" if name == "calls" else "text"}
    show(f"{message['stop_reason']}, {message['usage']['output_tokens']} tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_translated_messages_end_at_stop_sequences(cluster: Cluster, stream: bool, show: Show) -> None:
    body: dict[str, Any] = {**ASKED_MESSAGES["blocks"], "max_tokens": 64, "stream": stream}
    piece = late_piece(ask_both(cluster, MESSAGES, body)["content"][0]["text"], 0.5)
    message = ask_both(cluster, MESSAGES, {**body, "stop_sequences": ["never said", piece]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", piece)
    show(f"{message['usage']['output_tokens']} of 64 tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED_RESPONSES)
def test_translated_responses_equal_those_of_a_single_engine(
    cluster: Cluster, name: str, stream: bool, show: Show
) -> None:
    body = {**ASKED_RESPONSES[name], "max_output_tokens": LIMITS.get(name, 64), "stream": stream}
    response = ask_both(cluster, RESPONSES, body)
    assert {item["type"] for item in response["output"]} == {"function_call" if name == "calls" else "message"}
    show(f"{response['status']}, {response['usage']['output_tokens']} tokens")


@pytest.mark.parametrize("name", ASKED_MESSAGES)
def test_translated_messages_have_the_prompt_that_the_engine_makes_of_them(
    cluster: Cluster, name: str, show: Show
) -> None:
    body = {**ASKED_MESSAGES[name], "max_tokens": 64}
    show(compare_prompts(cluster, MESSAGES, body, chat_of_message(body, OmittedParts())))


@pytest.mark.parametrize("name", ASKED_RESPONSES)
def test_translated_responses_have_the_prompt_that_the_engine_makes_of_them(
    cluster: Cluster, name: str, show: Show
) -> None:
    body = {**ASKED_RESPONSES[name], "max_output_tokens": 64}
    show(compare_prompts(cluster, RESPONSES, body, chat_of_response(body, OmittedParts())))


def compare_prompts(cluster: Cluster, path: str, body: dict[str, Any], chat: dict[str, Any]) -> str:
    """Assert that the engine renders a body and its translation to the same prompt; return its length as text."""
    prompts = []
    for route, request_body in ((path, body), (CHAT, chat)):
        with request(cluster.single.port, route + "/render", request_body) as response:
            rendered = json.load(response)
            assert response.status == 200, rendered
        prompts.append(rendered["token_ids"])
    own, translated = prompts
    assert own == translated, [_text(cluster, prompt) for prompt in prompts]
    return f"{len(own)} tokens"


def _text(cluster: Cluster, tokens: list[int]) -> str:
    with request(cluster.single.port, "/detokenize", {"tokens": tokens}) as response:
        text: str = json.load(response)["prompt"]
    return text


def ask_both(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the gateway and the single engine greedily, assert that the answers are equal, and return them."""
    answer, alone = (
        _ask(program.port, path, {**body, "temperature": 0}) for program in (cluster.gateway, cluster.single)
    )
    assert answer == alone
    return answer


def _ask(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that must be equal: neither random ids nor counts of cached tokens."""
    with request(port, path, body) as response:
        if response.status != 200:
            raise AssertionError(f"status {response.status}: {response.read()!r}")
        if path == MESSAGES:
            return _message(_message_of(_events(response)) if body["stream"] else json.load(response))
        return _response(list(_events(response))[-1]["response"] if body["stream"] else json.load(response))


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer["usage"]
    prompt = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    content = [
        {name: value for name, value in block.items() if name not in ("id", "signature") and value is not None}
        for block in answer["content"]
    ]
    return {
        **{name: answer.get(name) for name in ("type", "role", "model", "stop_reason", "stop_sequence")},
        "content": content,
        "usage": {
            "input_tokens": sum(usage.get(name) or 0 for name in prompt),
            "output_tokens": usage["output_tokens"],
        },
    }


def _message_of(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, assembled like in Anthropic's SDK."""
    message: dict[str, Any] = next(events)["message"]
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                written = ""
            case "content_block_delta":
                delta = event["delta"]
                for member in ("text", "thinking"):
                    if member in delta:
                        blocks[-1][member] += delta[member]
                written += delta.get("partial_json", "")
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(written or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return {**message, "content": blocks}


def _response(answer: dict[str, Any]) -> dict[str, Any]:
    output = []
    for item in answer["output"]:
        members = {name: item[name] for name in ("type", "role", "name") if name in item}
        if "arguments" in item:  # vLLM rewrites the arguments of a whole answer
            members["arguments"] = json.loads(item["arguments"])
        texts = [part["text"] for part in item.get("content") or ()]
        output.append({**members, "texts": texts})
    names = ("input_tokens", "output_tokens", "total_tokens")
    return {
        **{name: answer[name] for name in ("object", "model", "status", "incomplete_details")},
        "output": output,
        "usage": {name: answer["usage"][name] for name in names},
    }


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
