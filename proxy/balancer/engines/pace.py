"""How long a backend usually takes between two parts of an answer. Pure: the caller has the clock."""

from __future__ import annotations

from typing import Final

_REMEMBERED_SECONDS: Final = 3600.0
"""Seconds of all answers together, of which the older half counts half."""


class Pace:
    """A mean over the answers of one backend, which forgets."""

    __slots__ = ("_parts", "_seconds")

    def __init__(self) -> None:
        self._parts = 0.0
        self._seconds = 0.0

    def saw(self, parts: int, seconds: float) -> None:
        """Take in that so many parts came in so many seconds, summed over answers."""
        self._parts += parts
        self._seconds += seconds
        if self._seconds > _REMEMBERED_SECONDS:
            self._parts /= 2
            self._seconds /= 2

    @property
    def gap_seconds(self) -> float:
        """The usual time between two parts; 0 as long as nothing is known."""
        return self._seconds / self._parts if self._parts else 0.0
