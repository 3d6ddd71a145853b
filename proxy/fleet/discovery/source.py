"""The port for discovery: where instances may come from, besides the configuration and administrators."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from proxy.common.backend import Backend

if TYPE_CHECKING:
    from proxy.settings import Settings

Wanted: TypeAlias = Collection[Backend]
"""All instances that a source names, of all roles. Those that are `trusted` are sent the gateway's engine key; their
addresses have to be inside `admin.networks` unless the configuration names them, too. The slots do not count."""


class Source(Protocol):
    """One file, one DNS name, …: what fails as a whole. One that equals another watches the same, and is not begun anew
    by a reload; a frozen dataclass of its options does.
    """

    @property
    def name(self) -> str:
        """What tells it from others of its kind, in the words of the settings."""

    def watch(self) -> AsyncGenerator[Wanted, None]:
        """Yield what there is to be, at once and whenever it may be another, always all of it; what was yielded last
        holds. Raise what is wrong if that cannot be told: it is asked anew, soon and then every few seconds. Having
        nothing more to tell is no failure.
        """


MakeSources: TypeAlias = "Callable[[Settings], Iterable[Source]]"
"""The sources of one kind as the settings want them, each name once. It neither waits nor fails."""
