"""The port for discovery: where instances may come from, besides the configuration and administrators."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from typing import TYPE_CHECKING, Protocol, TypeAlias

from proxy.backend import Backend

if TYPE_CHECKING:
    from proxy.settings import Settings

Wanted: TypeAlias = Collection[Backend]
"""All instances that a source names, of all roles. Those that are `trusted` are sent the gateway's engine key; their
addresses have to be inside `admin.networks` unless the configuration names them, too. The slots do not count."""


class Source(Protocol):
    """One that equals another watches the same, and is not begun anew by a reload; a frozen dataclass of its options
    does.
    """

    def watch(self) -> AsyncGenerator[Wanted, None]:
        """Yield what there is to be, at once and whenever it may be another, always all of it; what was yielded last
        holds. Raise what is wrong if that cannot be told: it is asked anew some seconds later. Having nothing more to
        tell is no failure.
        """


MakeSource: TypeAlias = "Callable[[Settings], Source | None]"
"""A source as the settings want it; None: they want none. It neither waits nor fails."""
