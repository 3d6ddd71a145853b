"""Translates the body of OpenAI's Responses API to a chat completion. Nothing is stored."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import (
    OmittedParts,
    count_base64_bytes,
    describe_omitted_part,
    join_lines,
    kind_name,
    media_name,
    readable_members,
    readable_text,
)
from proxy.dialects.requests import check_object_member, check_objects, read_positive_number
from proxy.wire.chat_members import arguments_as_object, read_object
from proxy.wire.python_json import dumps, encode_utf8, replace_surrogates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set


# Members with the same name in both APIs, and members that the engines themselves add to this API.
_UNCHANGED_MEMBERS: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "parallel_tool_calls", "prompt_cache_key", "user", "seed"),
    *("stop", "chat_template_kwargs", "cache_salt", "vllm_xargs", "kv_transfer_params", "priority", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "thinking_token_budget"),
)
_TOOL_CALL_TYPES: Final = ("function", "custom", "tool_search")
"""The types of tools to which a `tool_choice` can refer by name."""
_STORAGE_MEMBERS: Final = {
    "previous_response_id": "responses are not stored here: send the whole conversation as input, with store false",
    "conversation": "conversations are not stored here: send the whole conversation as input",
    "background": "background responses are not supported: leave this out, and stream",
    "prompt": "prompts are not stored here: send their text as instructions and input",
}


def translate_to_chat(values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
    """Return the body of the equivalent chat. Raises BadRequest.

    Tools, items and content that only OpenAI's own service can serve are added to `left_out`. A request that refers to
    a stored response or conversation is rejected, because without it the model would answer another question.
    """
    for name, words in _STORAGE_MEMBERS.items():
        if values.get(name):
            raise BadRequest(words, param=name)
    if "message.output_text.logprobs" in _read_include(values) or values.get("top_logprobs"):
        raise BadRequest("log probabilities are not supported here: use /v1/chat/completions", param="top_logprobs")
    chat: dict[str, Any] = {name: values[name] for name in _UNCHANGED_MEMBERS if values.get(name) is not None}
    chat["messages"] = translate_input(values.get("instructions"), values.get("input"), left_out)
    if values.get("max_output_tokens") is not None:
        chat["max_tokens"] = chat["max_completion_tokens"] = read_positive_number(values, "max_output_tokens")
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _ends_with_begun_answer(values["input"]) and chat["messages"][-1].get("content"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _chat_tools(values, left_out)
    chat |= _response_format(values)
    chat |= _reasoning_members(values)
    return chat


def _ends_with_begun_answer(given: Any) -> bool:
    """Return whether the last item is an incomplete answer. The model is then to continue it.

    An answer that was cut off counts as incomplete (vLLM `should_continue_final_message`).
    """
    last = given[-1] if isinstance(given, list) and given else {}
    is_answer = last.get("type", "message") == "message" and last.get("role") == "assistant"
    return is_answer and last.get("status") in ("in_progress", "incomplete")


def _read_include(values: Mapping[str, Any]) -> list[Any]:
    include = values.get("include")
    if include is not None and not isinstance(include, list):
        raise BadRequest("include must be a list of texts", param="include")
    return include or []


def _chat_tools(values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
    functions = [tool.make_function() for tool in read_tools(values, left_out)]
    choice = values.get("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        raise BadRequest("tool_choice must be a text or an object", param="tool_choice")
    if isinstance(choice, dict):
        functions, choice = _read_tool_choice(choice, functions)
    if functions:
        return {"tools": functions, "tool_choice": "auto" if choice is None else choice}
    if choice == "required" and values.get("tools"):
        raise _make_not_served_error(next(iter(check_objects(values["tools"], "tools"))).get("type"))
    return {}


def _read_tool_choice(choice: Mapping[str, Any], functions: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """Return the functions that the model may call, and the value of the chat's `tool_choice`."""
    match choice.get("type"):
        case "tool_search" if not any(function["function"]["name"] == SEARCH_TYPE for function in functions):
            raise _make_not_served_error("tool_search")
        case "function" | "custom" | "tool_search":
            return functions, {"type": "function", "function": {"name": _chosen_function(choice)}}
        case "allowed_tools":
            tools = check_objects(choice.get("tools") or [], "tool_choice")
            allowed = {_chosen_function(tool) for tool in tools if tool.get("type") in _TOOL_CALL_TYPES}
            left = [tool for tool in functions if tool["function"]["name"] in allowed]
            mode = choice.get("mode") or "auto"
            if mode == "required" and tools and not left:
                raise _make_not_served_error(tools[0].get("type"))
            return left, mode
        case kind:
            raise _make_not_served_error(kind)


