"""Chat templates that take a message of the system at the beginning only, as some of Qwen's do (`models.system_first`).

In APIs that are translated to chats clients say more of it later, as Claude Code does. vLLM tries its template and, if
it must, joins them to the first (`_detect_merge_inline_system`); nobody tells a gateway what the template takes. It is
not done everywhere, because each new one changes the beginning of the prompt, and then no prefix cache has the rest.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.call import Call


class SystemFirst:
    """`models`: names that engines serve, with wildcards."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = models

    def arranged(self, call: Call) -> Call:
        """The call as such a model's engines take it."""
        changes = self.changes(call.values)
        if not changes:
            return call
        call.document.values.update(changes)
        return call.part(changes)

    def changes(self, chat: Mapping[str, Any]) -> dict[str, object]:
        """Members that differ; none if the chat's model takes it as it is."""
        model, messages = chat.get("model"), chat["messages"]
        if not any(fnmatchcase(str(model), pattern) for pattern in self._models):
            return {}
        said = [message["content"] for message in messages if message["role"] == "system"]
        if len(said) == 0 or (len(said) == 1 and messages[0]["role"] == "system"):
            return {}
        others = [message for message in messages if message["role"] != "system"]
        return {"messages": [{"role": "system", "content": "".join(map(_text, said))}, *others]}


def _text(content: object) -> str:
    """Of a message of the system, which has nothing else."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return str(content)
