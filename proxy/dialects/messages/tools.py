"""The tools of a message as those of a chat. A conversation may add and remove some, which a chat cannot: the model is
told those that there are in the end (vLLM `_resolve_tools`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.requests import object_in, objects
from proxy.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CHANGES: Final = frozenset(("tool_addition", "tool_removal"))
"""The content blocks that do so, in messages of the system."""
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def tools_of(values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`tools`, and what says how they may be used. Raises BadRequest."""
    tools = _left(objects(values.get("tools") or [], "tools"), list(_changes(messages)))
    if not tools:
        return {}
    return {"tools": [_tool(tool) for tool in tools], **_tool_choice(object_in(values, "tool_choice"))}


def _changes(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, list):
            yield from (block for block in objects(content, "messages") if block.get("type") in CHANGES)


def _left(tools: list[dict[str, Any]], changes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those in effect at the end. One that is added by its name is no longer to be loaded later."""
    if not changes:
        return tools
    known = {tool.get("name"): tool for tool in tools}
    removed: set[Any] = set()
    for change in changes:
        told, kind = object_in(change, "tool"), change["type"]
        if told.get("type") == "tool_definition" and kind == "tool_addition":
            told = object_in(told, "definition")
            known[told.get("name")] = told
        elif told.get("type") != "tool_reference" or told.get("name") not in known:
            raise BadRequest(f"{kind} must have a tool that is declared in tools", param="messages")
        elif kind == "tool_addition":
            known[told["name"]] = {**known[told["name"]], "defer_loading": None}
        (removed.add if kind == "tool_removal" else removed.discard)(told.get("name"))
    return [tool for name, tool in known.items() if name not in removed]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom") or not isinstance(name, str) or not isinstance(schema, dict):
        raise BadRequest(
            "tools must have a name and an input_schema: those that Anthropic's service defines or runs are not served",
            param="tools",
        )
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
    elif kind in _CHOICES:
        chosen["tool_choice"] = _CHOICES[kind]
    else:
        raise BadRequest("tool_choice must be auto, any, none, or a tool with its name", param="tool_choice")
    if choice.get("disable_parallel_tool_use") is not None:
        chosen["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return chosen
