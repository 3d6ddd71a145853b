"""Translates the body of Anthropic's Messages API to a chat completion, as the engines do themselves.

The members follow vLLM's `entrypoints/anthropic/serving.py`; comments give the reason for each difference. No content
block makes a request fail because of its type, because clients send the whole conversation again with each turn.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NoBase64
from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import (
    OmittedParts,
    count_base64_bytes,
    describe_omitted_part,
    join_lines,
    join_parts,
    kind_name,
    media_name,
    readable_text,
)
from proxy.dialects.requests import check_object_member, check_objects, read_positive_number
from proxy.wire.chat_members import arguments_as_object, read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Part = dict[str, Any]


# The beginning of a system block of Claude Code that differs in each request, so no prefix cache would match after it.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
# Claude Code has further names for users (vLLM `normalize_role`).
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
# Members with the same name in both APIs, and members that the engines themselves add to this API.
_UNCHANGED_MEMBERS: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt", "vllm_xargs"),
    *("kv_transfer_params", "priority", "seed", "min_p", "min_tokens", "repetition_penalty", "thinking_token_budget"),
)
# Names of the switch for thinking in chat templates: those of Kimi and DeepSeek, and those of Qwen and GLM.
_THINKING_SWITCHES: Final = ("thinking", "enable_thinking")


def translate_to_chat(values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
    """Return the body of the equivalent chat. Raises BadRequest.

    Tools and content that only Anthropic's own service can serve are added to `left_out`.
    """
    chat: dict[str, Any] = {name: values[name] for name in _UNCHANGED_MEMBERS if values.get(name) is not None}
    chat["max_tokens"] = chat["max_completion_tokens"] = read_positive_number(values, "max_tokens")
    if values.get("mcp_servers"):
        left_out.add_kind("tool", "mcp_servers")
    chat |= _chat_messages(values, left_out)
    if stops := _stop_strings(values.get("stop_sequences")):
        chat["stop"] = stops
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _ends_with_begun_answer(chat["messages"]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    thinking = _thinking_switches(values)
    if thinking:
        chat["chat_template_kwargs"] = {**thinking, **check_object_member(values, "chat_template_kwargs")}
    chat |= _response_format(values)
    user = check_object_member(values, "metadata").get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    return chat


def _chat_messages(values: Mapping[str, Any], left_out: OmittedParts) -> dict[str, Any]:
    """Return the members that make the prompt: `messages`, `tools` and the choice of tools. Raises BadRequest."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", param="messages")
    chat: dict[str, Any] = {
        "messages": [*_system_messages(values.get("system"), left_out), *_chat_turns(messages, left_out)]
    }
    return chat | read_tools(values, messages, left_out)


def _stop_strings(stops: object) -> list[str]:
    if stops is not None and not (isinstance(stops, list) and all(isinstance(text, str) for text in stops)):
        raise BadRequest("stop_sequences must be a list of texts", param="stop_sequences")
    return stops or []


# Messages


def _system_messages(system: object, left_out: OmittedParts) -> list[dict[str, Any]]:
    if isinstance(system, list):
        system = "".join(_system_texts(check_objects(system, "system"), left_out))
    elif system is not None and not isinstance(system, str):
        raise BadRequest("system must be text or a list of text blocks", param="system")
    return [{"role": "system", "content": system}] if system else []


def _system_texts(blocks: Sequence[dict[str, Any]], left_out: OmittedParts) -> Iterator[str]:
    for block in blocks:
        if not (text := join_parts(translate_block({"type": "text", **block}, left_out))).startswith(_BILLING_HEADER):
            yield text


def _chat_turns(messages: list[Any], left_out: OmittedParts) -> Iterator[dict[str, Any]]:
    for message in check_objects(messages, "messages"):
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise BadRequest("the role of a message must be user, assistant or system", param="messages")
        content = message.get("content")
        if role == "system":
            # They stay in place. vLLM joins them to the first one if the template requires that, but then a reminder at
            # the end would change the beginning of the prompt.
            yield from _system_message_between_turns(content, left_out)
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise BadRequest("the content of a message must be text or a list of blocks", param="messages")
        elif role == "assistant":
            yield _assistant_message(check_objects(content, "messages"), left_out)
        else:
            yield from _user_messages(check_objects(content, "messages"), left_out)


