"""The result of a reload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Changes by one reload of the configuration."""

    options: tuple[str, ...] = ()
    """Names of the options with new values."""
    added: tuple[str, ...] = ()
    """Names of the configured instances that joined."""
    removed: tuple[str, ...] = ()
    """Names of the configured instances that drain now."""

    def __str__(self) -> str:
        told = (("changed", self.options), ("added", self.added), ("removed", self.removed))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in told if names) or "nothing has changed"
