"""Changes of a request before it reaches the queue and the engines: model names, priorities, system messages.

* ModelNames replaces the client's name of a model by the engines' name (`models.aliases`).
* limit_priority limits the priority of a request to that of its client key.
* SystemMessageJoiner joins all system messages into the first message (`models.system_first`), because some chat
  templates, such as some of Qwen's, accept none later. Clients of the translated APIs, such as Claude Code, do send
  later ones.
  vLLM tries its template and joins the messages if it must (`_detect_merge_inline_system`), but engines do not report
  what a template accepts. Other models keep their messages in place: each joined message would change the beginning of
  the prompt, and the prefix cache would not have the rest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.call import PRIORITY_HEADER, Call
from proxy.wire.python_json import read_whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_WILDCARD_CHARACTERS: Final = frozenset("*?[")
_PRIORITY_MEMBER: Final = "priority"


class ModelNames:
    """Maps the clients' names of models to the engines' names.

    Aliases without wildcards are looked up first, then the first pattern that matches. A name that some alias maps to
    stays as it is.

    Args:
        aliases: Entries of the form `client's name=engines' name`. The client's name may have wildcards.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        pairs = [(alias, served) for alias, _, served in (entry.rpartition("=") for entry in aliases)]
        self.engine_names_by_alias: Mapping[str, str] = {
            alias: served for alias, served in pairs if _WILDCARD_CHARACTERS.isdisjoint(alias)
        }
        """The engines' names by the aliases without wildcards, which `GET /v1/models` can list."""
        self._alias_patterns = [(alias, served) for alias, served in pairs if alias not in self.engine_names_by_alias]
        self._engine_names = frozenset(served for _, served in pairs)
        self.has_aliases = bool(pairs)

    def engine_name(self, name: str) -> str:
        """Return the engines' name of a model."""
        if name in self.engine_names_by_alias or name in self._engine_names:
            return self.engine_names_by_alias.get(name, name)
        return next((served for pattern, served in self._alias_patterns if fnmatchcase(name, pattern)), name)

    def translate_model_name(self, call: Call) -> Call:
        """Return the call with the engines' name of its model. Its answer has the client's name."""
        alias = call.values.get("model")
        if not self._engine_names or not isinstance(alias, str) or (served := self.engine_name(alias)) == alias:
            return call
        call.document.values.update({"model": served})
        return replace(call, changes={**call.changes, "model": served}, model_alias=alias)


def limit_priority(call: Call, least: int, *, lower_first: bool) -> Call:
    """Return the call with its priority limited to `least`, in its body and in its headers.

    A request without a priority stays without one, because vLLM rejects any number but 0 unless its scheduling policy
    is `priority`.

    Args:
        call: The client's call.
        least: The best priority that the client key may use. The gateway serves lower numbers first.
        lower_first: Whether engines serve lower numbers of the member `priority` first.
    """
    asked_in_header = call.headers.get(PRIORITY_HEADER)
    if asked_in_header is None and (call.is_ordinary or _PRIORITY_MEMBER not in call.values):
        return call
    changes = limit_priority_member(call.values.get(_PRIORITY_MEMBER), least, lower_first=lower_first)
    headers = call.headers
    if asked_in_header is not None:
        headers = {name: value for name, value in headers.items() if name != PRIORITY_HEADER}
        # A value that is no number here is dropped, because an engine might read it as one.
        with suppress(ValueError):
            headers[PRIORITY_HEADER] = str(max(least, int(asked_in_header)))
    if not changes:
        return replace(call, headers=headers)
    call.document.values.update(changes)
    return replace(call, headers=headers, changes={**call.changes, **changes})


def limit_priority_member(client_priority: object, least: int, *, lower_first: bool) -> Mapping[str, Any]:
    """Return the changed member `priority`; empty if it needs no change. `client_priority`: the client's value."""
    try:
        number: Any = read_whole_number(client_priority)
    except ValueError:
        return {}  # engines do not read it as a number either
    allowed = max(least, number) if lower_first else min(-least, number)
    return {} if allowed is client_priority else {_PRIORITY_MEMBER: allowed}


class SystemMessageJoiner:
    """Joins all system messages of a chat into its first message, for models that accept only one.

    Args:
        models: Engines' names of the models that need this. They may have wildcards.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._model_patterns = models

    def join_system_messages(self, call: Call) -> Call:
        """Return the call with its system messages joined if its model needs that."""
        changes = self.changed_chat_members(call.values)
        if not changes:
            return call
        call.document.values.update(changes)
        return call.make_unit_call(changes)

    def changed_chat_members(self, chat: Mapping[str, Any]) -> dict[str, object]:
        """Return the members of a chat that change; empty if its model accepts the chat unchanged."""
        model, messages = chat.get("model"), chat["messages"]
        if not any(map(fnmatchcase, repeat(str(model)), self._model_patterns)):
            return {}
        contents = [message["content"] for message in messages if message["role"] == "system"]
        if len(contents) == 0 or (len(contents) == 1 and messages[0]["role"] == "system"):
            return {}
        others = [message for message in messages if message["role"] != "system"]
        return {"messages": [{"role": "system", "content": "".join(map(_system_message_text, contents))}, *others]}


def _system_message_text(content: object) -> str:
    """Join the text parts of a system message's content into one text."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return str(content)
