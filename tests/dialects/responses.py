"""OpenAI's clients of the Responses API: what they ask, and how they put together what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from tests.asking import read

if TYPE_CHECKING:
    from tests.asking import Answer
    from tests.deployment import Deployment

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {parameter: {}}}}
    for name, parameter in (("find", "q"), ("show", "at"))
]
THINKING = {"chat_template_kwargs": {"thinking": True}}

_DELTAS = {
    "response.reasoning_text.delta": "text",
    "response.output_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
_STATUS = {"response.completed": "completed", "response.incomplete": "incomplete"}


def question(text: Any = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return a request of 40 tokens."""
    return {"model": "sim", "max_output_tokens": 40, "input": text, **fields}


def story(**fields: Any) -> dict[str, Any]:
    """Reasoning, text and two tool calls: 137 tokens of simulated engines."""
    return question("What now?", **{"max_output_tokens": 300, **THINKING, "tools": TOOLS, **fields})


async def ask(gateway: Deployment, body: Any, method: str = "POST", path: str = PATH, **headers: str) -> Answer:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with gateway.session.request(method, gateway.url + path, data=raw, headers=names) as response:
        return await read(response)


def response(answer: Answer) -> dict[str, Any]:
    """Return the response of a streamed or whole answer, without random members."""
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    got = _last(answer) if answer.is_stream else answer.json
    assert got.pop("id").startswith("resp_")
    assert got.pop("created_at") > 0
    ids = [item.pop("id") for item in got["output"]]
    assert len(set(ids)) == len(ids)
    return got


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the data of a stream's events, each of which also has its name."""
    told = []
    for number, event in enumerate(answer.body.removesuffix(b"\n\n").split(b"\n\n")):
        name, data = event.split(b"\n")
        told.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name.removeprefix(b"event: ").decode() == told[-1]["type"]
        assert told[-1]["sequence_number"] == number
    return told


def _last(answer: Answer) -> dict[str, Any]:
    """Return the response of the last event, which must agree with the earlier events."""
    created, going, *told, last = events(answer)
    assert (created["type"], going["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == going["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert last["response"]["status"] == _STATUS[last["type"]]
    assert last["response"]["output"] == _put_together(told)
    changing = ("status", "output", "usage", "incomplete_details", "completed_at")
    unchanged = [
        {name: value for name, value in event["response"].items() if name not in changing} for event in (created, last)
    ]
    assert unchanged[0] == unchanged[1]
    got: dict[str, Any] = last["response"]
    return got


def _put_together(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a stream. Each delta belongs to the open item, and the end of an item repeats them."""
    items: list[dict[str, Any]] = []
    item: dict[str, Any] = {}
    said = ""
    for event in told:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert (item, event["output_index"], event["item"]["status"]) == ({}, len(items), "in_progress")
            item, said = event["item"], ""
            continue
        assert event["output_index"] == len(items)
        if kind == "response.output_item.done":
            whole = event["item"]
            assert (whole["id"], whole["type"]) == (item["id"], item["type"])
            text = whole["content"][0]["text"] if "content" in whole else whole.get("arguments", whole.get("input"))
            if whole["type"] == "tool_search_call":  # its arguments are an object, and come in one piece
                text = said = ""
            assert text == said or (text, said) == ("{}", "")
            items.append(whole)
            item = {}
            continue
        assert event["item_id"] == item["id"]
        if kind in _DELTAS:
            assert event["delta"], "every delta says something"
            said += event["delta"]
        elif kind.removesuffix(".done") + ".delta" in _DELTAS:
            member = _DELTAS[kind.removesuffix(".done") + ".delta"]
            assert event[member] == said or (event[member], said) == ("{}", "")
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
            assert event["part"]["text"] == said
    assert not item
    return items
