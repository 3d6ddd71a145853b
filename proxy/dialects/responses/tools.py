"""The tools of a request as functions of a chat, and back: a chat knows neither tools that take text nor namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.requests import objects
from proxy.dialects.responses.refusals import refuse
from proxy.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INPUT: Final = "input"
"""The only parameter of the function that a custom tool becomes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function or custom tool, which the client runs. `told`: as the client described it."""

    name: str
    namespace: str | None
    is_custom: bool
    told: Mapping[str, Any]

    @property
    def function_name(self) -> str:
        """What the model calls it."""
        return function_name(self.name, self.namespace)

    def function(self) -> dict[str, Any]:
        """As the tool of a chat."""
        described: dict[str, Any] = {"name": self.function_name}
        if self.is_custom:
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


def tools_of(values: Mapping[str, Any]) -> list[Tool]:
    """The tools of a request. Raises BadRequest for those that only OpenAI's own service has."""
    return [each for tool in objects(values.get("tools") or [], "tools") for each in _read(tool, None)]


def _read(tool: Mapping[str, Any], namespace: str | None) -> Iterator[Tool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom", "namespace") or (kind == "namespace" and namespace is not None):
        raise refuse("tools", kind, "tools")
    if not isinstance(name, str):
        raise BadRequest("a tool must have a name", param="tools")
    if kind != "namespace":
        yield Tool(name, namespace, kind == "custom", tool)
        return
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise BadRequest("the tools of a namespace must be a list of objects", param="tools")
    for each in inner:
        yield from _read(each, name)


def _with_grammar(tool: Mapping[str, Any]) -> str:
    """If the text must keep to one: no engine can bind one argument of a call to it, so the model is told."""
    form = tool.get("format")
    words = str(tool.get("description") or "")
    if isinstance(form, dict) and form.get("type") == "grammar":
        return f"{words}\n\nThe input must follow this {form.get('syntax')} grammar:\n{form.get('definition')}".strip()
    return words


def as_arguments(text: object) -> str:
    """The text of a custom tool's call as a function's arguments."""
    return orjson.dumps({_INPUT: text or ""}).decode()


def as_text(arguments: str) -> str:
    """And back; arguments that are something else, or are cut off, as they stand."""
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = read.get(_INPUT) if isinstance(read, dict) else None
    return text if isinstance(text, str) else arguments
