"""Changes of a request before it reaches the queue and the engines: model names, priorities, messages of the system.

* ModelNames: what clients call models that engines call otherwise (`models.aliases`).
* bound_priority: the priority that a request asks for, bounded by its client key.
* SystemFirst: chat templates that take a message of the system at the beginning only, as some of Qwen's do
  (`models.system_first`). In APIs that are translated to chats clients send further ones later, as Claude Code does.
  vLLM tries its template and, if it must, joins them to the first (`_detect_merge_inline_system`); engines do not
  report what the template takes. It is not done for all models, because each new message changes the beginning of the
  prompt, and then no prefix cache has the rest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.call import PRIORITY_HEADER
from proxy.wire.lax import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.call import Call

_WILDCARDS: Final = frozenset("*?[")
_PRIORITY: Final = "priority"


class ModelNames:
    """`aliases`: `what clients say=what engines serve`. The first that fits a name counts, and those without wildcards
    come before all others. A name that engines serve, since some alias stands for it, is itself.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        pairs = [(said, served) for said, _, served in (alias.rpartition("=") for alias in aliases)]
        self.exact: Mapping[str, str] = {said: served for said, served in pairs if _WILDCARDS.isdisjoint(said)}
        """Aliases without wildcards, which can be listed."""
        self._patterns = [(said, served) for said, served in pairs if said not in self.exact]
        self._served = frozenset(served for _, served in pairs)
        self.has_aliases = bool(pairs)

    def served(self, name: str) -> str:
        """Return the name by which engines know a model."""
        if name in self.exact or name in self._served:
            return self.exact.get(name, name)
        return next((served for pattern, served in self._patterns if fnmatchcase(name, pattern)), name)

    def translated(self, call: Call) -> Call:
        """Return the call with the engines' name of its model. Its answer has the client's name."""
        said = call.values.get("model")
        if not self._served or not isinstance(said, str) or (served := self.served(said)) == said:
            return call
        call.document.values.update({"model": served})
        return replace(call, changes={**call.changes, "model": served}, alias=said)


def bound_priority(call: Call, least: int, *, lower_first: bool) -> Call:
    """Return the call with a priority, in its body and headers, that does not go before `least`.

    A request that asks for none reaches engines without one, since vLLM refuses any number but 0 unless its scheduling
    policy is `priority`.

    Args:
        call: What the client asks for.
        least: The client key's priority, of which lower goes first.
        lower_first: Whether engines serve a lower member `priority` first.
    """
    asked_in_header = call.headers.get(PRIORITY_HEADER)
    if asked_in_header is None and (call.is_ordinary or _PRIORITY not in call.values):
        return call
    changes = priority_change(call.values.get(_PRIORITY), least, lower_first=lower_first)
    headers = call.headers
    if asked_in_header is not None:
        headers = {name: value for name, value in headers.items() if name != PRIORITY_HEADER}
        with suppress(ValueError):  # then it is dropped: an engine might read a number where this gateway reads none
            headers[PRIORITY_HEADER] = str(max(least, int(asked_in_header)))
    if not changes:
        return replace(call, headers=headers)
    call.document.values.update(changes)
    return replace(call, headers=headers, changes={**call.changes, **changes})


def priority_change(asked: object, least: int, *, lower_first: bool) -> Mapping[str, Any]:
    """Return the change of the member `priority` of a body, `asked`; empty if it may stay as it is."""
    try:
        number: Any = whole_number(asked)
    except ValueError:
        return {}  # neither is it a number for engines
    allowed = max(least, number) if lower_first else min(-least, number)
    return {} if allowed is asked else {_PRIORITY: allowed}


class SystemFirst:
    """`models`: names that engines serve, with wildcards."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = models

    def arranged(self, call: Call) -> Call:
        """Return the call as the engines of such a model accept it."""
        changes = self.changes(call.values)
        if not changes:
            return call
        call.document.values.update(changes)
        return call.part(changes)

    def changes(self, chat: Mapping[str, Any]) -> dict[str, object]:
        """Return the members that differ; none if the chat's model accepts the chat as it is."""
        model, messages = chat.get("model"), chat["messages"]
        if not any(fnmatchcase(str(model), pattern) for pattern in self._models):
            return {}
        said = [message["content"] for message in messages if message["role"] == "system"]
        if len(said) == 0 or (len(said) == 1 and messages[0]["role"] == "system"):
            return {}
        others = [message for message in messages if message["role"] != "system"]
        return {"messages": [{"role": "system", "content": "".join(map(_text, said))}, *others]}


def _text(content: object) -> str:
    """Return the text of a message of the system."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return str(content)
