"""Strict readers of answers: whatever an engine has sent, a client gets a valid answer or one error of its API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from proxy.wire.python_json import loads
from tests.asking import Answer

_MESSAGE_DELTAS: Final = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
_STOP_REASONS: Final = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"}
_LAST_RESPONSES: Final = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
_RESPONSE_ITEMS: Final = {
    "message": "content",
    "reasoning": "content",
    "function_call": "arguments",
    "custom_tool_call": "input",
    "tool_search_call": "arguments",
}
_TRANSLATED: Final = {"/v1/messages", "/v1/responses"}
_CONTENT_EVENTS: Final = {"response.content_part.added", "response.content_part.done"}


def check(path: str, answer: Answer, *, streams: bool, refusals: Collection[bytes] = ()) -> None:
    """Assert that an answer is valid for its route.

    `refusals`: bodies of engines' errors, which may reach clients of the engines' own APIs.
    """
    if answer.status != 200:
        assert answer.is_whole
        assert answer.status >= 400
        if path in _TRANSLATED or answer.body not in refusals:
            check_error(path, loads(answer.body))
    elif streams:
        assert answer.is_stream
        _STREAMS[path](answer)
    else:
        assert answer.is_whole
        _WHOLES[path](loads(answer.body))


def check_error(path: str, told: Any) -> None:
    """Assert that a body is an error of the API."""
    if path == "/v1/messages":
        assert told["type"] == "error"
        assert told["error"]["type"]
    assert isinstance(told["error"]["message"], str)
    assert told["error"]["message"]


# Messages


def check_message(told: Any) -> None:
    """Assert that a body is a message."""
    assert told["type"] == "message"
    assert told["role"] == "assistant"
    assert told["id"].startswith("msg_")
    assert told["content"]
    for block in told["content"]:
        check_block(block)
    _check_stop(told, any(block["type"] == "tool_use" for block in told["content"]))
    _check_counts(told["usage"], "input_tokens", "output_tokens", "cache_read_input_tokens")


def check_block(block: Any) -> None:
    """Assert that a content block is complete."""
    match block["type"]:
        case "text":
            assert isinstance(block["text"], str)
        case "thinking":
            assert block["thinking"]
            assert block["signature"]
        case kind:
            assert kind == "tool_use"
            assert block["id"]
            assert block["name"]
            assert isinstance(block["input"], dict)


def check_message_events(answer: Answer) -> None:
    """Assert that a stream has the events of one message in their order, or an error in place of its end."""
    told = named_events(answer)
    if told[0][0] == "error":
        _check_cut(answer, told, "/v1/messages")
        return
    name, start = told[0]
    assert name == "message_start"
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    kinds: list[str] = []
    is_open = False
    for at, (name, event) in enumerate(told[1:], 1):
        match name:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(kinds)
                block = event["content_block"]
                kinds.append(block["type"])
                if block["type"] == "tool_use":
                    assert block["id"]
                    assert block["name"]
                    assert block["input"] == {}
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(kinds) - 1
                delta = event["delta"]
                assert isinstance(delta[_MESSAGE_DELTAS[kinds[-1]][delta["type"]]], str)
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(kinds) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                assert kinds
                _check_stop(event["delta"], "tool_use" in kinds)
                _check_counts(event["usage"], "input_tokens", "output_tokens")
                assert [name for name, _ in told[at:]] == ["message_delta", "message_stop"]
                assert answer.is_whole
                return
            case _:
                _check_cut(answer, told[at:], "/v1/messages")
                return
    raise AssertionError("the message has no end")


def _check_stop(told: Any, has_calls: bool) -> None:
    assert told["stop_reason"] in _STOP_REASONS
    assert (told["stop_reason"] == "stop_sequence") == (told["stop_sequence"] is not None)
    assert has_calls or told["stop_reason"] != "tool_use"


# Responses


def check_response(told: Any, status: str | None = None) -> None:
    """Assert that a body is a response, of the status if one is given."""
    assert told["object"] == "response"
    assert told["id"].startswith("resp_")
    assert type(told["created_at"]) is int
    assert told["status"] == (status or told["status"])
    assert told["status"] in _LAST_RESPONSES.values()
    assert (told["status"] == "incomplete") == (told["incomplete_details"] is not None)
    assert len({item["id"] for item in told["output"]}) == len(told["output"])
    for item in told["output"]:
        assert item["status"] in ("completed", "incomplete")
        assert item[_RESPONSE_ITEMS[item["type"]]]
        if item["type"] == "function_call":
            assert item["call_id"]
            assert item["name"]
    if told["usage"] is not None:
        _check_counts(told["usage"], "input_tokens", "output_tokens", "total_tokens")


def check_response_events(answer: Answer) -> None:
    """Assert that a stream has the events of one response in their order, each with its number."""
    told = named_events(answer)
    for number, (name, event) in enumerate(told):
        assert event["type"] == name
        assert event["sequence_number"] == number
    *begun, (last, ending) = told
    if last == "response.failed":
        assert not answer.is_whole
        assert ending["response"]["error"]["message"]
    else:
        assert answer.is_whole
        check_response(ending["response"], _LAST_RESPONSES[last])
    if begun or last != "response.failed":
        assert [name for name, _ in begun[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    said = ""
    for name, event in begun[2:]:
        if name == "response.output_item.added":
            assert item is None
            assert event["output_index"] == len(items)
            item, said = event["item"], ""
            continue
        assert item is not None
        assert event["output_index"] == len(items)
        if name == "response.output_item.done":
            done = event["item"]
            assert (done["id"], done["type"]) == (item["id"], item["type"])
            text = done["content"][0]["text"] if "content" in done else done.get("arguments", done.get("input"))
            # The arguments of a search are an object, and come in one piece.
            assert done["type"] == "tool_search_call" or text == said or (text, said) == ("{}", "")
            items.append(done)
            item = None
            continue
        assert event["item_id"] == item["id"]
        if name.endswith(".delta"):
            assert event["delta"]
            said += event["delta"]
        elif name in _CONTENT_EVENTS:
            assert event["part"]["text"] == said
        else:
            assert name.endswith(".done")
            whole = event.get("text", event.get("arguments", event.get("input")))
            assert whole == said or (whole, said) == ("{}", "")
    assert item is None or last == "response.failed"
    assert ending["response"]["output"] == items


# Chats


def check_chat(told: Any) -> None:
    """Assert that a body is an object with choices: the engine's own bytes are not judged."""
    assert isinstance(told, dict)
    assert told["choices"]


