"""The engines in a file that the gateway watches, instead of in its configuration: `scripts/soak --discovery`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class ListedEngines:
    """Who keeps the file. `settings` has the gateway read it."""

    def __init__(self, path: Path, engines: Iterable[tuple[str, str]]) -> None:
        """Role and instance of each."""
        self._path = path
        self._engines = list(engines)
        self.settings: dict[str, Any] = {"discovery": {"files": [str(path)]}}
        self.repair()

    def add(self, role: str, instance: str) -> None:
        self._engines.append((role, instance))
        self.repair()

    def remove(self, role: str, instance: str) -> None:
        self._engines.remove((role, instance))
        self.repair()

    def spoil(self) -> None:
        """It ends in the middle, and nobody knows which engines there are."""
        text = self._path.read_text()
        self._replace(text[: len(text) // 2])

    def repair(self) -> None:
        """It has those that there are."""
        groups = [{"targets": [instance], "labels": {"role": role}} for role, instance in self._engines]
        self._replace(json.dumps(groups))

    def _replace(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(text)
        new.replace(self._path)
