"""Number types for argparse, whose errors state the expectation."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Final

_TOO_MUCH: Final = 1e9
"""32 years in seconds, more than any clock needs"""


def whole_number(text: str) -> int:
    """Parse the value of a flag that is a whole number from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentTypeError("must be a whole number, 0 or more")
    return int(text)


def positive_whole_number(text: str) -> int:
    """Parse the value of a flag that is a whole number from 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)


def duration_seconds(text: str) -> float:
    """Return a duration in seconds, which may be 0."""
    value = _finite_number(text)
    if value is None or value < 0:
        raise ArgumentTypeError("must be a number of seconds, 0 or more and below 1e9")
    return value


def positive_number(text: str) -> float:
    """Parse the value of a flag that is a number above 0."""
    value = _finite_number(text)
    if value is None or value <= 0:
        raise ArgumentTypeError("must be a number above 0 and below 1e9")
    return value


def _finite_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value < _TOO_MUCH else None
