"""A body of Anthropic's Messages API as that of a chat completion, as engines translate it themselves.

Field by field after vLLM `entrypoints/anthropic/serving.py`; where it differs, it says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.messages.tools import CHANGES, tools_of
from proxy.dialects.requests import object_in, objects
from proxy.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Claude Code's begins with it; it is another one in each request, and no prefix cache would have what is behind it.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
# Claude Code calls some of its users otherwise (vLLM `normalize_role`).
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
# What both APIs call the same, and what engines add to this one themselves.
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt", "vllm_xargs"),
    *("kv_transfer_params", "priority", "seed", "min_p", "min_tokens", "repetition_penalty", "thinking_token_budget"),
)
_OF_THE_PROMPT: Final = (
    *("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
)
# What templates call the switch: those of Kimi and DeepSeek, and those of Qwen and GLM.
_THINKING: Final = ("thinking", "enable_thinking")


def chat_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat. Raises BadRequest for what is no request, and for what only Anthropic's own service can do."""
    chat: dict[str, Any] = {name: values[name] for name in _SAME if values.get(name) is not None}
    limit = values.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BadRequest("max_tokens must be a positive whole number", param="max_tokens")
    chat["max_tokens"] = chat["max_completion_tokens"] = limit
    if values.get("mcp_servers"):
        raise BadRequest("mcp_servers are not served here; let the client speak to them", param="mcp_servers")
    chat |= _conversation(values)
    if values.get("stop_sequences"):
        chat["stop"] = values["stop_sequences"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _is_begun(chat["messages"]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    thinking = _thinking(values)
    if thinking:
        chat["chat_template_kwargs"] = {**thinking, **(chat.get("chat_template_kwargs") or {})}
    chat |= _output(values)
    user = object_in(values, "metadata").get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    return chat


def tokenizer_body(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the chat, what vLLM's tokenizer is told (TokenizeChatRequest). Raises BadRequest."""
    chat = chat_of({**values, "max_tokens": 1})
    return {name: chat[name] for name in _OF_THE_PROMPT if name in chat}


def _conversation(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the prompt is made of: `messages`, `tools` and what says how they may be used. Raises BadRequest."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", param="messages")
    chat: dict[str, Any] = {"messages": [*_system(values.get("system")), *_turns(messages)]}
    return chat | tools_of(values, messages)


# Messages


def _system(system: object) -> list[dict[str, Any]]:
    if isinstance(system, list):
        system = "".join(_system_texts(objects(system, "system")))
    elif system is not None and not isinstance(system, str):
        raise BadRequest("system must be text or a list of text blocks", param="system")
    return [{"role": "system", "content": system}] if system else []


def _system_texts(blocks: Sequence[dict[str, Any]]) -> Iterator[str]:
    for block in blocks:
        if block.get("type", "text") != "text":
            raise BadRequest("system takes text blocks only", param="system")
        if not (text := _text(block)).startswith(_BILLING_HEADER):
            yield text


def _turns(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in objects(messages, "messages"):
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise BadRequest("the role of a message must be user, assistant or system", param="messages")
        content = message.get("content")
        if role == "system":
            # In place, where vLLM joins them to the first if the template wants that: a reminder at the end would
            # change the prompt's beginning.
            yield from _reminder(content)
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise BadRequest("the content of a message must be text or a list of blocks", param="messages")
        elif role == "assistant":
            yield _assistant(objects(content, "messages"))
        else:
            yield from _user(objects(content, "messages"))


def _reminder(content: object) -> list[dict[str, Any]]:
    """What the system says in between."""
    if isinstance(content, str):
        content = [{"text": content}]
    if isinstance(content, list):
        content = [block for block in objects(content, "messages") if block.get("type") not in CHANGES]
    return _system(content)


def _user(blocks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of tools first, as messages of their own; their images go before what else the user says."""
    parts: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _text(block)})
            case "image":
                parts.append(_image(block))
            case "tool_result":
                yield from _result(block, images)
            case "tool_reference":
                pass  # means something in a result only
            case other:
                raise _not_served(other)
    if content := _content([*images, *parts]):
        yield {"role": "user", "content": content}


def _result(block: dict[str, Any], images: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    content = block.get("content")
    texts: list[str] = [content] if isinstance(content, str) else []
    references: list[dict[str, Any]] = []
    for item in objects(content, "messages") if isinstance(content, list) else ():
        match item.get("type"):
            case "text":
                texts.append(_text(item))
            case "image":
                images.append(_image(item))
            case "tool_reference":
                references.append({"type": "tool_reference", "name": item.get("tool_name") or item.get("name")})
            case other:
                raise _not_served(other)
    answered = {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or "")}
    if texts or not references:
        yield {**answered, "content": "\n".join(texts)}
    if references:
        yield {**answered, "content": references}


def _assistant(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _text(block)})
            case "image":
                parts.append(_image(block))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case "tool_use":
                calls.append(_call(block))
            case other:
                raise _not_served(other)
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)  # vLLM's name, and SGLang's
    if parts or not calls:
        message["content"] = _content(parts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": str(block.get("name") or ""), "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _content(parts: list[dict[str, Any]]) -> Any:
    """Text alone is told as text, and none as none."""
    parts = [part for part in parts if part.get("text") != ""]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text(block: dict[str, Any]) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise BadRequest("a text block must have text", param="messages")
    return text


def _image(block: dict[str, Any]) -> dict[str, Any]:
    source = object_in(block, "source")
    kind, url, data = source.get("type", "base64"), source.get("url"), source.get("data")
    if kind == "base64" and isinstance(data, str):
        url = f"data:{source.get('media_type') or 'image/jpeg'};base64,{data}"
    elif kind != "url":
        raise BadRequest("images are taken as base64 or from a url, not from files", param="messages")
    if not isinstance(url, str):
        raise BadRequest("an image block must have its source", param="messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _not_served(kind: object) -> BadRequest:
    if kind == "document":
        return BadRequest("documents are not served here; send their text, or pages as images", param="messages")
    known = kind if isinstance(kind, str) and kind.isidentifier() and len(kind) < 64 else "of that kind"
    return BadRequest(f"content blocks {known} are not served here", param="messages")


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
