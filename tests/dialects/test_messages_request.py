"""A body of Anthropic's Messages API, field by field as the chat that engines are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import OmittedParts
from proxy.dialects.messages_request import translate_to_chat

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_and_left_out(**fields)[0]


def chat_and_left_out(**fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    left_out = OmittedParts()
    told = translate_to_chat({"model": "m", "max_tokens": 8, "messages": [user("Hi")], **fields}, left_out)
    return told, left_out.listed_kinds


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
def test_users_turn(blocks: Any, told: list[dict[str, Any]]) -> None:
    assert messages(("user", blocks)) == told


def test_results_come_before_all_else_that_the_user_says() -> None:
    """Also before the images of other results: templates want them behind the calls."""
    blocks = [result([PICTURE]), {**result("7"), "tool_use_id": "functions.show:1"}]
    tool = {**returned("7"), "tool_call_id": "functions.show:1"}
    assert messages(("user", blocks)) == [returned(""), tool, user([PART])]


def test_assistants_turn() -> None:
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


def test_system_messages_of_claude_code_keep_their_position() -> None:
    turns = [("user", "Hi"), ("system", "Remember."), ("ctx", "There"), ("system", [text("Now.")]), ("msg", "?")]
    roles = [(message["role"], message["content"]) for message in messages(*turns)]
    expected = [("user", "Hi"), ("system", "Remember."), ("user", "There"), ("system", "Now."), ("user", "?")]
    assert roles == expected


@pytest.mark.parametrize("content", ["x-anthropic-billing-header: cch=1f;", "", []])
def test_empty_system_message_is_dropped(content: Any) -> None:
    assert messages(("user", "Hi"), ("system", content)) == [user("Hi")]


def test_answer_that_the_client_has_begun_goes_on() -> None:
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
def test_output_options_are_translated(given: dict[str, Any], told: dict[str, Any]) -> None:
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
def test_tool_becomes_a_function(given: dict[str, Any], function: dict[str, Any]) -> None:
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
def test_tools_are_those_there_are_in_the_end(changes: list[tuple[str, Any]], left: list[str]) -> None:
    turns = [("user", "Hi"), *changes, ("system", "Remember.")]
    asked = chat(messages=[{"role": role, "content": content} for role, content in turns], tools=[tool()])
    assert [each["function"]["name"] for each in asked.get("tools", ())] == left
    assert ("tool_choice" in asked) is bool(left)
    assert asked["messages"] == [user("Hi"), {"role": "system", "content": "Remember."}]


def test_tool_that_is_added_by_its_name_is_not_to_be_loaded_later() -> None:
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
def test_tool_choice_is_translated(choice: dict[str, Any], told: dict[str, Any]) -> None:
    asked = chat(tools=[tool()], tool_choice=choice)
    assert {name: asked[name] for name in ("tool_choice", "parallel_tool_calls") if name in asked} == told


def document(kind: str = "base64", **source: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": kind, **source}}


PDF = document(media_type="application/pdf", data="JVBERi0xLjQK")
PDF_NOTE = "[PDF, 9 bytes: not readable by this model]"
SEARCH = {"type": "web_search_result", "url": "https://a.example", "title": "A", "encrypted_content": "x" * 9}


@pytest.mark.parametrize(
    ("block", "told", "left_out"),
    [
        (PDF, [text(PDF_NOTE)], ("content document",)),
        ({**PDF, "title": "a.pdf", "context": "of 1999"}, [text(f"{PDF_NOTE[:4]} a.pdf{PDF_NOTE[4:]}\nof 1999")], True),
        (
            document("url", url="https://a.example/b.pdf"),
            [text("[PDF https://a.example/b.pdf: not readable by this model]")],
            True,
        ),
        (document("file", file_id="file_1"), [text("[file file_1: not readable by this model]")], True),
        (document(media_type="image/tiff", data="aGk="), [text("[image, 2 bytes: not readable by this model]")], True),
        (document("future"), [text("[file: not readable by this model]")], True),
        (document("text", media_type="text/plain", data="Grass."), [text("Grass.")], ()),
        (document(media_type="text/plain", data="R3Jhc3Mu"), [text("Grass.")], ()),
        ({**document("text", data="Grass."), "title": "T"}, [text("T"), text("Grass.")], ()),
        (document("content", content="Grass."), [text("Grass.")], ()),
        (document("content", content=[text("Grass."), PICTURE]), [text("Grass."), PART], ()),
        ({"type": "search_result", "source": "s", "title": "T", "content": [text("a")]}, [text("T\ns\na")], ()),
        (
            {**PICTURE, "source": {"type": "file", "file_id": "f"}},
            [text("[image f: not readable by this model]")],
            True,
        ),
        (
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "grass"}},
            [text('[server_tool_use] {"name": "web_search", "input": {"query": "grass"}}')],
            (),
        ),
        (
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [SEARCH]},
            [
                text(
                    '[web_search_tool_result] {"content": '
                    '[{"type": "web_search_result", "url": "https://a.example", "title": "A"}]}'
                )
            ],
            (),
        ),
        ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("42"), PICTURE]}, [text("42"), PART], ()),
        ({"type": "mcp_tool_result", "tool_use_id": "m", "content": "42"}, [text("42")], ()),
        ({"type": "container_upload", "file_id": "f"}, [text('[container_upload] {"file_id": "f"}')], ()),
        (
            {"type": "compaction", "encrypted_content": "x"},
            [text("[content compaction: not readable by this model]")],
            ("content compaction",),
        ),
        ({"type": "blob", "bytes": "x" * 600}, [text('[blob] {"bytes": "[600 bytes]"}')], ()),
        ({"type": ["odd"]}, [text("[content of an unknown type: not readable by this model]")], True),
        ({"type": "redacted_thinking", "data": "x"}, [], ()),
    ],
)
@pytest.mark.parametrize("where", ["user", "tool_result", "assistant", "system"])
def test_unservable_block_becomes_text(block: Any, told: Any, left_out: Any, where: str) -> None:
    """A client sends its history again with each turn, and cannot take the block out."""
    beside, words = text("See:"), [text("See:"), *told]
    only_text = [each["text"] if each["type"] == "text" else "[image: not readable by this model]" for each in words]
    images = [each for each in words if each["type"] != "text"]
    if where == "system":
        asked, kinds = chat_and_left_out(system=[beside, block])
        assert asked["messages"][0]["content"] == "See:" + "\n".join(only_text[1:])
    elif where == "tool_result":
        asked, kinds = chat_and_left_out(messages=[user([result([beside, block])])])
        expected = [returned("\n".join(each["text"] for each in words if each["type"] == "text"))]
        assert asked["messages"] == expected + ([user(images)] if images else [])
    else:
        asked, kinds = chat_and_left_out(messages=[{"role": where, "content": [beside, block]}])
        assert asked["messages"][0]["content"] == (words if len(words) > 1 else "See:")
    if left_out is True:
        assert kinds
    else:
        assert kinds == left_out


def test_blocks_within_blocks_end_somewhere() -> None:
    block: dict[str, Any] = text("x")
    for _ in range(300):
        block = document("content", content=[block])
    assert messages(("user", [block])) == [user("[content: not readable by this model]")]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "future_20990101"},
    ],
)
def test_tool_that_anthropic_defines_is_left_out(given: dict[str, Any]) -> None:
    asked, left_out = chat_and_left_out(tools=[tool(), given])
    assert [each["function"]["name"] for each in asked["tools"]] == ["find"]
    assert left_out == (f"tool {given['type']}",)
    assert "tools" not in chat(tools=[given])
    with pytest.raises(BadRequest, match=f"demands a tool of type {given['type']}, which no engine here can serve"):
        chat(tools=[given], tool_choice={"type": "any"})
    if "name" in given:
        with pytest.raises(BadRequest, match=f"demands a tool of type {given['type']}"):
            chat(tools=[tool(), given], tool_choice={"type": "tool", "name": given["name"]})


def test_tool_of_an_unknown_type_with_a_schema_is_a_function() -> None:
    assert chat(tools=[tool(type="future_20990101")]) == chat(tools=[tool()])


def test_servers_of_tools_are_left_out() -> None:
    asked, left_out = chat_and_left_out(mcp_servers=[{"type": "url", "url": "https://a.example", "name": "s"}])
    assert (asked, left_out) == (chat(), ("tool mcp_servers",))
    with pytest.raises(BadRequest, match="demands a tool of type mcp_servers"):
        chat(mcp_servers=[{"url": "https://a.example"}], tool_choice={"type": "any"})


@pytest.mark.parametrize("kind", ["tool_addition", "tool_removal"])
def test_change_of_a_tool_that_is_not_declared_is_left_out(kind: str) -> None:
    turns = [user("Hi"), {"role": "system", "content": change(kind, reference("show"))[1]}]
    asked, left_out = chat_and_left_out(messages=turns, tools=[tool()])
    assert ([each["function"]["name"] for each in asked["tools"]], left_out) == (["find"], (f"content {kind}",))


@pytest.mark.parametrize("limit", [1000, 1000.0, "1000"])
def test_limit_may_be_spelled_as_in_chats(limit: Any) -> None:
    asked = chat(max_tokens=limit)
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1000, 1000)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "positive whole number"),
        ({"max_tokens": 0}, "max_tokens", "positive whole number"),
        ({"max_tokens": 1.5}, "max_tokens", "positive whole number"),
        ({"max_tokens": "many"}, "max_tokens", "positive whole number"),
        ({"stop_sequences": 7}, "stop_sequences", "list of texts"),
        ({"stop_sequences": [7]}, "stop_sequences", "list of texts"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": ["Hi"]}, "messages", "objects"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
        ({"messages": [user(7)]}, "messages", "text or a list"),
        ({"messages": [user([{"type": "text"}])]}, "messages", "must have text"),
        ({"system": 7}, "system", "text"),
        ({"tools": [{"name": "find"}]}, "tools", "an input_schema"),
        ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools", "a name"),
        ({"tools": [tool()], "tool_choice": {"type": ["auto"]}}, "tool_choice", "must be auto"),
        ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice", "with its name"),
        ({"thinking": {"type": "deep"}}, "thinking", "adaptive"),
        ({"thinking": "deep"}, "thinking", "an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "json_schema"),
        ({"messages": [user([result({"a": 1})])]}, "messages", "list of objects"),
    ],
)
def test_invalid_request_is_rejected_with_a_message(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        chat(**fields)
    assert refused.value.param == param
