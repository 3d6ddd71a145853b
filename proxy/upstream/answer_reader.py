"""Bytes in, an answer out: ordinary ones are read here by slices, whatever else HTTP/1 allows by httptools.

Both ways come to the same: this one accepts a subset, and never refuses anything. What is not in it, were it in the
middle of a body, is httptools' to judge. A parser's callbacks cost more than everything else that is done with a token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from proxy.upstream.any_answer import AnyAnswer
from proxy.upstream.plain_head import PlainHead, PlainHeaders

if TYPE_CHECKING:
    from collections.abc import Mapping

_size_line: Final = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n").match
_part_of_size_line: Final = re.compile(rb"[0-9A-Fa-f]{1,7}\r?").fullmatch
_CRLF: Final = b"\r\n"
_END_MARK: Final = b"0\r\n\r\n"


class AnswerReader:
    """Reads the answers on one connection: one after each `begin`."""

    __slots__ = ("_any", "_is_chunked", "_keeps_alive", "_left", "_line", "headers", "is_complete", "status")

    def __init__(self) -> None:
        self._any: AnyAnswer | None = None
        self.begin()

    def begin(self) -> None:
        """What comes next is the answer to another request."""
        self.close()
        self.status = 0
        """0 until the headers are there."""
        self.headers: Mapping[str, str] = {}
        """Lower-case names; the last one of equal names. Without trailers."""
        self.is_complete = False
        self._keeps_alive = True
        self._is_chunked = False
        self._left = 0  # of the body that has a length, or of the present chunk and the line end behind it
        self._line = b""  # the beginning of a chunk's size line

    def close(self) -> None:
        """Nothing more is read."""
        if self._any is not None:
            self._any.close()
            self._any = None

    @property
    def keeps_alive(self) -> bool:
        """The connection can carry another exchange, if the answer is complete."""
        return self._keeps_alive if self._any is None else self._any.keeps_alive

    @property
    def is_between_chunks(self) -> bool:
        """What comes next is the first byte of a chunk, or of the end mark."""
        return self._is_chunked and not self._left and not self._line and not self.is_complete and self._any is None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return the body in them. Raises BadAnswer, after which status and headers count."""
        if self._any is not None:
            return self._feed_any(data)
        if not self.status:
            return self._begin_with(data)
        if self._is_chunked:
            return self._feed_chunks(self._line + data if self._line else data)
        if len(data) > self._left:
            return self._give_up(data, self._left, [])
        self._left -= len(data)
        self.is_complete = not self._left
        return data

    def _begin_with(self, data: bytes) -> bytes:
        head = PlainHead.of(data)
        if head is None or (head.length is not None and len(data) - head.end > head.length):
            self._any = AnyAnswer()
            return self._feed_any(data)
        self.status, self.headers, self._keeps_alive = head.status, PlainHeaders(head.fields), head.keeps_alive
        body = data[head.end :]
        if head.length is None:
            self._is_chunked = True
            return self._feed_chunks(body) if body else body
        self._left = head.length - len(body)
        self.is_complete = not self._left
        return body

    def _feed_chunks(self, data: bytes) -> bytes:
        """`data` begins with what is left of the present chunk, or else with a size line."""
        pieces: list[bytes] = []
        at, size, left = 0, len(data), self._left
        self._line = b""
        while at < size:
            if not left:
                line = _size_line(data, at)
                if line is None:
                    if not _part_of_size_line(data[at : at + 9]):
                        return self._give_up(data[at:], 0, pieces)
                    self._line = data[at:]
                    break
                length = int(line[1], 16)
                if not length:
                    if data[at:] != _END_MARK:  # trailers, or only a part of it
                        return self._give_up(data[at:], 0, pieces)
                    self.is_complete = True
                    break
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
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _give_up(self, data: bytes, left: int, pieces: list[bytes]) -> bytes:
        """Have httptools read the rest of the body, which stands `left` bytes before the end of a length or a chunk.

        It is brought there by an answer of this kind; `pieces` of the body were read before.
        """
        connection = b"" if self._keeps_alive else b"Connection: close\r\n"
        if not self._is_chunked:
            framing = b"Content-Length: %d\r\n\r\n" % left
        else:
            framing = b"Transfer-Encoding: chunked\r\n\r\n" + (b"", b"1\r\nx\r", b"1\r\nx")[left]
        self._any = AnyAnswer()
        self._any.feed(b"HTTP/1.1 200 OK\r\n%b%b" % (connection, framing))
        pieces.append(self._feed_any(data))
        return b"".join(pieces)

    def _feed_any(self, data: bytes) -> bytes:
        reader = self._any
        assert reader is not None
        try:
            return reader.feed(data)
        finally:
            if not self.status:
                self.status, self.headers = reader.status, reader.headers
            self.is_complete = reader.is_complete
