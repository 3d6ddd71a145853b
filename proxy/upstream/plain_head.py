"""The head of an ordinary answer, read without a parser. What it does not accept is not wrong, only not ordinary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# A subset of RFC 9112: the tokens and field values that it defines, complete lines, one space after the version.
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)+)"
)
# Whatever says how long the body is, or what becomes of the connection.
_FRAMING: Final = re.compile(
    rb"^(content-length|transfer-encoding|connection|proxy-connection|upgrade):[\t ]*([^\r]*)", re.MULTILINE
)
_LENGTH: Final = re.compile(rb"0|[1-9][0-9]{0,14}").fullmatch
_WITHOUT_BODY: Final = (204, 304)
_CHUNKED: Final = b"transfer-encoding", b"chunked"


class PlainHeaders(Mapping[str, str]):
    """Header lines as a mapping, which is made when somebody looks: lower-case names, the last one of equal names."""

    __slots__ = ("_by_name", "_fields")

    def __init__(self, fields: bytes) -> None:
        """`fields`: each behind the end of the line before it."""
        self._fields = fields
        self._by_name: dict[str, str] | None = None

    def _all(self) -> dict[str, str]:
        if self._by_name is None:
            lines = (line.partition(":") for line in self._fields.decode("latin-1").split("\r\n") if line)
            self._by_name = {name.lower(): value.lstrip("\t ") for name, _, value in lines}
        return self._by_name

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class PlainHead(NamedTuple):
    """What there is to know of it."""

    status: int
    """From 200 on."""
    headers: PlainHeaders
    length: int | None
    """Of the body in bytes; None: it is chunked."""
    keeps_alive: bool


# Engines write the same head for a second, until its date is another: then it is looked up instead of being read.
@lru_cache(maxsize=128)
def plain_head(head: bytes) -> PlainHead | None:
    """What the bytes before the first blank line say; None where they are no head, or httptools should read it."""
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    status, fields = int(match[1]), match[2]
    keeps_alive, framing = True, None
    for name, value in _FRAMING.findall(fields.lower()):
        if name == b"connection" and value in (b"keep-alive", b"close") and keeps_alive:
            keeps_alive = value != b"close"
        elif framing is None and (name == b"content-length" or (name, value) == _CHUNKED):
            framing = value
        else:
            return None
    if framing is None or status in _WITHOUT_BODY:
        return None
    if framing == _CHUNKED[1]:
        return PlainHead(status, PlainHeaders(fields), None, keeps_alive)
    return PlainHead(status, PlainHeaders(fields), int(framing), keeps_alive) if _LENGTH(framing) else None
