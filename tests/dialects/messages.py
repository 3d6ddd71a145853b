"""Anthropic's clients: what they ask, and how they put together what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from tests.asking import read

if TYPE_CHECKING:
    from tests.asking import Answer
    from tests.deployment import Deployment

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
    "thinking_delta": ("thinking", "thinking"),
    "text_delta": ("text", "text"),
    "input_json_delta": ("tool_use", "partial_json"),
    "signature_delta": ("thinking", "signature"),
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


def events(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream."""
    told = []
    for event in answer.body.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = event.split(b"\n")
        told.append((name.removeprefix(b"event: ").decode(), orjson.loads(data.removeprefix(b"data: "))))
        assert told[-1][0] == told[-1][1]["type"]
    return told


def _put_together(answer: Answer) -> dict[str, Any]:
    """Assemble a message as the SDK does (`accumulate_event`).

    Unlike the SDK this requires that blocks follow each other and that none is left open.
    """
    (first, start), *told = events(answer)
    assert first == "message_start"
    got: dict[str, Any] = start["message"]
    assert (got["content"], got["stop_reason"], got["stop_sequence"]) == ([], None, None)
    open_block: Any = None
    is_ended = False
    for name, data in told:
        assert not is_ended, "nothing follows message_stop"
        if name == "content_block_start":
            assert (open_block, data["index"]) == (None, len(got["content"]))
            open_block = data["content_block"]
            got["content"].append(open_block)
            if open_block["type"] == "tool_use":
                assert open_block["input"] == {}
                open_block["input"] = ""
            else:
                assert open_block == _BEGUN[open_block["type"]]
        elif name == "content_block_delta":
            assert (open_block is not None, data["index"]) == (True, len(got["content"]) - 1)
            delta = data["delta"]
            kind, member = _GROWS[delta["type"]]
            assert open_block["type"] == kind
            assert delta[member], "every delta says something"
            open_block["input" if member == "partial_json" else member] += delta[member]
        elif name == "content_block_stop":
            assert (open_block is not None, data["index"]) == (True, len(got["content"]) - 1)
            if open_block["type"] == "tool_use":
                open_block["input"] = _arguments(open_block["input"])
            open_block = None
        elif name == "message_delta":
            assert (open_block, got["stop_reason"]) == (None, None)
            got |= data["delta"]
            got["usage"] |= data["usage"]
        else:
            assert (name, got["stop_reason"] is not None) == ("message_stop", True)
            is_ended = True
    assert is_ended
    return got


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
