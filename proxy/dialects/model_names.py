"""What clients call models that engines call otherwise (`models.aliases`)."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.call import Call

_WILDCARDS = frozenset("*?[")


class ModelNames:
    """`aliases`: `what clients say=what engines serve`. The first that fits a name counts, and those without wildcards
    come before all others. A name that engines serve, since some alias stands for it, is itself.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        pairs = [(said, served) for said, _, served in (alias.rpartition("=") for alias in aliases)]
        self.exact: Mapping[str, str] = {said: served for said, served in pairs if _WILDCARDS.isdisjoint(said)}
        """Those that can be listed."""
        self._patterns = [(said, served) for said, served in pairs if said not in self.exact]
        self._served = frozenset(served for _, served in pairs)
        self.has_aliases = bool(pairs)

    def served(self, name: str) -> str:
        """What engines call it."""
        if name in self.exact or name in self._served:
            return self.exact.get(name, name)
        return next((served for pattern, served in self._patterns if fnmatchcase(name, pattern)), name)

    def translated(self, call: Call) -> Call:
        """The call as engines are asked. Its answer has the client's name."""
        said = call.values.get("model")
        if not self._served or not isinstance(said, str) or (served := self.served(said)) == said:
            return call
        call.document.values.update({"model": served})
        return replace(call, changes={**call.changes, "model": served}, alias=said)
