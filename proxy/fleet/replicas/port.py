"""What the exchange wants of a store, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class StoreFailed(Exception):
    """It could not be reached, took too long, or said no."""


class StoreRefused(StoreFailed):
    """It said no."""


class StorePort(Protocol):
    """One gateway's access. All of it raises StoreFailed."""

    async def exchange(self, message: bytes, lost: Collection[str] = ()) -> dict[str, bytes]:
        """Tell this, and hear what all have told, by name. `lost`: names that are deleted."""

    async def tell(self, news: bytes) -> None:
        """Have the others that listen now hear this."""

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Call this with whatever another one tells, until the connection is lost. Raises what it raises, too."""

    async def leave(self) -> None:
        """Nothing of this gateway is to be heard any more."""
