"""The items of a conversation as the messages of a chat."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import base64_bytes, described, kind_name, lines, media_name, note, readable
from proxy.dialects.responses.tools import as_arguments, function_name, tools_of
from proxy.wire.chat_members import as_object
from proxy.wire.python_json import utf8, utf8_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from proxy.dialects.left_out import LeftOut

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS: Final = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_IMAGES: Final = ("input_image", "computer_screenshot")
_OUR_CALLS: Final = ("function_call", "custom_tool_call")
_OUR_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
"""Items of tools whose calls are those of a chat."""
_SEAL: Final = "pdproxy:"


def conversation(instructions: object, given: object, left_out: LeftOut) -> list[dict[str, Any]]:
    """The messages. What developers and the system say at the beginning is one message. Raises BadRequest.

    Items and parts that no model can read are added to `left_out`.
    """
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequest("instructions must be text", param="instructions")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise BadRequest("input must be text or a list of items", param="input")
    messages = list(_messages(given, left_out))
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first = [instructions or "", *(_as_text(message["content"]) for message in messages[:count])]
    system = "\n\n".join(filter(None, first))
    told = [{"role": "system", "content": system}] if system else []
    if not (told or messages):
        raise BadRequest("input must not be empty", param="input")
    return [*told, *messages[count:]]


def _messages(items: Sequence[Mapping[str, Any]], left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """What the assistant thinks, says and calls is one message, until somebody else says something."""
    turn: dict[str, Any] = {}
    images: list[dict[str, Any]] = []
    called: set[str] = set()  # ids of the calls that are calls of a chat, too
    for item in items:
        kind = _kind(item, called)
        if kind == "tools":
            continue
        if images and kind != "output":
            yield {"role": "user", "content": images}
            images = []
        role = _role(item) if kind == "message" else "assistant"
        if turn and (kind == "output" or role != "assistant" or _begins_anew(turn, kind)):
            yield turn
            turn = {}
        match kind:
            case "message" if role == "user":
                yield {"role": role, "content": _content(item.get("content"), left_out)}
            case "message" if role == "system":
                yield {"role": role, "content": _as_text(_content(item.get("content"), left_out))}
            case "message":
                turn = {"role": "assistant", **turn}
                turn["content"] = turn.get("content", "") + _as_text(_content(item.get("content"), left_out))
            case "reasoning":
                thoughts = turn.get("reasoning", "") + _thoughts(item)
                turn = {"role": "assistant", **turn}
                if thoughts:
                    turn["reasoning"] = turn["reasoning_content"] = thoughts  # vLLM's name, and SGLang's
            case "call":
                turn = {"role": "assistant", **turn}
                turn.setdefault("tool_calls", []).append(_call(item))
                called.add(item["call_id"])
            case "output":
                yield _result(item, images, left_out)
            case _:
                turn = {"role": "assistant", **turn}
                turn["content"] = lines((turn.get("content", ""), _other(item, left_out)))
    if turn:
        yield turn
    if images:
        yield {"role": "user", "content": images}


def _kind(item: Mapping[str, Any], called: Set[str]) -> str:
    """What an item becomes: a `message`, `reasoning`, a `call` of a tool or its `output`, or text (`other`).

    `tools` are items that only declare tools. A call that has an id and its output can be told as those of a function,
    whatever tool it is of. Raises BadRequest.
    """
    kind, call_id = str(item.get("type") or "message"), item.get("call_id")
    if kind in ("message", "reasoning"):
        return kind
    if kind == "item_reference":
        raise BadRequest("items are not kept here: send them in full, with store false", param="input")
    is_answer = isinstance(call_id, str) and call_id in called
    if kind == "additional_tools" or (kind == "tool_search_output" and not is_answer):
        return "tools"
    if kind in _OUR_CALLS or (kind.endswith("_call") and isinstance(call_id, str)):
        return "call"
    if kind in _OUR_OUTPUTS or (kind.endswith("_output") and is_answer):
        return "output"
    return "other"


def _begins_anew(turn: Mapping[str, Any], kind: str) -> bool:
    """Templates write a message's reasoning first, then its text, then its calls."""
    if kind == "reasoning":
        return "content" in turn or "tool_calls" in turn
    return kind in ("message", "other") and "tool_calls" in turn