def _system_message_between_turns(content: object, left_out: OmittedParts) -> list[dict[str, Any]]:
    """Return a system message from the middle of a conversation, without its tool changes; empty if nothing remains."""
    if isinstance(content, str):
        content = [{"text": content}]
    if isinstance(content, list):
        content = [block for block in check_objects(content, "messages") if not changes_tools(block)]
    return _system_messages(content, left_out)


def _user_messages(blocks: Sequence[dict[str, Any]], left_out: OmittedParts) -> Iterator[dict[str, Any]]:
    """Yield each tool result as a separate message, then one message with their images and the user's other content."""
    parts: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield from _tool_result_messages(block, images, left_out)
        else:
            parts += translate_block(block, left_out)
    if content := _message_content([*images, *parts]):
        yield {"role": "user", "content": content}


def _tool_result_messages(
    block: dict[str, Any], images: list[dict[str, Any]], left_out: OmittedParts
) -> Iterator[dict[str, Any]]:
    content = block.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    for item in check_objects([] if content is None else content, "messages"):
        if item.get("type") == "tool_reference":
            references.append({"type": "tool_reference", "name": item.get("tool_name") or item.get("name")})
            continue
        for part in translate_block(item, left_out):
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                images.append(part)
    answered = {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or "")}
    if texts or not references:
        yield {**answered, "content": "\n".join(texts)}
    if references:
        yield {**answered, "content": references}


