"""What a reload has changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload has changed: options, by name, and the configured instances that came, and that drain now."""

    options: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = (("changed", self.options), ("added", self.added), ("removed", self.removed))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in told if names) or "nothing has changed"