def check_chat_events(answer: Answer) -> None:
    """Assert that a stream ends with `[DONE]`, or with one error event. The engine's own events are not judged."""
    told = [event for event in answer.body.replace(b"\r\n", b"\n").split(b"\n\n") if event.startswith(b"data: ")]
    if answer.is_whole:
        assert told[-1] == b"data: [DONE]"
        assert told.count(b"data: [DONE]") == 1
    else:
        assert b"data: [DONE]" not in told
        # The words of an engine that speaks the same API are not judged.
        assert loads(told.pop().removeprefix(b"data: "))["error"]
    assert not [event for event in told if event.startswith(b'data: {"error":') and loads(event[6:])["error"]]


# SGLang's /generate


def check_native(told: Any) -> None:
    """Assert that a body is an answer, or a list of answers."""
    answers = told if isinstance(told, list) else [told]
    assert answers
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]


# Parts of both validators


def named_events(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream, whose framing is checked."""
    assert answer.body.endswith(b"\n\n")
    told = []
    for event in answer.body.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = event.split(b"\n")
        assert name.startswith(b"event: ")
        assert data.startswith(b"data: ")
        told.append((name.removeprefix(b"event: ").decode(), loads(data.removeprefix(b"data: "))))
        assert told[-1][0] == told[-1][1]["type"]
    assert told
    return told


def _check_cut(answer: Answer, rest: list[tuple[str, dict[str, Any]]], path: str) -> None:
    ((name, error),) = rest
    assert name == "error"
    assert not answer.is_whole
    check_error(path, error)


def _check_counts(usage: Any, *names: str) -> None:
    for name in names:
        assert type(usage[name]) is int
        assert usage[name] >= 0


_WHOLES: Final[Mapping[str, Callable[[Any], None]]] = {
    "/v1/messages": check_message,
    "/v1/responses": check_response,
    "/v1/chat/completions": check_chat,
    "/v1/completions": check_chat,
    "/generate": check_native,
}
_STREAMS: Final[Mapping[str, Callable[[Answer], None]]] = {
    "/v1/messages": check_message_events,
    "/v1/responses": check_response_events,
    "/v1/chat/completions": check_chat_events,
    "/v1/completions": check_chat_events,
    "/generate": check_chat_events,
}
