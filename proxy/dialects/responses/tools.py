"""The tools of a request as functions of a chat, and back: a chat knows neither tools that take text nor namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.requests import objects
from proxy.wire.chat_members import read_object
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.dialects.left_out import LeftOut

_INPUT: Final = "input"
"""The only parameter of the function that a custom tool becomes."""
SEARCH: Final = "tool_search"
"""The function that a client's search for tools becomes."""
_TOOLS_IN_ITEMS: Final = ("additional_tools", "tool_search_output")
"""Items of the input that declare tools."""


class ToolKind(Enum):
    """How the client describes a tool, and how a call is reported to it."""

    FUNCTION = "function"
    CUSTOM = "custom"
    """It takes text instead of JSON."""
    SEARCH = "tool_search"
    """It finds tools, which the client adds to the conversation (Codex)."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A tool that the client runs. `told`: as the client described it."""

    name: str
    namespace: str | None
    kind: ToolKind
    told: Mapping[str, Any]

    @property
    def function_name(self) -> str:
        """The name of the function that the model calls."""
        return function_name(self.name, self.namespace)

    def function(self) -> dict[str, Any]:
        """Return the tool as that of a chat."""
        described: dict[str, Any] = {"name": self.function_name}
        if self.kind is ToolKind.CUSTOM:
            text = {_INPUT: {"type": "string", "description": "The input of this tool, as plain text."}}
            described["description"] = _with_grammar(self.told)
            described["parameters"] = {"type": "object", "properties": text, "required": [_INPUT]}
        else:
            members = ("description", "parameters", "strict")
            described |= {member: self.told[member] for member in members if self.told.get(member) is not None}
        return {"type": "function", "function": described}


def function_name(name: str, namespace: object) -> str:
    """In a chat there is one space of names, without dots (OpenAI's pattern for them)."""
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def tools_of(values: Mapping[str, Any], left_out: LeftOut) -> list[Tool]:
    """The tools of a request, also those that items of its input declare; a later one replaces one of the same name.

    Tools that only OpenAI's own service or its models can use are added to `left_out`. Raises BadRequest.
    """
    declared = objects(values.get("tools") or [], "tools")
    given = values.get("input")
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") in _TOOLS_IN_ITEMS:
            declared = declared + objects(item.get("tools") or [], "input")
    tools = {each.function_name: each for tool in declared for each in _read(tool, None, left_out)}
    return list(tools.values())


def _read(tool: Mapping[str, Any], namespace: str | None, left_out: LeftOut) -> Iterator[Tool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind == "tool_search" and _is_clients(tool):
        yield Tool(SEARCH, None, ToolKind.SEARCH, tool)
    elif kind not in ("function", "custom", "namespace") or (kind == "namespace" and namespace is not None):
        left_out.add("tool", kind)
    elif not isinstance(name, str):
        raise BadRequest("a tool must have a name", param="tools")
    elif kind != "namespace":
        yield Tool(name, namespace, ToolKind(kind), tool)
    else:
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise BadRequest("the tools of a namespace must be a list of objects", param="tools")
        for each in inner:
            yield from _read(each, name, left_out)


def _is_clients(search: Mapping[str, Any]) -> bool:
    """Whether the client runs a search for tools: it says so, or gives the parameters, which a server's has not."""
    execution = search.get("execution")
    return execution == "client" or (execution is None and isinstance(search.get("parameters"), dict))


def _with_grammar(tool: Mapping[str, Any]) -> str:
    """If the text must keep to one: no engine can bind one argument of a call to it, so the model is told."""
    form = tool.get("format")
    if form is not None and not isinstance(form, dict):
        raise BadRequest("the format of a custom tool must be an object", param="tools")
    words = str(tool.get("description") or "")
    if form is not None and form.get("type") == "grammar":
        return f"{words}\n\nThe input must follow this {form.get('syntax')} grammar:\n{form.get('definition')}".strip()
    return words


def as_arguments(text: object) -> str:
    """The text of a custom tool's call as a function's arguments."""
    return dumps({_INPUT: text or ""}).decode()


def as_text(arguments: str) -> str:
    """And back; arguments that are something else, or are cut off, as they stand."""
    read = as_search(arguments)
    text = read.get(_INPUT) if isinstance(read, dict) else None
    return text if isinstance(text, str) else arguments


def as_search(arguments: str) -> object:
    """The arguments of a search as the client reads them; text that is no JSON object as it stands."""
    read = read_object(arguments)
    return arguments if read is None else read
