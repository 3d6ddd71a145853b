"""The account of request bodies in memory: how many bytes all of them may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from proxy.common.errors import overloaded

if TYPE_CHECKING:
    from types import TracebackType


class BodyBuffers:
    """One worker's request bodies."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The bytes of all bodies. Only holds change it, and `take` and `give_back`."""

    def take(self, body_bytes: int) -> bool:
        """Account for so many bytes, until they are given back; False: there is no room for them. A single body always
        fits.
        """
        held = self.held_bytes
        if held and held + body_bytes > self.max_bytes:
            return False
        self.held_bytes = held + body_bytes
        return True

    def give_back(self, body_bytes: int) -> None:
        """End the account of bytes that `take` has accounted for."""
        self.held_bytes -= body_bytes

    def hold(self, body_bytes: int) -> Hold:
        """Account for a body of this length, which is about to be read, for as long as the block lasts."""
        return Hold(self, body_bytes)


class Hold:
    """One request body's part of the account. Get it from `hold`; `with`, as there is nothing to wait for."""

    __slots__ = ("_body_bytes", "_buffers", "_held_bytes")

    def __init__(self, buffers: BodyBuffers, body_bytes: int) -> None:
        self._buffers = buffers
        self._body_bytes = body_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        self.resize(self._body_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def resize(self, body_bytes: int) -> None:
        """Set the length of the body, for one that did not tell it. Raises Overloaded, and then holds what it held.

        A single body always fits, however long it is.
        """
        buffers = self._buffers
        others = buffers.held_bytes - self._held_bytes
        if others and body_bytes > self._held_bytes and others + body_bytes > buffers.max_bytes:
            raise overloaded("buffers_full", "the gateway has reached its limit of request bodies in memory")
        buffers.held_bytes = others + body_bytes
        self._held_bytes = body_bytes

    def add(self, body_bytes: int) -> None:
        """Hold that many bytes more. Raises Overloaded."""
        if body_bytes:
            self.resize(self._held_bytes + body_bytes)