def _chosen_function(choice: Mapping[str, Any]) -> str:
    if choice.get("type") == "tool_search":
        return SEARCH_TYPE
    name = choice.get("name")
    if not isinstance(name, str):
        raise BadRequest("tool_choice must have the name of the tool", param="tool_choice")
    return make_function_name(name, choice.get("namespace"))


def _make_not_served_error(kind: object) -> BadRequest:
    return BadRequest(
        f"tool_choice demands a tool of type {kind_name(kind)}, which no engine here can serve: "
        "use functions or custom tools, which the client runs",
        param="tool_choice",
    )


# Output


def _response_format(values: Mapping[str, Any]) -> dict[str, Any]:
    form = check_object_member(values, "text").get("format")
    match form:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema", "schema": dict(schema)}:
            named = {key: form[key] for key in ("description", "strict") if form.get(key) is not None}
            members = {"name": form.get("name") or "output", "schema": schema, **named}
            return {"response_format": {"type": "json_schema", "json_schema": members}}
    raise BadRequest("text.format must be text, json_object, or json_schema with its schema", param="text")


def _reasoning_members(values: Mapping[str, Any]) -> dict[str, Any]:
    effort = check_object_member(values, "reasoning").get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


_ECHOED_MEMBERS: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "user"),
)
_ECHOED_DEFAULTS: Final[Mapping[str, Any]] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


class RequestForResponse:
    """The members of a request that its response repeats or depends on."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.echoed_members: Mapping[str, Any] = {
            **{
                name: _ECHOED_DEFAULTS.get(name) if values.get(name) is None else values[name]
                for name in _ECHOED_MEMBERS
            },
            "background": False,
            "previous_response_id": None,
            "store": False,
        }
        """The members that the response repeats."""
        self.tools: Mapping[str, ClientTool] = {tool.function_name: tool for tool in read_tools(values, OmittedParts())}
        """The tools, by the names of their functions in the chat."""
        self.wants_sealed_reasoning = "reasoning.encrypted_content" in _read_include(values)
        """Whether the client wants sealed reasoning. Clients send back reasoning only in this form."""

    def tool_kind(self, function: str) -> ToolKind:
        """Return the kind of the client's tool that a function represents; FUNCTION if the tool is unknown."""
        tool = self.tools.get(function)
        return ToolKind.FUNCTION if tool is None else tool.kind


_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_TYPES: Final = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_IMAGE_TYPES: Final = ("input_image", "computer_screenshot")
_CLIENT_CALL_TYPES: Final = ("function_call", "custom_tool_call")
_CLIENT_OUTPUT_TYPES: Final = ("function_call_output", "custom_tool_call_output")
"""Types of items with the results of tools that are functions in the chat."""
_SEAL_PREFIX: Final = "pdproxy:"


