"""A body of Anthropic's Messages API, field by field as the chat that engines are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.messages.request import chat_of
from proxy.errors import BadRequest

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}], **fields})


def messages(*turns: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    told = [{"role": role, "content": content} for role, content in turns]
    return chat(messages=told, **fields)["messages"]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "functions.find:0", "content": content, **more}


def returned(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "functions.find:0", "content": content}


@pytest.mark.parametrize(
    ("system", "first"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be "), text("brief.", cache_control={"type": "ephemeral"})], "Be brief."),
        ([text("x-anthropic-billing-header: cc_version=2; cch=1f;"), text("Be brief.")], "Be brief."),
    ],
)
def test_system_is_the_first_message(system: Any, first: str) -> None:
    assert messages(("user", "Hi"), system=system) == [{"role": "system", "content": first}, user("Hi")]


@pytest.mark.parametrize("system", [None, "", [], [text("x-anthropic-billing-header: cch=1f;")]])
def test_no_system_is_no_message(system: Any) -> None:
    assert messages(("user", "Hi"), system=system) == [user("Hi")]


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ("Hi", [user("Hi")]),
        ([text("Hi", cache_control={"type": "ephemeral"})], [user("Hi")]),
        ([text("Hi"), text("there")], [user([text("Hi"), text("there")])]),
        ([text("Hi"), text("")], [user("Hi")]),
        ([PICTURE, text("")], [user([PART])]),
        ([PICTURE, text("What?")], [user([PART, text("What?")])]),
        (
            [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}],
            [user([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}])],
        ),
        ([result("42")], [returned("42")]),
        ([result(None, is_error=False)], [returned("")]),
        ([result([text("a"), text("b")])], [returned("a\nb")]),
        ([text("And now?"), result("42")], [returned("42"), user("And now?")]),
        ([result([text("see"), PICTURE]), text("And now?")], [returned("see"), user([PART, text("And now?")])]),
        (
            [result([{"type": "tool_reference", "tool_name": "show"}])],
            [returned([{"type": "tool_reference", "name": "show"}])],
        ),
    ],
)
def test_a_users_turn(blocks: Any, told: list[dict[str, Any]]) -> None:
    assert messages(("user", blocks)) == told


def test_results_come_before_all_else_that_the_user_says() -> None:
    """Also before the images of other results: templates want them behind the calls."""
    blocks = [result([PICTURE]), {**result("7"), "tool_use_id": "functions.show:1"}]
    tool = {**returned("7"), "tool_call_id": "functions.show:1"}
    assert messages(("user", blocks)) == [returned(""), tool, user([PART])]


def test_an_assistants_turn() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Well. ", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("Let me see."),
        {"type": "tool_use", "id": "functions.find:0", "name": "find", "input": {"q": "é"}},
        {"type": "tool_use", "id": "functions.show:1", "name": "show", "input": {}},
    ]
    function = {"name": "find", "arguments": '{"q":"é"}'}
    assert messages(("user", "Hi"), ("assistant", blocks), ("user", [result("42")]))[1] == {
        "role": "assistant",
        "reasoning": "Well. ",
        "reasoning_content": "Well. ",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "functions.find:0", "type": "function", "function": function},
            {"id": "functions.show:1", "type": "function", "function": {"name": "show", "arguments": "{}"}},
        ],
    }


def test_what_claude_code_says_in_between_stays_there() -> None:
    turns = [("user", "Hi"), ("system", "Remember."), ("ctx", "There"), ("system", [text("Now.")]), ("msg", "?")]
    roles = [(message["role"], message["content"]) for message in messages(*turns)]
    expected = [("user", "Hi"), ("system", "Remember."), ("user", "There"), ("system", "Now."), ("user", "?")]
    assert roles == expected


@pytest.mark.parametrize("content", ["x-anthropic-billing-header: cch=1f;", "", []])
def test_a_reminder_of_nothing_is_none(content: Any) -> None:
    assert messages(("user", "Hi"), ("system", content)) == [user("Hi")]


def test_an_answer_that_the_client_has_begun_goes_on() -> None:
    begun = chat(messages=[user("Hi"), {"role": "assistant", "content": "{"}])
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {"max_tokens": 8, "max_completion_tokens": 8}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"metadata": {"user_id": "me"}}, {"user": "me"}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            {"chat_template_kwargs": {"thinking": False, "enable_thinking": True}},
        ),
        (
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "reasoning_effort": "high",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
                },
            },
        ),
        ({"tool_choice": {"type": "any"}}, {}),
        ({"service_tier": "auto", "container": None, "context_management": {}, "mcp_servers": []}, {}),
    ],
)
def test_how_it_is_to_be_answered(given: dict[str, Any], told: dict[str, Any]) -> None:
    always = {"model": "m", "messages": [user("Hi")], "max_tokens": 8, "max_completion_tokens": 8}
    assert chat(**given) == {**always, **told}


def tool(**fields: Any) -> dict[str, Any]:
    return {"name": "find", "input_schema": {"type": "object"}, **fields}


@pytest.mark.parametrize(
    ("given", "function"),
    [
        (tool(), {}),
        (tool(type="custom", cache_control={"type": "ephemeral"}, eager_input_streaming=True), {}),
        (tool(description="Finds."), {"description": "Finds."}),
        (tool(strict=True, defer_loading=False), {"strict": True, "defer_loading": False}),
        (tool(input_schema={"properties": {}}), {"parameters": {"properties": {}, "type": "object"}}),
    ],
)
def test_a_tool(given: dict[str, Any], function: dict[str, Any]) -> None:
    told = chat(tools=[given])
    expected = {"name": "find", "parameters": {"type": "object"}, **function}
    assert told["tools"] == [{"type": "function", "function": expected}]
    assert told["tool_choice"] == "auto"


def change(kind: str, told: Any) -> tuple[str, Any]:
    return "system", [{"type": kind, "tool": told}]


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


SHOW = {"type": "tool_definition", "definition": {"name": "show", "input_schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([change("tool_removal", reference("find"))], []),
        ([change("tool_addition", SHOW)], ["find", "show"]),
        ([change("tool_addition", SHOW), change("tool_removal", reference("find"))], ["show"]),
        ([change("tool_removal", reference("find")), change("tool_addition", reference("find"))], ["find"]),
    ],
)
def test_the_tools_are_those_there_are_in_the_end(changes: list[tuple[str, Any]], left: list[str]) -> None:
    turns = [("user", "Hi"), *changes, ("system", "Remember.")]
    asked = chat(messages=[{"role": role, "content": content} for role, content in turns], tools=[tool()])
    assert [each["function"]["name"] for each in asked.get("tools", ())] == left
    assert ("tool_choice" in asked) is bool(left)
    assert asked["messages"] == [user("Hi"), {"role": "system", "content": "Remember."}]


def test_a_tool_that_is_added_by_its_name_is_not_to_be_loaded_later() -> None:
    turns = [user("Hi"), {"role": "system", "content": change("tool_addition", reference("find"))[1]}]
    asked = chat(messages=turns, tools=[tool(defer_loading=True)])
    assert "defer_loading" not in asked["tools"][0]["function"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "find"}, {"tool_choice": {"type": "function", "function": {"name": "find"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_how_tools_may_be_used(choice: dict[str, Any], told: dict[str, Any]) -> None:
    asked = chat(tools=[tool()], tool_choice=choice)
    assert {name: asked[name] for name in ("tool_choice", "parallel_tool_calls") if name in asked} == told


DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "positive whole number"),
        ({"max_tokens": 0}, "max_tokens", "positive whole number"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": ["Hi"]}, "messages", "objects"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
        ({"messages": [user(7)]}, "messages", "text or a list"),
        ({"messages": [user([DOCUMENT])]}, "messages", "documents are not served here; send their text"),
        ({"messages": [user([result([DOCUMENT])])]}, "messages", "documents are not served here"),
        ({"messages": [user([{"type": "search_result"}])]}, "messages", "search_result"),
        ({"messages": [user([{"type": "text"}])]}, "messages", "must have text"),
        ({"messages": [user([{**PICTURE, "source": {"type": "file", "file_id": "x"}}])]}, "messages", "not from files"),
        ({"messages": [user([{"type": "tool_addition", "tool": SHOW}])]}, "messages", "tool_addition are not served"),
        (
            {"messages": [{"role": "system", "content": change("tool_removal", reference("show"))[1]}]},
            "messages",
            "tool_removal must have a tool that is declared",
        ),
        ({"messages": [{"role": "system", "content": change("tool_removal", SHOW)[1]}]}, "messages", "declared"),
        ({"system": 7}, "system", "text"),
        ({"system": [PICTURE]}, "system", "text blocks only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "not served"),
        ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice", "with its name"),
        ({"thinking": {"type": "deep"}}, "thinking", "adaptive"),
        ({"thinking": "deep"}, "thinking", "an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "json_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not served here"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        chat(**fields)
    assert refused.value.param == param
