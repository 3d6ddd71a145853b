"""Reads the answers of engines: slices the bytes of common answers, and parses all others with httptools.

Slicing is used because the callbacks of a parser cost more than all other work on a token. The slicing reader accepts a
subset of HTTP/1 and rejects nothing. At the first byte outside the subset, even inside a body, httptools continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from proxy.upstream.any_answer import AnyAnswer

MAX_CHUNK_BYTES: Final = 4096
NO_LINE: Final = bytes(MAX_CHUNK_BYTES + 1)
"""A text with which no chunk of at most MAX_CHUNK_BYTES begins."""


def _size_lines() -> list[bytes]:
    lines = [NO_LINE] * (MAX_CHUNK_BYTES + 1)
    for size in range(1, MAX_CHUNK_BYTES - len(b"fff\r\n\r\n")):
        line = b"%x\r\n" % size
        lines[len(line) + size + len(b"\r\n")] = line
    return lines


SIZE_LINES: Final = _size_lines()
"""Size lines by the length of the whole chunk, up to MAX_CHUNK_BYTES. For example, `a\\r\\n` is at index 15."""

_size_line: Final = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n").match
_part_of_size_line: Final = re.compile(rb"[0-9A-Fa-f]{1,7}\r?").fullmatch
_CRLF: Final = b"\r\n"
_BLANK_LINE: Final = b"\r\n\r\n"
_EVENT_END: Final = b"\n\n"
_MAX_PLAIN_BYTES: Final = 4096  # limit for a head, or for chunks that are read at once
_END_MARK: Final = b"0\r\n\r\n"


class AnswerReader:
    """Reads the answers on one connection. An answer ends before the next one begins."""

    __slots__ = ("_any", "_is_chunked", "_left", "_line", "headers", "is_complete", "keeps_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        """Status of the current answer; 0 until its headers have arrived."""
        self.headers: Mapping[str, str] = {}
        """Headers by lower-case name, without trailers. If a name is repeated, the last value is used."""
        self.is_complete = False
        self.keeps_alive = True
        """Whether the connection can carry another exchange, if the answer is complete."""
        self._any: AnyAnswer | None = None
        self._is_chunked = False
        self._left = 0  # bytes left of a body with a length, or of the current chunk with its line end
        self._line = b""  # the beginning of a chunk's size line

    def close(self) -> None:
        """Release the HTTP parser after the last answer."""
        if self._any is not None:
            self._any.close()
            self._any = None

    @property
    def is_between_chunks(self) -> bool:
        """Whether the next byte is the first of a chunk or of the end mark."""
        return self._is_chunked and not self._left and not self._line and not self.is_complete and self._any is None

    def feed(self, data: bytes) -> bytes:
        """Add bytes, and return the body in them. Raises BadAnswer; status and headers stay valid.

        All common cases are in this one function, because each call would cost more than the work in it.
        """
        if self._any is not None:
            if not self.is_complete:
                return self._feed_any(data)
            self.close()
        at = 0
        if self.is_complete or not self.status:
            self.status, self.is_complete = 0, False
            blank = data.find(_BLANK_LINE, 0, _MAX_PLAIN_BYTES)
            known = plain_head(data[:blank]) if blank >= 0 else None
            if known is None:
                return self._feed_any(data)
            status, headers, length, keeps_alive = known
            at = blank + len(_BLANK_LINE)
            left = 0 if length is None else length - (len(data) - at)
            if left < 0:
                return self._feed_any(data)
            self.status, self.headers, self.keeps_alive = status, headers, keeps_alive
            if length is not None:
                self._is_chunked, self._left, self.is_complete = False, left, not left
                return data[at:]
            self._is_chunked, self._left, self._line = True, 0, b""
        elif not self._is_chunked:
            left = self._left - len(data)
            if left < 0:
                return self._give_up(data, self._left, [])
            self._left, self.is_complete = left, not left
            return data
        elif self._line:
            data, self._line = self._line + data, b""
        left, size = self._left, len(data)
        if not left and size - at <= _MAX_PLAIN_BYTES:
            # Engines write whole chunks with one event each. The end mark may follow.
            pieces = data[at:].split(_EVENT_END + _CRLF)
            rest = pieces.pop()
            if not rest or rest == _END_MARK:
                events = []
                for piece in pieces:
                    size_line = SIZE_LINES[len(piece) + 4]
                    begin = len(size_line)
                    if piece[:begin] != size_line:
                        break
                    events.append(piece[begin:])
                else:
                    self.is_complete = bool(rest)
                    events.append(b"")
                    return _EVENT_END.join(events)
        # The rest of the current chunk, or a size line, is next.
        pieces = []
        while at < size:
            if not left:
                line = _size_line(data, at)
                if line is None or not (length := int(line[1], 16)):
                    return self._read_no_chunk(data[at:], pieces)
                begin = line.end()
                if data.startswith(_CRLF, begin + length):
                    pieces.append(data[begin : begin + length])
                    at = begin + length + 2
                else:
                    at, left = begin, length + 2
            elif left > 2:
                piece = data[at : at + left - 2]
                pieces.append(piece)
                at += len(piece)
                left -= len(piece)
            else:
                line_end = data[at : at + left]
                if not _CRLF.startswith(line_end, 2 - left):
                    return self._give_up(data[at:], left, pieces)
                at += len(line_end)
                left -= len(line_end)
        self._left = left
        return b"".join(pieces)

    def _read_no_chunk(self, data: bytes, pieces: list[bytes]) -> bytes:
        """Read the end mark, or an incomplete size line. httptools reads everything else.

        Args:
            data: All bytes after the last chunk.
            pieces: Parts of the body that were read before.
        """
        if data == _END_MARK:
            self.is_complete = True
        elif _part_of_size_line(data[:9]):
            self._line = data
        else:  # trailers, a part of the end mark, or an invalid size
            return self._give_up(data, 0, pieces)
        self._left = 0
        return b"".join(pieces)

    def _give_up(self, data: bytes, left: int, pieces: list[bytes]) -> bytes:
        """Let httptools read the rest of an unusual answer's body.

        A made-up beginning of an answer brings the parser to the current state.

        Args:
            data: The bytes that were not read yet.
            left: The number of bytes that are missing of the body, or of the current chunk.
            pieces: Parts of the body that were read before.
        """
        connection = b"" if self.keeps_alive else b"Connection: close\r\n"
        if not self._is_chunked:
            framing = b"Content-Length: %d\r\n\r\n" % left
        else:
            framing = b"Transfer-Encoding: chunked\r\n\r\n" + (b"", b"1\r\nx\r", b"1\r\nx")[left]
        self._any = AnyAnswer()
        self._any.feed(b"HTTP/1.1 200 OK\r\n%b%b" % (connection, framing))
        pieces.append(self._feed_any(data))
        return b"".join(pieces)

    def _feed_any(self, data: bytes) -> bytes:
        reader = self._any = self._any or AnyAnswer()
        try:
            return reader.feed(data)
        finally:
            if not self.status:
                self.status, self.headers = reader.status, reader.headers
            self.is_complete, self.keeps_alive = reader.is_complete, reader.keeps_alive


# Heads

# A subset of RFC 9112: the tokens and field values that it defines, complete lines, one space after the version.
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)+)"
)
# Headers that determine the length of the body, or the end of the connection.
_FRAMING: Final = re.compile(
    rb"^(content-length|transfer-encoding|connection|proxy-connection|upgrade):[\t ]*([^\r]*)", re.MULTILINE
)
_LENGTH: Final = re.compile(rb"0|[1-9][0-9]{0,14}").fullmatch
_WITHOUT_BODY: Final = (204, 304)
_CHUNKED: Final = b"transfer-encoding", b"chunked"


class PlainHeaders(Mapping[str, str]):
    """The header lines as a mapping with lower-case names, parsed at the first use.

    If a name is repeated, the last value is used.
    """

    __slots__ = ("_by_name", "_fields")

    def __init__(self, fields: bytes) -> None:
        """Store the header lines. Each line is preceded by the line end of the previous line."""
        self._fields = fields
        self._by_name: dict[str, str] | None = None

    def _parse_headers(self) -> dict[str, str]:
        if self._by_name is None:
            lines = (line.partition(":") for line in self._fields.decode("latin-1").split("\r\n") if line)
            self._by_name = {name.lower(): value.lstrip("\t ") for name, _, value in lines}
        return self._by_name

    def __getitem__(self, name: str) -> str:
        return self._parse_headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parse_headers())

    def __len__(self) -> int:
        return len(self._parse_headers())


class PlainHead(NamedTuple):
    """The status and headers of a common answer, parsed."""

    status: int
    """Status of the answer, at least 200."""
    headers: PlainHeaders
    length: int | None
    """Length of the body in bytes; None if the body is chunked."""
    keeps_alive: bool
    """Whether the connection stays open after the answer."""


# Engines repeat a head for a second, until its date changes. So most heads are found in the cache.
@lru_cache(maxsize=128)
def plain_head(head: bytes) -> PlainHead | None:
    """Parse the bytes before the first blank line. Return None if the answer is not a common one."""
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
