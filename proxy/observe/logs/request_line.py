"""The access line of nearly all requests, as JSON.

This module is compiled. The formatters cannot be, because they inherit from classes of logging.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_VALUE_CHARS: Final = 2048
"""Maximum length of a message or value; longer ones are cut."""
REQUEST: Final = {"level": "INFO", "logger": "proxy.access", "message": "request"}
"""Beginning of all access lines, after the time."""
_MEMBERS: Final = b'",' + orjson.dumps(REQUEST)[1:-1] + b","
_DELETE: Final = 0x7F


def plain_request_line(created: float, fields: Mapping[str, object]) -> bytes | None:
    """Return the line of a finished request, with its line end, or None if a formatter must write it.

    Nearly all lines are short plain ASCII without an error, and orjson writes them as they are.

    Args:
        created: System time at the end of the request, in seconds.
        fields: Members of the line.
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
"""The last formatted second, and its text."""
_MILLISECONDS: Final = tuple([f".{number:03d}Z" for number in range(1000)])


def timestamp(created: float) -> str:
    """Return a time as UTC with milliseconds. The date is formatted once a second."""
    global _second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return _second[1] + _MILLISECONDS[int((created - whole) * 1000)]