def _role(item: Mapping[str, Any]) -> str:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise BadRequest("the role of a message must be user, assistant, system or developer", param="input")
    return role


def _content(content: object, left_out: LeftOut) -> Any:
    """Text alone is told as text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest("the content of a message must be text or a list of parts", param="input")
    parts = [_part(part, left_out) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """A part of a chat's message: text, an image, audio, or a note in place of a part that no model can read."""
    kind = str(part.get("type"))
    if kind in _TEXTS and isinstance(text := part.get(_TEXTS[kind]), str):
        return {"type": "text", "text": text}
    if kind in _IMAGES and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind in _IMAGES:
        told = None
        words = note("image", name=part.get("file_id"))
    elif kind == "input_file":
        told, words = _file(part)
    else:
        told, words = described(kind, part), note(f"content {kind_name(kind)}")
    if told is None:
        left_out.add("content", kind)
    return {"type": "text", "text": words if told is None else told}


def _file(part: Mapping[str, Any]) -> tuple[str | None, str]:
    """The text of a file, None if it is not there or no text; and the note in its place."""
    data = part.get("file_data")
    head, _, encoded = data.partition(",") if isinstance(data, str) else ("", "", "")
    media_type = head.removeprefix("data:").partition(";")[0]
    name = part.get("filename") or part.get("file_url") or part.get("file_id")
    if media_type.startswith("text/"):
        try:
            return lines((str(part.get("filename") or ""), b64decode(encoded, validate=True).decode())), ""
        except (NoBase64, UnicodeDecodeError):
            pass
    is_pdf = isinstance(name, str) and name.lower().endswith(".pdf")
    what = "PDF" if is_pdf else media_name(media_type)
    size_bytes = base64_bytes(encoded or data) if isinstance(data, str) else None
    return None, note(what, name=name, size_bytes=size_bytes)


def _as_text(content: Any) -> str:
    """The texts in a row, where there can be nothing else; notes stand for images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else note("image") for part in content)


def _other(item: Mapping[str, Any], left_out: LeftOut) -> str:
    """An item that only another service can produce, as text."""
    kind = item.get("type")
    told = described(kind, item)
    if told is None:
        left_out.add("item", kind)
        told = note(f"item {kind_name(kind)}")
    return told


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item["type"]
    name, given = item.get("name"), item.get("arguments") or "{}"
    if kind == "custom_tool_call":
        given = as_arguments(item.get("input"))
    elif kind != "function_call":
        # A call of a tool that OpenAI defines, by its type: its members are its arguments.
        name = item.get("name") or kind.removesuffix("_call")
        members = given if isinstance(given, dict) else readable(item)
        given = json.dumps(members, ensure_ascii=False)
    if not (isinstance(given, str) and isinstance(name, str)):
        raise BadRequest("a call must have a name, and arguments that are text", param="input")
    # Engines and chat templates want an object, and clients give back whatever the model wrote.
    function = {"name": function_name(name, item.get("namespace")), "arguments": as_object(given)}
    return {"id": _call_id(item), "type": "function", "function": function}


def _result(item: Mapping[str, Any], images: list[dict[str, Any]], left_out: LeftOut) -> dict[str, Any]:
    """Its images go to the next message of a user."""
    output = item.get("output")
    if item["type"] == "tool_search_output":
        names = [tool.function_name for tool in tools_of({"input": [item]}, left_out)]
        output = f"Tools that can be called now: {', '.join(names) or 'none'}"
    elif isinstance(output, dict):
        output = [output]
    elif output is None and item["type"] not in _OUR_OUTPUTS:
        output = described(item["type"], item)
    content = _content("" if output is None else output, left_out)
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
    return _SEAL + b64encode(utf8(thoughts)).decode()


def _unsealed(content: str) -> str:
    """Return the reasoning; empty if another service has sealed it."""
    try:
        return utf8_text(b64decode(content.removeprefix(_SEAL), validate=True)) if content.startswith(_SEAL) else ""
    except (NoBase64, UnicodeDecodeError):
        return ""
