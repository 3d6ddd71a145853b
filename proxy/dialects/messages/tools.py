"""The tools of a message as those of a chat. A conversation may add and remove some, which a chat cannot: the model is
told those that there are in the end (vLLM `_resolve_tools`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import kind_name
from proxy.dialects.requests import object_in, objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proxy.dialects.left_out import LeftOut

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def changes_tools(block: Mapping[str, Any]) -> bool:
    """Whether a content block of a system message adds or removes a tool."""
    return block.get("type") in ("tool_addition", "tool_removal")


def tools_of(values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], left_out: LeftOut) -> dict[str, Any]:
    """`tools`, and what says how they may be used. Raises BadRequest."""
    tools = _left(objects(values.get("tools") or [], "tools"), list(_changes(messages)), left_out)
    functions = [function for tool in tools if (function := _function(tool, left_out)) is not None]
    choice = object_in(values, "tool_choice")
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


def _changes(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, list):
            yield from (block for block in objects(content, "messages") if changes_tools(block))


def _left(tools: list[dict[str, Any]], changes: Sequence[Mapping[str, Any]], left_out: LeftOut) -> list[dict[str, Any]]:
    """Those in effect at the end. One that is added by its name is no longer to be loaded later."""
    if not changes:
        return tools
    known = {str(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for change in changes:
        told, kind = object_in(change, "tool"), change["type"]
        if told.get("type") == "tool_definition" and kind == "tool_addition":
            told = object_in(told, "definition")
            known[str(told.get("name"))] = told
        elif told.get("type") != "tool_reference" or str(told.get("name")) not in known:
            left_out.add("content", kind)  # of a tool that another service defines
            continue
        elif kind == "tool_addition":
            known[str(told["name"])] = {**known[str(told["name"])], "defer_loading": None}
        (removed.add if kind == "tool_removal" else removed.discard)(str(told.get("name")))
    return [tool for name, tool in known.items() if name not in removed]


def _function(tool: dict[str, Any], left_out: LeftOut) -> dict[str, Any] | None:
    """The function that a tool is; None for one that Anthropic defines, which is added to `left_out`."""
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        if kind in (None, "custom", "function"):
            raise BadRequest("tools must have a name and an input_schema", param="tools")
        left_out.add("tool", kind)
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
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen["tool_choice"] = _CHOICES[kind]
    else:
        raise BadRequest("tool_choice must be auto, any, none, or a tool with its name", param="tool_choice")
    if choice.get("disable_parallel_tool_use") is not None:
        chosen["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return chosen
