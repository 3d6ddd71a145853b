"""A body of the Responses API, field by field as the chat that engines are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import OmittedParts
from proxy.dialects.responses_request import seal_reasoning, translate_to_chat


def chat(**fields: Any) -> dict[str, Any]:
    return chat_and_left_out(**fields)[0]


def chat_and_left_out(**fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    left_out = OmittedParts()
    return translate_to_chat({"model": "m", "input": "Hi", **fields}, left_out), left_out.listed_kinds


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
        (
            [reasoning("", content=None, encrypted_content=seal_reasoning("é")), call()],
            [assistant(None, "é", [called()])],
        ),
        ([reasoning("", content=None, encrypted_content="gAAAA"), call()], [assistant(None, None, [called()])]),
        ([reasoning("", content=None, encrypted_content="pdproxy:%%"), call()], [assistant(None, None, [called()])]),
    ],
)
def test_items_are_messages(given: Any, told: list[dict[str, Any]]) -> None:
    assert messages(given) == told


def test_leading_system_items_become_one_message() -> None:
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
def test_output_options_are_translated(given: dict[str, Any], told: dict[str, Any]) -> None:
    assert chat(**given) == {"model": "m", "messages": [user("Hi")], **told}


def test_custom_tool_is_a_function_of_one_text() -> None:
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
def test_answer_that_is_not_complete_is_gone_on_with(status: str | None) -> None:
    """The engine continues such an answer, too (vLLM `should_continue_final_message`)."""
    last = {"role": "assistant", "content": [{"type": "output_text", "text": "The quick"}], "status": status}
    asked = chat(input=[user("Say it."), last])
    goes_on = status in ("in_progress", "incomplete")
    assert asked["messages"][-1]["content"] == "The quick"
    assert asked.get("continue_final_message", False) is goes_on
    assert asked.get("add_generation_prompt", True) is not goes_on


def test_other_incomplete_items_are_not_continued() -> None:
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
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "call_id"),
        ({"input": [call(arguments={"a": 1})]}, "input", "text"),
        ({"instructions": 7}, "instructions", "text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "positive whole number"),
        ({"include": 7}, "include", "list"),
        ({"tools": [{"type": "custom", "name": "a", "format": 7}]}, "tools", "format of a custom tool"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice", "text or an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": 7}}, "tool_choice", "list of objects"),
        ({"input": [user("Hi"), {"type": "additional_tools", "tools": 7}]}, "input", "list of objects"),
        ({"tools": "all"}, "tools", "list of objects"),
        ({"tools": [{"type": "function"}]}, "tools", "a name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "the tools of a namespace"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
        ({"text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"text": "json"}, "text", "object"),
        ({"include": ["message.output_text.logprobs"]}, "top_logprobs", "log probabilities"),
    ],
)
def test_invalid_request_is_rejected_with_a_message(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        chat(**fields)
    assert refused.value.param == param


def file(**members: Any) -> dict[str, Any]:
    return {"type": "input_file", **members}


@pytest.mark.parametrize(
    ("part", "told", "left_out"),
    [
        (file(file_id="f"), "[file f: not readable by this model]", ("content input_file",)),
        (
            file(filename="a.pdf", file_data="data:application/pdf;base64,JVBERi0xLjQK"),
            "[PDF a.pdf, 9 bytes: not readable by this model]",
            ("content input_file",),
        ),
        (file(filename="a.txt", file_data="data:text/plain;base64,R3Jhc3Mu"), "a.txt\nGrass.", ()),
        ({"type": "input_image", "file_id": "f"}, "[image f: not readable by this model]", ("content input_image",)),
        ({"type": "input_video"}, "[content input_video: not readable by this model]", ("content input_video",)),
        ({"type": "future", "words": "Grass."}, '[future] {"words": "Grass."}', ()),
    ],
)
def test_unservable_part_becomes_text(part: Any, told: str, left_out: tuple[str, ...]) -> None:
    for item, at in ((user([part]), 0), ({"role": "assistant", "content": [part]}, 0), (output([part]), 1)):
        asked, kinds = chat_and_left_out(input=[call(), item] if at else [item])
        assert (asked["messages"][at]["content"], kinds) == (told, left_out)


def test_audio_is_passed_on() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    assert messages([user([part])]) == [user([part])]


def test_images_where_there_can_be_text_only_are_notes() -> None:
    note = "[image: not readable by this model]"
    given = [{"role": "developer", "content": [IMAGE]}, {"role": "assistant", "content": [IMAGE]}]
    assert messages(given) == [{"role": "system", "content": note}, assistant(note)]


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (
            [{"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "grass"}}],
            [assistant('[web_search_call] {"action": {"query": "grass"}}')],
        ),
        (
            [said("assistant", "a"), {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "42"}],
            [assistant('a\n[mcp_call] {"name": "f", "arguments": "{}", "output": "42"}')],
        ),
        (
            [{"type": "image_generation_call", "id": "ig", "result": "a" * 600}],
            [assistant('[image_generation_call] {"result": "[600 bytes]"}')],
        ),
        (
            [{"type": "compaction", "encrypted_content": "gAAA"}],
            [assistant("[item compaction: not readable by this model]")],
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "c0", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "o", "call_id": "c0", "output": "a.txt"},
            ],
            [
                assistant(calls=[called(0, "local_shell", '{"action": {"type": "exec", "command": ["ls"]}}')]),
                returned("a.txt"),
            ],
        ),
        (
            [
                {"type": "computer_call", "call_id": "c0", "action": {"type": "click"}},
                {
                    "type": "computer_call_output",
                    "call_id": "c0",
                    "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="},
                },
            ],
            [
                assistant(calls=[called(0, "computer", '{"action": {"type": "click"}}')]),
                returned(""),
                user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]),
            ],
        ),
        ([{"type": "future", "words": "Grass."}], [assistant('[future] {"words": "Grass."}')]),
        (
            [{"type": "shell_call_output", "call_id": "c9", "output": "x"}],
            [assistant('[shell_call_output] {"output": "x"}')],
        ),
    ],
)
def test_item_of_another_service_is_a_call_or_text(items: Any, told: list[dict[str, Any]]) -> None:
    assert messages([said("user", "Hi"), *items]) == [user("Hi"), *told]


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search", "web_search_preview_2025_03_11", "image_generation", "file_search", "mcp", "computer"),
        *("code_interpreter", "local_shell", "tool_search", "future_kind"),
    ],
)
def test_tool_that_openai_defines_is_left_out(kind: str) -> None:
    asked, left_out = chat_and_left_out(tools=[TOOL, {"type": kind}])
    assert ({name: asked[name] for name in TOLD}, left_out) == (TOLD, (f"tool {kind}",))
    space = {"type": "namespace", "name": "n", "tools": [TOOL, {"type": kind}]}
    assert [each["function"]["name"] for each in chat(tools=[space])["tools"]] == ["n__find"]
    assert chat(tools=[{"type": kind}]) == chat()
    allowed = {"type": "allowed_tools", "tools": [{"type": kind}]}
    if kind != "tool_search":
        assert chat(tools=[TOOL, {"type": kind}], tool_choice={**allowed, "mode": "auto"}) == chat()
        with pytest.raises(BadRequest, match=f"demands a tool of type {kind}"):
            chat(tools=[TOOL, {"type": kind}], tool_choice={**allowed, "mode": "required"})
    with pytest.raises(BadRequest, match=f"demands a tool of type {kind}"):
        chat(tools=[TOOL, {"type": kind}], tool_choice={"type": kind})
    with pytest.raises(BadRequest, match=f"demands a tool of type {kind}"):
        chat(tools=[{"type": kind}], tool_choice="required")


FIND_TOOLS = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
FOUND = {"type": "namespace", "name": "mail", "description": "", "tools": [{**TOOL, "defer_loading": True}]}


def names_of(asked: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in asked["tools"]]


def test_tools_that_an_item_declares_are_tools() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [TOOL, FOUND, {"type": "web_search"}]}
    asked, left_out = chat_and_left_out(input=[item, said("user", "Hi")], tools=[{**TOOL, "description": "Old."}])
    assert (names_of(asked), left_out) == (["find", "mail__find"], ("tool web_search",))
    assert asked["tools"][0]["function"]["description"] == "Finds."
    assert asked["messages"] == [user("Hi")]


@pytest.mark.parametrize("execution", ["client", None])
def test_clients_search_for_tools_is_a_function_and_declares_what_it_found(execution: str | None) -> None:
    search = {"type": "tool_search_call", "call_id": "c0", "execution": "client", "arguments": {"query": "mail"}}
    found = {"type": "tool_search_output", "call_id": "c0", "execution": "client", "tools": [FOUND]}
    asked = chat(
        input=[said("user", "Hi"), search, found],
        tools=[{**FIND_TOOLS, "execution": execution}],
        tool_choice={"type": "tool_search"},
    )
    assert names_of(asked) == ["tool_search", "mail__find"]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "tool_search"}}
    assert asked["messages"] == [
        user("Hi"),
        assistant(calls=[called(0, "tool_search", '{"query": "mail"}')]),
        returned("Tools that can be called now: mail__find"),
    ]


def test_search_for_tools_at_openai_leaves_its_tools() -> None:
    search = {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["mail"]}}
    found = {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [FOUND]}
    asked = chat(input=[said("user", "Hi"), search, found])
    assert names_of(asked) == ["mail__find"]
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant"]
