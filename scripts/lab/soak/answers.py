"""What an answer says, streamed or not, in one form: two answers that say the same to a client are equal."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]"


class Unreadable(Exception):
    """An answer that is none; the text says what is wrong."""


def payloads(body: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's events, without `[DONE]`. Raises Unreadable."""
    events = [event for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event.startswith(b"data: ")]
    if events and events[-1] == DONE:
        events.pop()
    return [_json(event.removeprefix(b"data: ")) for event in events]


def content(body: bytes, *, stream: bool) -> dict[str, Any]:
    """What an answer says: of each choice its reasoning, text, tool calls, token ids and end, and the usage.

    Raises Unreadable.
    """
    parts = payloads(body) if stream else [_json(body)]
    try:
        usages = [part["usage"] for part in parts if part.get("usage") and not (stream and part["choices"])]
        choices = [choice for part in parts for choice in part["choices"]]
        return {
            "choices": {
                index: _choice([choice for choice in choices if choice["index"] == index])
                for index in sorted({choice["index"] for choice in choices})
            },
            "usage": [{name: usage[name] for name in ("prompt_tokens", "completion_tokens")} for usage in usages],
        }
    except (KeyError, TypeError) as error:
        raise Unreadable(f"the answer has not the shape of one: {error!r}") from None


def difference(answer: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with an answer; empty when nothing is. Usage is compared if it was expected and there is any."""
    if answer["usage"] and expected["usage"] and answer["usage"] != expected["usage"]:
        return f"usage is {answer['usage']}, not {expected['usage']}"
    if answer["choices"].keys() != expected["choices"].keys():
        return f"there are choices {sorted(answer['choices'])}, not {sorted(expected['choices'])}"
    for index, choice in expected["choices"].items():
        for name, value in choice.items():
            got = answer["choices"][index][name]
            if got != value:
                return f"{name} of choice {index} is {_shortened(got, value)}"
    return ""


def _shortened(got: Any, value: Any) -> str:
    """Where two values part, without all of what they say."""
    ours, theirs = str(got), str(value)
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    begin = max(0, at - 20)
    return f"…{ours[begin : at + 20]!r} at {at} of {len(ours)}, not …{theirs[begin : at + 20]!r} of {len(theirs)}"


def _choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [part.get("delta") or part.get("message") or {} for part in parts]
    return {
        "reasoning": "".join(message.get("reasoning") or "" for message in messages),
        "text": "".join(message.get("content") or "" for message in messages)
        + "".join(part.get("text") or "" for part in parts),
        "tool_calls": _tool_calls(messages),
        "token_ids": [token for part in parts for token in part.get("token_ids") or ()],
        "finish": [part["finish_reason"] for part in parts if part.get("finish_reason")],
    }


def _tool_calls(messages: list[dict[str, Any]]) -> list[list[str]]:
    """Name and arguments of each."""
    calls: list[list[str]] = []
    for number, part in ((n, part) for message in messages for n, part in enumerate(message.get("tool_calls") or ())):
        function = part.get("function") or {}
        index = part.get("index", number)
        if index == len(calls):
            calls.append([function.get("name") or "", ""])
        calls[index][1] += function.get("arguments") or ""
    return calls


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Unreadable(f"this is no JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"this is no object: {data[:80]!r}")
    return value
