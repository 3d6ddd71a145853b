"""OpenAI's clients of the Responses API: what they ask, and how they put together what they get."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.asking import Answer
from tests.dialects import messages
from tests.dialects.validators import check_response_events, named_events

PATH = "/v1/responses"
ask = partial(messages.ask, path=PATH)
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {parameter: {}}}}
    for name, parameter in (("find", "q"), ("show", "at"))
]
THINKING = {"chat_template_kwargs": {"thinking": True}}


def question(text: Any = "What is it?", **fields: Any) -> dict[str, Any]:
    """Return a request of 40 tokens."""
    return {"model": "sim", "max_output_tokens": 40, "input": text, **fields}


def story(**fields: Any) -> dict[str, Any]:
    """Reasoning, text and two tool calls: 137 tokens of simulated engines."""
    return question("What now?", **{"max_output_tokens": 300, **THINKING, "tools": TOOLS, **fields})


def response(answer: Answer) -> dict[str, Any]:
    """Return the response of a streamed or whole answer, without random members."""
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    got = _last(answer) if answer.is_stream else answer.json
    assert got.pop("id").startswith("resp_")
    assert got.pop("created_at") > 0
    ids = [item.pop("id") for item in got["output"]]
    assert len(set(ids)) == len(ids)
    return got


def _last(answer: Answer) -> dict[str, Any]:
    """Return the response of the last event. Its other members are those of the first event."""
    check_response_events(answer)
    (_, created), (_, going), *_, (_, last) = named_events(answer)
    assert created["response"] == going["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    changing = ("status", "output", "usage", "incomplete_details", "completed_at")
    unchanged = [
        {name: value for name, value in event["response"].items() if name not in changing} for event in (created, last)
    ]
    assert unchanged[0] == unchanged[1]
    got: dict[str, Any] = last["response"]
    return got
