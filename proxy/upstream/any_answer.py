"""Reads every HTTP/1 answer with httptools, including interim answers, trailers and bodies without a length."""

from __future__ import annotations

import httptools


class BadAnswer(ValueError):
    """The bytes of an engine are not one HTTP/1 answer."""


class UnusualAnswer:
    """Reads one answer, and the interim answers with a status below 200 before it."""

    __slots__ = (
        "_body_pieces",
        "_header_fields",
        "_response_parser",
        "headers",
        "is_complete",
        "keeps_alive",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        """Status of the answer; 0 until the headers have arrived."""
        self.headers: dict[str, str] = {}
        """Headers by lower-case name, without trailers. If a name is repeated, the last value is used."""
        self.is_complete = False
        self.keeps_alive = False
        """Whether the connection can carry another exchange, if the answer is complete."""
        self._response_parser = httptools.HttpResponseParser(self)
        self._header_fields: dict[str, str] = {}
        self._body_pieces: list[bytes] = []

    def add_bytes(self, data: bytes) -> bytes:
        """Add bytes, and return the body in them. Raises BadAnswer; status and headers stay valid."""
        try:
            self._response_parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.keeps_alive = False
            if not self.is_complete:  # bytes after a complete answer do not invalidate it
                raise BadAnswer from None
        if not self._body_pieces:
            return b""
        body = self._body_pieces[0] if len(self._body_pieces) == 1 else b"".join(self._body_pieces)
        self._body_pieces.clear()
        return body

    def close_parser(self) -> None:
        """Drop the parser, which refers to this object, so that no reference cycle remains."""
        del self._response_parser

    # Callbacks of httptools. If one raises, feed_data raises HttpParserError.

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("a second answer to one request")
        self._header_fields = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # trailers are ignored, and have no limit
            self._header_fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._response_parser.get_status_code()
        if not 100 <= status < 600 or self._response_parser.get_http_version()[0] != "1":
            raise ValueError("not an answer of HTTP/1")
        if status >= 200:
            self.status, self.headers = status, self._header_fields

    def on_body(self, data: bytes) -> None:
        self._body_pieces.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = bool(self.status)  # a 1xx answer is followed by the real one
        self.keeps_alive = self._response_parser.should_keep_alive()  # known only here: the parser resets itself next
