"""Whether all engines serve the same models: a request for one comes to engines without a look at what they serve."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.backend import Backend

_MOST_NAMES = 3


def odd_ones(models: Mapping[Backend, frozenset[str]]) -> Mapping[Backend, str]:
    """The backends whose models are others than most have, of equally many those that come first, and what that means.

    Those of which nothing is known are to be left out.
    """
    if len(set(models.values())) < 2:
        return {}
    common = Counter(models.values()).most_common(1)[0][0]
    other = next(backend for backend, its in models.items() if its == common)
    theirs = f"{other.role} instance {other.name} serves {_names(common)}"
    return {
        backend: f"serves {_names(its)}, and {theirs}: a request for what only one of them serves fails at the other"
        for backend, its in models.items()
        if its != common
    }


def _names(models: frozenset[str]) -> str:
    """The names, as many as fit into a line of the log."""
    shown = [repr(name[:64]) for name in sorted(models)[:_MOST_NAMES]]
    return ", ".join(shown) + (f" and {len(models) - _MOST_NAMES} others" if len(models) > _MOST_NAMES else "")
