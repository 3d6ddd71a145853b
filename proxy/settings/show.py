"""The current settings as YAML, each option with its origin as a comment, and with masked keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from proxy.settings.sources import OPTIONS

if TYPE_CHECKING:
    from proxy.settings.load import Loaded


def to_yaml(loaded: Loaded) -> str:
    """Return one line per option, and one line per item of a list. Without keys, it loads as the same settings."""
    tree: dict[str, Any] = loaded.settings.model_dump(mode="json")
    lines: list[str] = []
    section = ""
    for option in OPTIONS:
        parent, _, name = option.rpartition(".")
        if parent != section:
            section = parent
            lines.append(f"{section}:")
        value = (tree[section] if section else tree)[name]
        indent = "  " if section else ""
        if isinstance(value, list) and value:
            lines.append(f"{indent}{name}:  # {loaded.origins[option]}")
            lines += [f"{indent}  - {_scalar(item)}" for item in value]
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}  # {loaded.origins[option]}")
    return "\n".join(lines)


def _scalar(value: object) -> str:
    return yaml.safe_dump(value, width=float("inf")).removesuffix("\n").removesuffix("\n...")
