"""Reads the answers of engines: slices the bytes of common answers, and parses all others with httptools.

Slicing is used because the callbacks of a parser cost more than all other work on a token. The slicing reader accepts a
subset of HTTP/1 and rejects nothing. At the first byte outside the subset, even inside a body, httptools continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from proxy.upstream.any_answer import UnusualAnswer

MAX_CHUNK_BYTES: Final = 4096
NO_LINE: Final = bytes(MAX_CHUNK_BYTES + 1)
"""A text with which no chunk of at most MAX_CHUNK_BYTES begins."""


def _make_size_lines() -> list[bytes]:
    lines = [NO_LINE] * (MAX_CHUNK_BYTES + 1)
    for size in range(1, MAX_CHUNK_BYTES - len(b"fff\r\n\r\n")):
        line = b"%x\r\n" % size
        lines[len(line) + size + len(b"\r\n")] = line
    return lines


SIZE_LINES: Final = _make_size_lines()
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

    def __init__(self) -> None:
        self.status = 0
        """Status of the current answer; 0 until its headers have arrived."""
        self.headers: Mapping[str, str] = {}
        """Headers by lower-case name, without trailers. If a name is repeated, the last value is used."""
        self.is_complete = False
        self.keeps_alive = True
        """Whether the connection can carry another exchange, if the answer is complete."""
        self._unusual_answer: UnusualAnswer | None = None
        self._is_chunked = False
        self._left_bytes = 0  # bytes left of a body with a length, or of the current chunk with its line end
        self._partial_size_line = b""  # the beginning of a chunk's size line

    def close_parser(self) -> None:
        """Release the HTTP parser after the last answer."""
        if self._unusual_answer is not None:
            self._unusual_answer.close_parser()
            self._unusual_answer = None

    @property
    def is_between_chunks(self) -> bool:
        """Whether the next byte is the first of a chunk or of the end mark."""
        return (
            self._is_chunked
            and not self._left_bytes
            and not self._partial_size_line
            and not self.is_complete
            and self._unusual_answer is None
        )

    def add_bytes(self, data: bytes) -> bytes:
        """Add bytes, and return the body in them. Raises BadAnswer; status and headers stay valid.

        All common cases are in this one function, because each call would cost more than the work in it.
        """
        if self._unusual_answer is not None:
            if not self.is_complete:
                return self._feed_httptools(data)
            self.close_parser()
        at = 0
        if self.is_complete or not self.status:
            self.status, self.is_complete = 0, False
            blank = data.find(_BLANK_LINE, 0, _MAX_PLAIN_BYTES)
            known = parse_plain_head(data[:blank]) if blank >= 0 else None
            if known is None:
                return self._feed_httptools(data)
            status, headers, length, keeps_alive = known
            at = blank + len(_BLANK_LINE)
            left = 0 if length is None else length - (len(data) - at)
            if left < 0:
                return self._feed_httptools(data)
            self.status, self.headers, self.keeps_alive = status, headers, keeps_alive
            if length is not None:
                self._is_chunked, self._left_bytes, self.is_complete = False, left, not left
                return data[at:]
            self._is_chunked, self._left_bytes, self._partial_size_line = True, 0, b""
        elif not self._is_chunked:
            left = self._left_bytes - len(data)
            if left < 0:
                return self._fall_back_to_httptools(data, self._left_bytes, [])
            self._left_bytes, self.is_complete = left, not left
            return data
        elif self._partial_size_line:
            data, self._partial_size_line = self._partial_size_line + data, b""
        left, size = self._left_bytes, len(data)
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
                    return self._read_end_or_size_line(data[at:], pieces)
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
                    return self._fall_back_to_httptools(data[at:], left, pieces)
                at += len(line_end)
                left -= len(line_end)
        self._left_bytes = left
        return b"".join(pieces)

    def _read_end_or_size_line(self, data: bytes, pieces: list[bytes]) -> bytes:
        """Read the end mark, or an incomplete size line. httptools reads everything else.

        Args:
            data: All bytes after the last chunk.
            pieces: Parts of the body that were read before.
        """
        if data == _END_MARK:
            self.is_complete = True
        elif _part_of_size_line(data[:9]):
            self._partial_size_line = data
        else:  # trailers, a part of the end mark, or an invalid size
            return self._fall_back_to_httptools(data, 0, pieces)
        self._left_bytes = 0
        return b"".join(pieces)

    def _fall_back_to_httptools(self, data: bytes, left: int, pieces: list[bytes]) -> bytes:
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
        self._unusual_answer = UnusualAnswer()
        self._unusual_answer.add_bytes(b"HTTP/1.1 200 OK\r\n%b%b" % (connection, framing))
        pieces.append(self._feed_httptools(data))
        return b"".join(pieces)

    def _feed_httptools(self, data: bytes) -> bytes:
        reader = self._unusual_answer = self._unusual_answer or UnusualAnswer()
        try:
            return reader.add_bytes(data)
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

    def __init__(self, fields: bytes) -> None:
        """Store the header lines. Each line is preceded by the line end of the previous line."""
        self._header_lines = fields
        self._values_by_name: dict[str, str] | None = None

    def _parse_headers(self) -> dict[str, str]:
        if self._values_by_name is None:
            lines = (line.partition(":") for line in self._header_lines.decode("latin-1").split("\r\n") if line)
            self._values_by_name = {name.lower(): value.lstrip("\t ") for name, _, value in lines}
        return self._values_by_name

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
    response_headers: PlainHeaders
    body_length: int | None
    """Length of the body in bytes; None if the body is chunked."""
    keeps_alive: bool
    """Whether the connection stays open after the answer."""


# Engines repeat a head for a second, until its date changes. So most heads are found in the cache.
@lru_cache(maxsize=128)
def parse_plain_head(raw_head: bytes) -> PlainHead | None:
    """Parse the bytes before the first blank line. Return None if the answer is not a common one."""
    match = _HEAD.fullmatch(raw_head)
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