def translate_input(instructions: object, input_items: object, left_out: OmittedParts) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises BadRequest.

    The instructions and the first developer and system messages are joined into one message. Items and parts that
    no model can read are added to `left_out`.
    """
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequest("instructions must be text", param="instructions")
    if isinstance(input_items, str):
        input_items = [{"role": "user", "content": input_items}]
    if not isinstance(input_items, list) or not all(isinstance(item, dict) for item in input_items):
        raise BadRequest("input must be text or a list of items", param="input")
    messages = list(_translate_items(input_items, left_out))
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first = [instructions or "", *(_join_content(message["content"]) for message in messages[:count])]
    system = "\n\n".join(filter(None, first))
    opening = [{"role": "system", "content": system}] if system else []
    if not (opening or messages):
        raise BadRequest("input must not be empty", param="input")
    return [*opening, *messages[count:]]


def _translate_items(items: Sequence[Mapping[str, Any]], left_out: OmittedParts) -> Iterator[dict[str, Any]]:
    """Yield the messages. Consecutive reasoning, text and tool calls of the assistant become one message."""
    turn: dict[str, Any] = {}
    images: list[dict[str, Any]] = []
    called: set[str] = set()  # ids of the calls that became calls of the chat
    for item in items:
        kind = _item_kind(item, called)
        if kind == "tools":
            continue
        if images and kind != "output":
            yield {"role": "user", "content": images}
            images = []
        role = _item_role(item) if kind == "message" else "assistant"
        if turn and (kind == "output" or role != "assistant" or _starts_new_message(turn, kind)):
            yield turn
            turn = {}
        match kind:
            case "message" if role == "user":
                yield {"role": role, "content": _message_content(item.get("content"), left_out)}
            case "message" if role == "system":
                yield {"role": role, "content": _join_content(_message_content(item.get("content"), left_out))}
            case "message":
                turn = {"role": "assistant", **turn}
                turn["content"] = turn.get("content", "") + _join_content(
                    _message_content(item.get("content"), left_out)
                )
            case "reasoning":
                thoughts = turn.get("reasoning", "") + _reasoning_text(item)
                turn = {"role": "assistant", **turn}
                if thoughts:
                    turn["reasoning"] = turn["reasoning_content"] = thoughts  # vLLM's name, and SGLang's
            case "call":
                turn = {"role": "assistant", **turn}
                turn.setdefault("tool_calls", []).append(_tool_call(item))
                called.add(item["call_id"])
            case "output":
                yield _tool_result(item, images, left_out)
            case _:
                turn = {"role": "assistant", **turn}
                turn["content"] = join_lines((turn.get("content", ""), _describe_unknown_item(item, left_out)))
    if turn:
        yield turn
    if images:
        yield {"role": "user", "content": images}


def _item_kind(item: Mapping[str, Any], called: Set[str]) -> str:
    """Return how an item is translated: `message`, `reasoning`, `call`, `output`, `tools` or `other`.

    `call` and `output` are a tool call and its result. A call of any tool becomes a function call if it has an id.
    `tools` are items that only declare tools. `other` items become text. Raises BadRequest.
    """
    kind, call_id = str(item.get("type") or "message"), item.get("call_id")
    if kind in ("message", "reasoning"):
        return kind
    if kind == "item_reference":
        raise BadRequest("items are not stored here: send them in full, with store false", param="input")
    is_answer = isinstance(call_id, str) and call_id in called
    if kind == "additional_tools" or (kind == "tool_search_output" and not is_answer):
        return "tools"
    if kind in _CLIENT_CALL_TYPES or (kind.endswith("_call") and isinstance(call_id, str)):
        return "call"
    if kind in _CLIENT_OUTPUT_TYPES or (kind.endswith("_output") and is_answer):
        return "output"
    return "other"


def _starts_new_message(turn: Mapping[str, Any], kind: str) -> bool:
    """Return whether an item starts a new message.

    Within a message, templates write reasoning, then text, then calls.
    """
    if kind == "reasoning":
        return "content" in turn or "tool_calls" in turn
    return kind in ("message", "other") and "tool_calls" in turn


def _item_role(item: Mapping[str, Any]) -> str:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise BadRequest("the role of a message must be user, assistant, system or developer", param="input")
    return role


def _message_content(content: object, left_out: OmittedParts) -> Any:
    """Return the content of a message: a text if there is only text, otherwise a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest("the content of a message must be text or a list of parts", param="input")
    parts = [_message_part(part, left_out) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _message_part(part: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
    """Translate one content part of an item to a part of a chat message. Unreadable parts become a note."""
    kind = str(part.get("type"))
    if kind in _TEXT_TYPES and isinstance(text := part.get(_TEXT_TYPES[kind]), str):
        return {"type": "text", "text": text}
    if kind in _IMAGE_TYPES and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind in _IMAGE_TYPES:
        text, replacement = None, describe_omitted_part("image", name=part.get("file_id"))
    elif kind == "input_file":
        text, replacement = _file_text(part)
    else:
        text, replacement = readable_text(kind, part), describe_omitted_part(f"content {kind_name(kind)}")
    if text is None:
        left_out.add_kind("content", kind)
    return {"type": "text", "text": replacement if text is None else text}


def _file_text(part: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the text of a file (None if it has none), and the note that replaces the file."""
    data = part.get("file_data")
    head, _, encoded = data.partition(",") if isinstance(data, str) else ("", "", "")
    media_type = head.removeprefix("data:").partition(";")[0]
    name = part.get("filename") or part.get("file_url") or part.get("file_id")
    if media_type.startswith("text/"):
        try:
            return join_lines((str(part.get("filename") or ""), b64decode(encoded, validate=True).decode())), ""
        except (NoBase64, UnicodeDecodeError):
            pass
    is_pdf = isinstance(name, str) and name.lower().endswith(".pdf")
    what = "PDF" if is_pdf else media_name(media_type)
    size_bytes = count_base64_bytes(encoded or data) if isinstance(data, str) else None
    return None, describe_omitted_part(what, name=name, size_bytes=size_bytes)


def _join_content(content: Any) -> str:
    """Join the parts of content into one text. Notes replace images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else describe_omitted_part("image") for part in content)


def _describe_unknown_item(item: Mapping[str, Any], left_out: OmittedParts) -> str:
    """Return the text that replaces an item that only another service can produce."""
    kind = item.get("type")
    text = readable_text(kind, item)
    if text is None:
        left_out.add_kind("item", kind)
        text = describe_omitted_part(f"item {kind_name(kind)}")
    return text


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item["type"]
    name, given = item.get("name"), item.get("arguments") or "{}"
    if kind == "custom_tool_call":
        given = encode_input_text(item.get("input"))
    elif kind != "function_call":
        # A call of a tool that OpenAI defines. Its type is the name, and its members are the arguments.
        name = item.get("name") or kind.removesuffix("_call")
        members = given if isinstance(given, dict) else readable_members(item)
        given = json.dumps(members, ensure_ascii=False)
    if not (isinstance(given, str) and isinstance(name, str)):
        raise BadRequest("a call must have a name, and arguments that are text", param="input")
    # Engines and chat templates need an object, but clients send back whatever the model wrote.
    function = {"name": make_function_name(name, item.get("namespace")), "arguments": arguments_as_object(given)}
    return {"id": _item_call_id(item), "type": "function", "function": function}


def _tool_result(item: Mapping[str, Any], images: list[dict[str, Any]], left_out: OmittedParts) -> dict[str, Any]:
    """Return the message with a tool's result. Its images are added to `images`, for the user's next message."""
    output = item.get("output")
    if item["type"] == "tool_search_output":
        names = [tool.function_name for tool in read_tools({"input": [item]}, left_out)]
        output = f"Tools that can be called now: {', '.join(names) or 'none'}"
    elif isinstance(output, dict):
        output = [output]
    elif output is None and item["type"] not in _CLIENT_OUTPUT_TYPES:
        output = readable_text(item["type"], item)
    content = _message_content("" if output is None else output, left_out)
    if isinstance(content, list):
        images += [part for part in content if part["type"] != "text"]
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    return {"role": "tool", "tool_call_id": _item_call_id(item), "content": content}


def _item_call_id(item: Mapping[str, Any]) -> str:
    if not isinstance(item.get("call_id"), str):
        raise BadRequest("a call and its output must have a call_id", param="input")
    return item["call_id"]  # type: ignore[no-any-return]


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or else its sealed text, or else its summary."""
    sealed = item.get("encrypted_content")
    for name in ("content", "summary"):
        parts = item.get(name)
        if name == "summary" and isinstance(sealed, str) and (thoughts := _unseal_reasoning(sealed)):
            return thoughts
        if isinstance(parts, list) and parts:
            return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return ""


def seal_reasoning(thoughts: str) -> str:
    """Encode reasoning in a form that clients send back unread.

    It is not secret: the answer has it in plain text, too.
    """
    return _SEAL_PREFIX + b64encode(encode_utf8(thoughts)).decode()


def _unseal_reasoning(content: str) -> str:
    """Decode sealed reasoning. The result is empty if another service sealed it."""
    try:
        return (
            replace_surrogates(b64decode(content.removeprefix(_SEAL_PREFIX), validate=True))
            if content.startswith(_SEAL_PREFIX)
            else ""
        )
    except (NoBase64, UnicodeDecodeError):
        return ""


_INPUT_PARAMETERS: Final = "input"
"""The only parameter of the function that represents a custom tool."""
SEARCH_TYPE: Final = "tool_search"
"""The name of the function that represents a search for tools that the client runs."""
_ITEM_TYPES_WITH_TOOLS: Final = ("additional_tools", "tool_search_output")
"""Types of input items that declare tools."""


class ToolKind(Enum):
    """The type of a tool in the client's request. It decides the form of the tool's calls."""

    FUNCTION = "function"
    CUSTOM = "custom"
    """A tool that takes text instead of JSON."""
    TOOL_SEARCH = "tool_search"
    """A search for tools. The client adds the tools that it finds to the conversation (Codex)."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientTool:
    """A tool of a Responses request that the client runs itself."""

    name: str
    namespace: str | None
    """The namespace that contains the tool; None if it has none."""
    kind: ToolKind
    declaration: Mapping[str, Any]
    """The tool as the client declared it."""

    @property
    def function_name(self) -> str:
        """The name of the function that the model calls."""
        return make_function_name(self.name, self.namespace)

    def make_function(self) -> dict[str, Any]:
        """Return the tool as a function of a chat. Chats have neither custom tools nor namespaces."""
        described: dict[str, Any] = {"name": self.function_name}
        if self.kind is ToolKind.CUSTOM:
            text = {_INPUT_PARAMETERS: {"type": "string", "description": "The input of this tool, as plain text."}}
            described["description"] = _describe_custom_tool(self.declaration)
            described["parameters"] = {"type": "object", "properties": text, "required": [_INPUT_PARAMETERS]}
        else:
            members = ("description", "parameters", "strict")
            described |= {
                member: self.declaration[member] for member in members if self.declaration.get(member) is not None
            }
        return {"type": "function", "function": described}


def make_function_name(name: str, namespace: object) -> str:
    """Return the function name that stands for a client's tool, with the tool's namespace if it has one.

    It contains the namespace, because a chat has none. OpenAI allows no dots.
    """
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def read_tools(values: Mapping[str, Any], left_out: OmittedParts) -> list[ClientTool]:
    """Return the tools of a request and of its input items. If two tools have the same name, the later one is used.

    Tools that only OpenAI's own service or its models can use are added to `left_out`. Raises BadRequest.
    """
    declared = check_objects(values.get("tools") or [], "tools")
    given = values.get("input")
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") in _ITEM_TYPES_WITH_TOOLS:
            declared = declared + check_objects(item.get("tools") or [], "input")
    tools = {each.function_name: each for tool in declared for each in _read_tool(tool, None, left_out)}
    return list(tools.values())


def _read_tool(tool: Mapping[str, Any], namespace: str | None, left_out: OmittedParts) -> Iterator[ClientTool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind == "tool_search" and _is_client_search(tool):
        yield ClientTool(SEARCH_TYPE, None, ToolKind.TOOL_SEARCH, tool)
    elif kind not in ("function", "custom", "namespace") or (kind == "namespace" and namespace is not None):
        left_out.add_kind("tool", kind)
    elif not isinstance(name, str):
        raise BadRequest("a tool must have a name", param="tools")
    elif kind != "namespace":
        yield ClientTool(name, namespace, ToolKind(kind), tool)
    else:
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise BadRequest("the tools of a namespace must be a list of objects", param="tools")
        for each in inner:
            yield from _read_tool(each, name, left_out)


def _is_client_search(search: Mapping[str, Any]) -> bool:
    """Return whether the client runs a search for tools: `execution` says so, or only `parameters` are present."""
    execution = search.get("execution")
    return execution == "client" or (execution is None and isinstance(search.get("parameters"), dict))


def _describe_custom_tool(tool: Mapping[str, Any]) -> str:
    """Return a custom tool's description with its grammar, if it has one.

    No engine can enforce a grammar for one argument of a call, so the description asks the model to follow it.
    """
    form = tool.get("format")
    if form is not None and not isinstance(form, dict):
        raise BadRequest("the format of a custom tool must be an object", param="tools")
    description = str(tool.get("description") or "")
    if form is not None and form.get("type") == "grammar":
        grammar = f"The input must follow this {form.get('syntax')} grammar:\n{form.get('definition')}"
        return f"{description}\n\n{grammar}".strip()
    return description


def encode_input_text(text: object) -> str:
    """Return the arguments of a function that represents a custom tool with this input text."""
    return dumps({_INPUT_PARAMETERS: text or ""}).decode()


def decode_input_text(arguments: str) -> str:
    """Return the text in a function's arguments. Malformed or incomplete arguments are returned unchanged."""
    read = decode_search(arguments)
    text = read.get(_INPUT_PARAMETERS) if isinstance(read, dict) else None
    return text if isinstance(text, str) else arguments


def decode_search(arguments: str) -> object:
    """Return the arguments of a search as an object. Arguments that are not a JSON object are returned as text."""
    read = read_object(arguments)
    return arguments if read is None else read
