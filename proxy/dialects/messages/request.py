"""A body of Anthropic's Messages API as that of a chat completion, as engines translate it themselves.

Field by field after vLLM `entrypoints/anthropic/serving.py`; where it differs, it says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import joined
from proxy.dialects.messages.content import parts_of
from proxy.dialects.messages.tools import changes_tools, tools_of
from proxy.dialects.requests import at_least_one, object_in, objects
from proxy.wire.chat_members import arguments_text, as_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.dialects.left_out import LeftOut

# Claude Code's begins with it; it is another one in each request, and no prefix cache would have what is behind it.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
# Claude Code calls some of its users otherwise (vLLM `normalize_role`).
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
# What both APIs call the same, and what engines add to this one themselves.
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt", "vllm_xargs"),
    *("kv_transfer_params", "priority", "seed", "min_p", "min_tokens", "repetition_penalty", "thinking_token_budget"),
)
# What templates call the switch: those of Kimi and DeepSeek, and those of Qwen and GLM.
_THINKING: Final = ("thinking", "enable_thinking")


def chat_of(values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """The body of the chat that asks for the same. Raises BadRequest.

    Tools and content that only Anthropic's own service can serve are added to `left_out`.
    """
    chat: dict[str, Any] = {name: values[name] for name in _SAME if values.get(name) is not None}
    chat["max_tokens"] = chat["max_completion_tokens"] = at_least_one(values, "max_tokens")
    if values.get("mcp_servers"):
        left_out.add("tool", "mcp_servers")
    chat |= _conversation(values, left_out)
    if stops := _stops(values.get("stop_sequences")):
        chat["stop"] = stops
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _is_begun(chat["messages"]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    thinking = _thinking(values)
    if thinking:
        chat["chat_template_kwargs"] = {**thinking, **object_in(values, "chat_template_kwargs")}
    chat |= _output(values)
    user = object_in(values, "metadata").get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    return chat


def _conversation(values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """What the prompt is made of: `messages`, `tools` and what says how they may be used. Raises BadRequest."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", param="messages")
    chat: dict[str, Any] = {"messages": [*_system(values.get("system"), left_out), *_turns(messages, left_out)]}
    return chat | tools_of(values, messages, left_out)


def _stops(stops: object) -> list[str]:
    if stops is not None and not (isinstance(stops, list) and all(isinstance(text, str) for text in stops)):
        raise BadRequest("stop_sequences must be a list of texts", param="stop_sequences")
    return stops or []


# Messages


def _system(system: object, left_out: LeftOut) -> list[dict[str, Any]]:
    if isinstance(system, list):
        system = "".join(_system_texts(objects(system, "system"), left_out))
    elif system is not None and not isinstance(system, str):
        raise BadRequest("system must be text or a list of text blocks", param="system")
    return [{"role": "system", "content": system}] if system else []


def _system_texts(blocks: Sequence[dict[str, Any]], left_out: LeftOut) -> Iterator[str]:
    for block in blocks:
        if not (text := joined(parts_of({"type": "text", **block}, left_out))).startswith(_BILLING_HEADER):
            yield text


def _turns(messages: list[Any], left_out: LeftOut) -> Iterator[dict[str, Any]]:
    for message in objects(messages, "messages"):
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise BadRequest("the role of a message must be user, assistant or system", param="messages")
        content = message.get("content")
        if role == "system":
            # In place, where vLLM joins them to the first if the template wants that: a reminder at the end would
            # change the prompt's beginning.
            yield from _reminder(content, left_out)
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise BadRequest("the content of a message must be text or a list of blocks", param="messages")
        elif role == "assistant":
            yield _assistant(objects(content, "messages"), left_out)
        else:
            yield from _user(objects(content, "messages"), left_out)


def _reminder(content: object, left_out: LeftOut) -> list[dict[str, Any]]:
    """What the system says in between."""
    if isinstance(content, str):
        content = [{"text": content}]
    if isinstance(content, list):
        content = [block for block in objects(content, "messages") if not changes_tools(block)]
    return _system(content, left_out)


def _user(blocks: Sequence[dict[str, Any]], left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Results of tools first, as messages of their own; their images go before what else the user says."""
    parts: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield from _result(block, images, left_out)
        else:
            parts += parts_of(block, left_out)
    if content := _content([*images, *parts]):
        yield {"role": "user", "content": content}


def _result(block: dict[str, Any], images: list[dict[str, Any]], left_out: LeftOut) -> Iterator[dict[str, Any]]:
    content = block.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    for item in objects([] if content is None else content, "messages"):
        if item.get("type") == "tool_reference":
            references.append({"type": "tool_reference", "name": item.get("tool_name") or item.get("name")})
            continue
        for part in parts_of(item, left_out):
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                images.append(part)
    answered = {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or "")}
    if texts or not references:
        yield {**answered, "content": "\n".join(texts)}
    if references:
        yield {**answered, "content": references}


def _assistant(blocks: Sequence[dict[str, Any]], left_out: LeftOut) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "tool_use":
                calls.append(_call(block))
            case _:
                parts += parts_of(block, left_out)
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)  # vLLM's name, and SGLang's
    if parts or not calls:
        message["content"] = _content(parts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    # Clients that could not read what the model wrote give it back as text.
    told = block.get("input") or {}
    arguments = arguments_text(told)
    if not isinstance(told, dict):
        arguments = as_object(arguments)
    function = {"name": str(block.get("name") or ""), "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _content(parts: list[dict[str, Any]]) -> Any:
    """Text alone is told as text, and none as none."""
    parts = [part for part in parts if part.get("text") != ""]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _is_begun(messages: Sequence[dict[str, Any]]) -> bool:
    """The client has begun the answer itself, which the model is to go on with, as Anthropic's do. vLLM's begin anew,
    though they go on with a begun answer of the Responses API.
    """
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and "tool_calls" not in last and bool(last.get("content"))


# Thinking, output


def _thinking(values: Mapping[str, Any]) -> dict[str, bool]:
    """Switches for the template. The budget is left to the engine, since most refuse one unless they are set up for it;
    who has set them up says `thinking_token_budget`. Nothing: the model does what it does by default.
    """
    kind = object_in(values, "thinking").get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise BadRequest("thinking must be enabled, disabled or adaptive", param="thinking")
    return {} if kind in (None, "adaptive") else dict.fromkeys(_THINKING, kind == "enabled")


def _output(values: Mapping[str, Any]) -> dict[str, Any]:
    config = object_in(values, "output_config")
    form = config.get("format") or values.get("output_format")  # which was its name in a beta
    wanted: dict[str, Any] = {}
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise BadRequest("the format of output must be a json_schema with its schema", param="output_config")
        schema = {"name": "output", "schema": form["schema"], "strict": True}
        wanted["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") is not None:
        wanted["reasoning_effort"] = config["effort"]
    return wanted
