"""Any body becomes a chat or is rejected with a message."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.common.errors import BadRequest
from proxy.dialects.base import Dialect
from proxy.dialects.call import Call
from proxy.dialects.messages import Messages
from proxy.dialects.requests import parse_body
from proxy.dialects.responses import Responses
from proxy.settings import Cost

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.sampled_from(["", "a", "text", "function", "tool_search"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {
    "type": "document",
    "title": "a",
    "context": "b",
    "source": {"type": "content", "content": [{"type": "text", "text": "a"}, IMAGE]},
}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
SCHEMA = {"type": "object", "properties": {}}
ADDED = {"name": "y", "input_schema": SCHEMA}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 8,
    "stream": True,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, DOCUMENT, PDF]},
        {"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "z"}}]},
        {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": ADDED}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "a", "title": "b"}]},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "a"}]},
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "tool_use", "id": "a", "name": "b", "input": {"c": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}, IMAGE, PDF]},
                {"type": "search_result", "title": "a", "source": "b", "content": [{"type": "text", "text": "a"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "tool_reference", "tool_name": "c"}]},
            ],
        },
    ],
    "tools": [
        {"name": "b", "description": "c", "input_schema": SCHEMA},
        {"name": "z", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "mcp_servers": [{"type": "url", "url": "a", "name": "b"}],
    "tool_choice": {"type": "tool", "name": "b", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "a"},
    "chat_template_kwargs": {"a": 1},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "instructions": "a",
    "max_output_tokens": 8,
    "include": ["reasoning.encrypted_content"],
    "input": [
        {"type": "message", "role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "b"}]},
        {
            "type": "reasoning",
            "summary": [{"text": "a"}],
            "content": [{"text": "a"}],
            "encrypted_content": "pdproxy:YQ==",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}", "namespace": "c"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "b", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "c"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "e"}, {"type": "mcp"}]},
        {"type": "tool_search_call", "call_id": "d", "execution": "client", "arguments": {"query": "a"}},
        {
            "type": "tool_search_output",
            "call_id": "d",
            "execution": "client",
            "tools": [{"type": "custom", "name": "f"}],
        },
        {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["a"]}},
        {"type": "local_shell_call_output", "call_id": "e", "output": "a"},
        {"type": "computer_call_output", "call_id": "e", "output": {"type": "computer_screenshot", "image_url": "a"}},
        {"type": "web_search_call", "id": "f", "action": {"query": "a"}},
        {"type": "compaction", "encrypted_content": "a"},
        {
            "role": "user",
            "content": [
                {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="},
                {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            ],
        },
    ],
    "tools": [
        {"type": "function", "name": "a", "parameters": SCHEMA},
        {"type": "custom", "name": "b", "format": {"type": "grammar", "syntax": "lark", "definition": "c"}},
        {"type": "namespace", "name": "c", "tools": [{"type": "function", "name": "d"}]},
        {"type": "tool_search", "execution": "client", "parameters": SCHEMA},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield all values inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in inside for place in ((*path, key), *places(inner, (*path, key)))]


def spoilt(body: dict[str, Any], changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for (*outer, last), value in changes:
        inner: Any = body
        try:
            for key in outer:
                inner = inner[key]
            inner[last] = value
        except (TypeError, LookupError):  # an earlier change took it away
            continue
    return body


@settings(max_examples=150)
@pytest.mark.parametrize(
    ("dialect", "body"), [(Messages(), MESSAGE), (Responses(), RESPONSE)], ids=["messages", "responses"]
)
@given(data=st.data())
def test_body_with_anything_in_it_is_a_chat_or_refused(
    dialect: Dialect, body: dict[str, Any], data: st.DataObject
) -> None:
    place = st.sampled_from(places(body))
    changes = data.draw(st.lists(st.tuples(place, JSON), max_size=3))
    raw = orjson.dumps(spoilt(body, changes), option=orjson.OPT_NON_STR_KEYS)
    try:
        call = dialect.parse_request(parse_body(raw), Cost(), {})
    except BadRequest as refused:
        assert refused.message  # noqa: PT017 either way is right
    else:
        assert isinstance(call, Call)
        assert isinstance(call.values["messages"], list)
        dialect.make_rendering(call, dialect.split_into_units(call, Cost(), 8))
