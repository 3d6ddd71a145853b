"""The items of a conversation as the messages of a chat."""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.responses.refusals import refuse
from proxy.dialects.responses.tools import as_arguments, function_name
from proxy.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SEAL: Final = "pdproxy:"


def conversation(instructions: object, given: object) -> list[dict[str, Any]]:
    """The messages. What developers and the system say at the beginning is one message. Raises BadRequest."""
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequest("instructions must be text", param="instructions")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise BadRequest("input must be text or a list of items", param="input")
    messages = list(_messages(given))
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first = [instructions or "", *(_as_text(message["content"]) for message in messages[:count])]
    system = "\n\n".join(filter(None, first))
    told = [{"role": "system", "content": system}] if system else []
    if not (told or messages):
        raise BadRequest("input must not be empty", param="input")
    return [*told, *messages[count:]]


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the assistant thinks, says and calls is one message, until somebody else says something."""
    turn: dict[str, Any] = {}
    images: list[dict[str, Any]] = []
    for item in items:
        kind = str(item.get("type") or "message")
        if images and not kind.endswith("_output"):
            yield {"role": "user", "content": images}
            images = []
        role = _role(item) if kind == "message" else "assistant"
        if turn and (kind.endswith("_output") or role != "assistant" or _begins_anew(turn, kind)):
            yield turn
            turn = {}
        match kind:
            case "message" if role != "assistant":
                yield {"role": role, "content": _content(item.get("content"))}
            case "message":
                turn = {"role": "assistant", **turn}
                turn["content"] = turn.get("content", "") + _as_text(_content(item.get("content")))
            case "reasoning":
                thoughts = turn.get("reasoning", "") + _thoughts(item)
                turn = {"role": "assistant", **turn}
                if thoughts:
                    turn["reasoning"] = turn["reasoning_content"] = thoughts  # vLLM's name, and SGLang's
            case "function_call" | "custom_tool_call":
                turn = {"role": "assistant", **turn}
                turn.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output" | "custom_tool_call_output":
                yield _result(item, images)
            case "item_reference":
                raise BadRequest("items are not kept here: send them in full, with store false", param="input")
            case _:
                raise refuse("items", kind, "input")
    if turn:
        yield turn
    if images:
        yield {"role": "user", "content": images}


def _begins_anew(turn: Mapping[str, Any], kind: str) -> bool:
    """Templates write a message's reasoning first, then its text, then its calls."""
    if kind == "reasoning":
        return "content" in turn or "tool_calls" in turn
    return kind == "message" and "tool_calls" in turn


def _role(item: Mapping[str, Any]) -> str:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise BadRequest("the role of a message must be user, assistant, system or developer", param="input")
    return role


def _content(content: object) -> Any:
    """Text alone is told as text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest("the content of a message must be text or a list of parts", param="input")
    parts = [_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXTS and isinstance(text := part.get(_TEXTS[kind]), str):
        return {"type": "text", "text": text}
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise BadRequest("images are taken from an image_url, not from files", param="input")
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise refuse("parts", kind, "input")


def _as_text(content: Any) -> str:
    """The texts in a row, where there can be nothing else."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise BadRequest("images are for users to send", param="input")
    return "".join(part["text"] for part in content)


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    given = item.get("arguments") or "{}"
    if item["type"] == "custom_tool_call":
        given = as_arguments(item.get("input"))
    if not (isinstance(given, str) and isinstance(item.get("name"), str)):
        raise BadRequest("a call must have a name, and arguments that are text", param="input")
    function = {"name": function_name(item["name"], item.get("namespace")), "arguments": given}
    return {"id": _call_id(item), "type": "function", "function": function}


def _result(item: Mapping[str, Any], images: list[dict[str, Any]]) -> dict[str, Any]:
    """Its images go to the next message of a user."""
    output = item.get("output")
    content = _content("" if output is None else output)
    if isinstance(content, list):
        images += [part for part in content if part["type"] != "text"]
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    return {"role": "tool", "tool_call_id": _call_id(item), "content": content}


def _call_id(item: Mapping[str, Any]) -> str:
    if not isinstance(item.get("call_id"), str):
        raise BadRequest("a call and its output must have a call_id", param="input")
    return item["call_id"]  # type: ignore[no-any-return]


def _thoughts(item: Mapping[str, Any]) -> str:
    """As they were told: in full, or sealed for clients that give them back only so; a summary is better than none."""
    sealed = item.get("encrypted_content")
    for name in ("content", "summary"):
        parts = item.get(name)
        if name == "summary" and isinstance(sealed, str) and (thoughts := _unsealed(sealed)):
            return thoughts
        if isinstance(parts, list) and parts:
            return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return ""


def sealed(thoughts: str) -> str:
    """Reasoning that its client is to give back, and not to read. It is no secret: the answer tells it, too."""
    return _SEAL + b64encode(thoughts.encode()).decode()


def _unsealed(content: str) -> str:
    """Empty for somebody else's."""
    try:
        return b64decode(content.removeprefix(_SEAL), validate=True).decode() if content.startswith(_SEAL) else ""
    except (NoBase64, UnicodeDecodeError):
        return ""
