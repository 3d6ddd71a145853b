"""A body of the Responses API, field by field as the chat that engines are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.responses.items import sealed
from proxy.dialects.responses.request import chat_of
from proxy.errors import BadRequest


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of({"model": "m", "input": "Hi", **fields})


def messages(given: Any, **fields: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = chat(input=given, **fields)["messages"]
    return told


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def call(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc", "call_id": f"c{number}", "name": "find", "arguments": "{}", **fields}


def called(number: int = 0, name: str = "find", arguments: str = "{}") -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def output(content: Any, number: int = 0) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": content}


def returned(content: Any, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content, **fields}


def assistant(content: str | None = None, thoughts: str | None = None, calls: Any = None) -> dict[str, Any]:
    told = {"reasoning": thoughts, "reasoning_content": thoughts, "content": content, "tool_calls": calls}
    return {"role": "assistant", **{name: value for name, value in told.items() if value is not None}}


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("Hi", [user("Hi")]),
        ([{"role": "user", "content": "Hi"}], [user("Hi")]),
        ([said("user", "Hi")], [user("Hi")]),
        (
            [said("user", "Hi", "there")],
            [user([{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}])],
        ),
        ([{"role": "user", "content": [IMAGE]}], [user([PART])]),
        ([said("assistant", "a", "b"), said("user", "c")], [assistant("ab"), user("c")]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, said("user", "c")],
            [assistant("No."), user("c")],
        ),
        (
            [
                said("user", "Hi"),
                reasoning("Well."),
                said("assistant", "So"),
                call(0),
                call(1),
                output("x", 0),
                output("y", 1),
            ],
            [user("Hi"), assistant("So", "Well.", [called(0), called(1)]), returned("x", 0), returned("y", 1)],
        ),
        (
            [call(0), output("x", 0), reasoning("Hm."), call(1), output("y", 1)],
            [assistant(calls=[called(0)]), returned("x"), assistant(None, "Hm.", [called(1)]), returned("y", 1)],
        ),
        ([said("assistant", "a"), reasoning("b"), said("assistant", "c")], [assistant("a"), assistant("c", "b")]),
        ([call(0), said("assistant", "a")], [assistant(calls=[called(0)]), assistant("a")]),
        (
            [call(0), call(1), output("x"), output("y", 1)],
            [assistant(calls=[called(0), called(1)]), returned("x"), returned("y", 1)],
        ),
        (
            [output([{"type": "input_text", "text": "x"}, IMAGE]), output("y", 1)],
            [returned("x"), returned("y", 1), user([PART])],
        ),
        ([output([IMAGE]), said("user", "What?")], [returned(""), user([PART]), user("What?")]),
        (
            [
                {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": 'a"b'},
                {"type": "custom_tool_call_output", "call_id": "c0", "output": "x"},
            ],
            [assistant(calls=[called(0, "patch", '{"input":"a\\"b"}')]), returned("x")],
        ),
        (
            [reasoning("", summary=[{"type": "summary_text", "text": "s"}], content=[]), call()],
            [assistant(None, "s", [called()])],
        ),
        ([reasoning("", content=None, encrypted_content=sealed("é")), call()], [assistant(None, "é", [called()])]),
        ([reasoning("", content=None, encrypted_content="gAAAA"), call()], [assistant(None, None, [called()])]),
        ([reasoning("", content=None, encrypted_content="pdproxy:%%"), call()], [assistant(None, None, [called()])]),
    ],
)
def test_items_are_messages(given: Any, told: list[dict[str, Any]]) -> None:
    assert messages(given) == told


def test_what_is_said_first_for_the_system_is_one_message() -> None:
    """Many templates want it there, and only there."""
    given = [said("developer", "a"), said("system", "b"), said("user", "c"), said("developer", "d")]
    expected = [{"role": "system", "content": "x\n\na\n\nb"}, user("c"), {"role": "system", "content": "d"}]
    assert messages(given, instructions="x") == expected


TOOL = {"type": "function", "name": "find", "parameters": {"type": "object"}, "description": "Finds.", "strict": False}
FUNCTION = {name: value for name, value in TOOL.items() if name != "type"}
TOLD = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}),
        ({"max_output_tokens": 8}, {"max_tokens": 8, "max_completion_tokens": 8}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": False, "stream_options": {"include_obfuscation": False}}, {"stream": False}),
        ({"prompt_cache_key": "a", "user": "b"}, {"prompt_cache_key": "a", "user": "b"}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": None, "text": {"verbosity": "low"}, "truncation": "auto", "store": True}, {}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"tools": [TOOL]}, TOLD),
        ({"tools": [TOOL], "tool_choice": "required"}, {**TOLD, "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "find"}},
            {**TOLD, "tool_choice": {"type": "function", "function": {"name": "find"}}},
        ),
        (
            {
                "tools": [TOOL, {**TOOL, "name": "show"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "find"}],
                },
            },
            {**TOLD, "tool_choice": "required"},
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {**TOLD, "parallel_tool_calls": False}),
        ({"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "service_tier": "auto"}, {}),
    ],
)
def test_how_it_is_to_be_answered(given: dict[str, Any], told: dict[str, Any]) -> None:
    assert chat(**given) == {"model": "m", "messages": [user("Hi")], **told}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    [tool] = chat(tools=[{"type": "custom", "name": "patch", "description": "Edits.", "format": form}])["tools"]
    function = tool["function"]
    assert function["name"] == "patch"
    assert function["description"] == "Edits.\n\nThe input must follow this lark grammar:\nstart: /.+/"
    assert list(function["parameters"]["properties"]) == function["parameters"]["required"] == ["input"]


def test_tools_of_a_namespace_have_its_name() -> None:
    given = [{"type": "namespace", "name": "agents", "description": "Agents.", "tools": [TOOL]}]
    choice = {"type": "function", "name": "find", "namespace": "agents"}
    asked = chat(tools=given, tool_choice=choice, input=[call(namespace="agents"), output("x")])
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["agents__find"]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "agents__find"}}
    assert asked["messages"] == [assistant(calls=[called(name="agents__find")]), returned("x")]


@pytest.mark.parametrize("status", ["in_progress", "incomplete", "completed", None])
def test_an_answer_that_is_not_complete_is_gone_on_with(status: str | None) -> None:
    """As vLLM does (`should_continue_final_message`)."""
    last = {"role": "assistant", "content": [{"type": "output_text", "text": "The quick"}], "status": status}
    asked = chat(input=[user("Say it."), last])
    goes_on = status in ("in_progress", "incomplete")
    assert asked["messages"][-1]["content"] == "The quick"
    assert asked.get("continue_final_message", False) is goes_on
    assert asked.get("add_generation_prompt", True) is not goes_on


def test_nothing_else_that_is_not_complete_is() -> None:
    empty = {"role": "assistant", "content": "", "status": "incomplete"}
    for last in (empty, {**user("Say it."), "status": "incomplete"}, {**call(), "status": "incomplete"}):
        assert "continue_final_message" not in chat(input=[user("Hi"), last])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "text or a list"),
        ({"input": []}, "input", "not be empty"),
        ({"input": ["Hi"]}, "input", "text or a list"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "role"),
        ({"input": [user(7)]}, "input", "text or a list"),
        ({"input": [user([{"type": "input_file", "file_id": "f"}])]}, "input", "parts of type input_file"),
        ({"input": [user([{"type": "input_image", "file_id": "f"}])]}, "input", "not from files"),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input", "items of type web_search_call"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "call_id"),
        ({"input": [call(arguments={"a": 1})]}, "input", "text"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input", "images are for users"),
        ({"instructions": 7}, "instructions", "text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "positive whole number"),
        ({"tools": "all"}, "tools", "list of objects"),
        ({"tools": [{"type": "function"}]}, "tools", "a name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "the tools of a namespace"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools", "tools of type mcp"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "tools of type mcp are not served here"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
        ({"text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"text": "json"}, "text", "object"),
        ({"include": ["message.output_text.logprobs"]}, "top_logprobs", "log probabilities"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        chat(**fields)
    assert refused.value.param == param
