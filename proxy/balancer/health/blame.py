"""Whose fault the failures of one client's request were: the engines', or its own.

A request that breaks down on one engine and is served by another tells something about the first one. One that breaks
down the same way on two engines tells nothing about either: what they have in common is the request. So no
failure is held against an engine before it is known how the request fared elsewhere, and requests that fail everywhere
eject no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from proxy.common.errors import Failure

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.common.backend import Backend, Role
    from proxy.common.errors import UpstreamError

    Ways = dict[tuple[Role, bool], set[Backend]]
    """Where a request has broken down, by role, and by whether engines said so or broke off."""

_EVERYWHERE: Final = 2


class Blame:
    """The blame of one unit of a request; `ways` is shared by all its units. `with` it, outside of all leases."""

    __slots__ = ("_errors", "_ways")

    def __init__(self, ways: Ways | None = None) -> None:
        self._ways: Ways = {} if ways is None else ways
        self._errors: list[UpstreamError] = []

    @property
    def is_open(self) -> bool:
        """Whether something is to be settled."""
        return bool(self._errors)

    def failed(self, error: UpstreamError) -> None:
        """An attempt failed."""
        if error.is_breakdown:
            self._errors.append(error)
            self._ways.setdefault(_way(error), set()).add(error.backend)

    def settle(self) -> None:
        """It is known how the request fares elsewhere, or that it goes nowhere else: tell the balancer who is to
        blame.
        """
        for error in self._errors:
            tell, error.blame = error.blame, None
            if tell is not None and len(self._ways[_way(error)]) < _EVERYWHERE:
                tell()
        self._errors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._errors:
            self.settle()


def _way(error: UpstreamError) -> tuple[Role, bool]:
    return error.backend.role, error.failure is Failure.STATUS