def _assistant_message(blocks: Sequence[dict[str, Any]], left_out: OmittedParts) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                parts += translate_block(block, left_out)
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)  # vLLM's name, and SGLang's
    if parts or not calls:
        message["content"] = _message_content(parts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    # Clients send arguments back as text if they could not parse them.
    given = block.get("input") or {}
    arguments = read_arguments(given)
    if not isinstance(given, dict):
        arguments = arguments_as_object(arguments)
    function = {"name": str(block.get("name") or ""), "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _message_content(parts: list[dict[str, Any]]) -> Any:
    """Return the content of a message: a text if there is only text, otherwise a list of parts."""
    parts = [part for part in parts if part.get("text") != ""]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _ends_with_begun_answer(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether the last message is the beginning of the answer. The model continues it, as Anthropic's models do.

    vLLM starts a new answer instead, although it continues a begun answer of the Responses API.
    """
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and "tool_calls" not in last and bool(last.get("content"))


# Thinking, output


def _thinking_switches(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the chat template's switches for thinking; empty to keep the model's default.

    The budget is not translated, because most engines reject one unless they are configured for it. Clients of such
    engines can send `thinking_token_budget`.
    """
    kind = check_object_member(values, "thinking").get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise BadRequest("thinking.type must be enabled, disabled or adaptive", param="thinking")
    return {} if kind in (None, "adaptive") else dict.fromkeys(_THINKING_SWITCHES, kind == "enabled")


def _response_format(values: Mapping[str, Any]) -> dict[str, Any]:
    config = check_object_member(values, "output_config")
    form = config.get("format") or values.get("output_format")  # its name in a beta
    wanted: dict[str, Any] = {}
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise BadRequest("the format of output must be a json_schema with its schema", param="output_config")
        schema = {"name": "output", "schema": form["schema"], "strict": True}
        wanted["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") is not None:
        wanted["reasoning_effort"] = config["effort"]
    return wanted


# Blocks that are dropped. Only Anthropic or the model that wrote them can read them. References count in results only.
_OMITTED_BLOCKS: Final = frozenset({"thinking", "redacted_thinking", "tool_reference"})
# Anthropic's blocks hold others two levels deep; without a bound one body could use up the stack.
_MAX_DEPTH: Final = 4


def text_part(text: str) -> Part:
    """Return a text part of a chat message."""
    return {"type": "text", "text": text}


def translate_block(block: Mapping[str, Any], left_out: OmittedParts, depth: int = 0) -> list[Part]:
    """Return a content block as text and image parts of a chat message. Raises BadRequest for a malformed block.

    `depth`: the number of blocks that contain this one.
    """
    match block.get("type"):
        case "text":
            return [text_part(read_block_text(block))]
        case "image":
            return [_image_part(block, left_out)]
        case "document":
            return _document_parts(block, left_out, depth)
        case "search_result":
            heading = [str(block.get(name) or "") for name in ("title", "source")]
            return [text_part(join_lines([*heading, join_parts(_nested_parts(block.get("content"), left_out, depth))]))]
        case kind if isinstance(kind, str) and kind in _OMITTED_BLOCKS:
            return []
        case kind:
            return _unknown_block_parts(kind, block, left_out, depth)


def read_block_text(block: Mapping[str, Any]) -> str:
    """Return the text of a text block. Raises BadRequest."""
    text = block.get("text")
    if not isinstance(text, str):
        raise BadRequest("a text block must have text", param="messages")
    return text


def _image_part(block: Mapping[str, Any], left_out: OmittedParts) -> Part:
    source = check_object_member(block, "source")
    kind, url, data = source.get("type", "base64"), source.get("url"), source.get("data")
    if kind == "base64" and isinstance(data, str):
        url = f"data:{source.get('media_type') or 'image/jpeg'};base64,{data}"
    elif kind != "url":  # a file that is kept at another service
        left_out.add_kind("content", "image")
        return text_part(describe_omitted_part("image", name=source.get("file_id")))
    if not isinstance(url, str):
        raise BadRequest("an image block must have its source", param="messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _document_parts(block: Mapping[str, Any], left_out: OmittedParts, depth: int) -> list[Part]:
    """Return a document as parts: its title, context and full text, or a note if it has no text."""
    source = check_object_member(block, "source")
    title, context = (str(block.get(name) or "") for name in ("title", "context"))
    parts = (
        _nested_parts(source.get("content"), left_out, depth)
        if source.get("type") == "content"
        else _read_source(source)
    )
    if parts is not None:
        heading = join_lines((title, context))
        return [text_part(heading), *parts] if heading else parts
    left_out.add_kind("content", "document")
    data = source.get("data")
    size_bytes = count_base64_bytes(data) if isinstance(data, str) else None
    name = title or source.get("url") or source.get("file_id")
    # Anthropic fetches nothing but PDFs.
    what = "PDF" if source.get("type") == "url" else media_name(source.get("media_type"))
    return [text_part(join_lines((describe_omitted_part(what, name=name, size_bytes=size_bytes), context)))]


def _read_source(source: Mapping[str, Any]) -> list[Part] | None:
    """Return the text of a document's source as parts; None if the source is not text."""
    data, media_type = source.get("data"), source.get("media_type")
    if not isinstance(data, str):
        return None
    if source.get("type") == "text":
        return [text_part(data)]
    if isinstance(media_type, str) and media_type.startswith("text/"):
        try:
            return [text_part(b64decode(data, validate=True).decode())]
        except (NoBase64, UnicodeDecodeError):
            return None
    return None


def _unknown_block_parts(kind: object, block: Mapping[str, Any], left_out: OmittedParts, depth: int) -> list[Part]:
    """Return a block of an unknown type: the text and images in it, or else its readable members, or else a note."""
    content = block.get("content")
    if isinstance(content, str) or (isinstance(content, list) and _contains_blocks(content)):
        parts = _nested_parts(content, left_out, depth)
        if parts:
            return parts
    text = readable_text(kind, block)
    if text is None:
        left_out.add_kind("content", kind)
        text = describe_omitted_part(f"content {kind_name(kind)}")
    return [text_part(text)]


def _contains_blocks(content: list[Any]) -> bool:
    """Return whether all blocks are of types that users send. Otherwise they are another service's results."""
    return all(isinstance(each, dict) and each.get("type") in ("text", "image", "document") for each in content)


def _nested_parts(content: object, left_out: OmittedParts, depth: int) -> list[Part]:
    """Return the parts of the content of a block. The content is a text or a list of blocks."""
    if isinstance(content, str):
        return [text_part(content)]
    if depth == _MAX_DEPTH:
        return [text_part(describe_omitted_part("content"))]
    return [
        part for each in check_objects(content or [], "messages") for part in translate_block(each, left_out, depth + 1)
    ]


_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def changes_tools(block: Mapping[str, Any]) -> bool:
    """Whether a content block of a system message adds or removes a tool."""
    return block.get("type") in ("tool_addition", "tool_removal")


def read_tools(
    values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], left_out: OmittedParts
) -> dict[str, Any]:
    """Return `tools` and the members that control their use; empty if no tool is usable. Raises BadRequest.

    Messages may add and remove tools, which a chat cannot. The model gets the tools that are in effect at the end, as
    in vLLM (`_resolve_tools`).
    """
    tools = _tools_in_effect(check_objects(values.get("tools") or [], "tools"), list(_tool_changes(messages)), left_out)
    functions = [function for tool in tools if (function := _tool_function(tool, left_out)) is not None]
    choice = check_object_member(values, "tool_choice")
    names = [function["function"]["name"] for function in functions]
    lacking = [tool for tool in tools if tool.get("name") not in names]
    if values.get("mcp_servers"):
        lacking.append({"type": "mcp_servers"})
    demanded = choice.get("name") if choice.get("type") == "tool" else None
    for tool in lacking:
        if (demanded is not None and tool.get("name") == demanded) or (choice.get("type") == "any" and not functions):
            raise BadRequest(
                f"tool_choice demands a tool of type {kind_name(tool.get('type'))}, which no engine here can serve: "
                "use tools with a name and an input_schema, which the client runs",
                param="tool_choice",
            )
    if not functions:
        return {}
    return {"tools": functions, **_tool_choice(choice)}


def _tool_changes(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, list):
            yield from (block for block in check_objects(content, "messages") if changes_tools(block))


def _tools_in_effect(
    tools: list[dict[str, Any]], changes: Sequence[Mapping[str, Any]], left_out: OmittedParts
) -> list[dict[str, Any]]:
    """Return the tools in effect at the end. A tool that a message adds by its name is no longer loaded on demand."""
    if not changes:
        return tools
    by_name = {str(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for change in changes:
        tool, kind = check_object_member(change, "tool"), change["type"]
        if tool.get("type") == "tool_definition" and kind == "tool_addition":
            tool = check_object_member(tool, "definition")
            by_name[str(tool.get("name"))] = tool
        elif tool.get("type") != "tool_reference" or str(tool.get("name")) not in by_name:
            left_out.add_kind("content", kind)  # of a tool that another service defines
            continue
        elif kind == "tool_addition":
            by_name[str(tool["name"])] = {**by_name[str(tool["name"])], "defer_loading": None}
        (removed.add if kind == "tool_removal" else removed.discard)(str(tool.get("name")))
    return [tool for name, tool in by_name.items() if name not in removed]


def _tool_function(tool: dict[str, Any], left_out: OmittedParts) -> dict[str, Any] | None:
    """Return a tool as a function. None for a tool that Anthropic defines; its kind is added to `left_out`."""
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        if kind in (None, "custom", "function"):
            raise BadRequest("tools must have a name and an input_schema", param="tools")
        left_out.add_kind("tool", kind)
        return None
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type", "auto")
    chosen: dict[str, Any] = {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        chosen["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise BadRequest("tool_choice must be auto, any, none, or a tool with its name", param="tool_choice")
    if choice.get("disable_parallel_tool_use") is not None:
        chosen["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return chosen
