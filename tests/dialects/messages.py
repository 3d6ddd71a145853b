"""Anthropic's clients: what they ask, and how they put together what they get."""

from __future__ import annotations

from typing import Any

import orjson

from tests.asking import Answer, read
from tests.deployment import Deployment
from tests.dialects.validators import check_message_events, named_events

PATH = "/v1/messages"
TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {parameter: {}}}}
    for name, parameter in (("find", "q"), ("show", "at"))
]
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}

_BEGUN = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_GROWS = {
    "thinking_delta": "thinking",
    "text_delta": "text",
    "input_json_delta": "partial_json",
    "signature_delta": "signature",
}


def question(text: Any = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return a request of 40 tokens."""
    return {"model": "sim", "max_tokens": 40, "messages": [{"role": "user", "content": text}], **fields}


def story(**fields: Any) -> dict[str, Any]:
    """Thinking, text and two tool calls: 137 tokens of simulated engines."""
    return question("What now?", **{"max_tokens": 300, **THINKING, "tools": TOOLS, **fields})


async def ask(gateway: Deployment, body: Any, method: str = "POST", path: str = PATH, **headers: str) -> Answer:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with gateway.session.request(method, gateway.url + path, data=raw, headers=names) as response:
        return await read(response)


def message(answer: Answer) -> dict[str, Any]:
    """Return the message of a streamed or whole answer, without random members."""
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    got = _put_together(answer) if answer.is_stream else answer.json
    assert got.pop("id").startswith("msg_")
    for block in got["content"]:
        if block["type"] == "thinking":
            assert block.pop("signature")
    return got


def _put_together(answer: Answer) -> dict[str, Any]:
    """Assemble a message as the SDK does (`accumulate_event`). The order of the events is checked first."""
    check_message_events(answer)
    (_, start), *told = named_events(answer)
    got: dict[str, Any] = start["message"]
    for name, data in told:
        if name == "content_block_start":
            block = data["content_block"]
            got["content"].append(block)
            if block["type"] == "tool_use":
                block["input"] = ""
            else:
                assert block == _BEGUN[block["type"]]
        elif name == "content_block_delta":
            delta = data["delta"]
            member = _GROWS[delta["type"]]
            assert delta[member], "every delta says something"
            got["content"][-1]["input" if member == "partial_json" else member] += delta[member]
        elif name == "content_block_stop":
            if got["content"][-1]["type"] == "tool_use":
                got["content"][-1]["input"] = _arguments(got["content"][-1]["input"])
        elif name == "message_delta":
            got |= data["delta"]
            got["usage"] |= data["usage"]
    return got


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
