"""The access line of nearly all requests, as JSON.

It is compiled. The formatters cannot be, as they inherit from classes of logging, which are not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_VALUE_CHARS: Final = 2048
"""A longer message or value is cut."""
REQUEST: Final = {"level": "INFO", "logger": "proxy.access", "message": "request"}
"""What all access lines begin with, behind their time."""
_MEMBERS: Final = b'",' + orjson.dumps(REQUEST)[1:-1] + b","
_DELETE: Final = 0x7F


def plain_request_line(created: float, fields: Mapping[str, object]) -> bytes | None:
    """Return the line of a finished request, with its end; None: it needs the care of a formatter.

    Nearly all lines are short plain ASCII and have no error: they are what orjson makes of them.

    Args:
        created: The system's time at the end of the request, in seconds.
        fields: The members of the line.
    """
    if not fields or fields.get("error") is not None:
        return None
    try:
        members = orjson.dumps(fields)
    except TypeError:
        return None
    line = b"".join((b'{"time":"', timestamp(created).encode(), _MEMBERS, members[1:], b"\n"))
    return line if len(line) <= MAX_VALUE_CHARS and line.isascii() and _DELETE not in line else None


_second = (0, "")
"""The last second whose date was formatted, and that date."""
_MILLISECONDS: Final = tuple([f".{number:03d}Z" for number in range(1000)])


def timestamp(created: float) -> str:
    """Return a time as UTC with milliseconds. The date is formatted once a second."""
    global _second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return _second[1] + _MILLISECONDS[int((created - whole) * 1000)]
