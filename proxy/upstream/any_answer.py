"""Any answer of HTTP/1, read by httptools: interim ones, trailers, chunk extensions, a body without a length."""

from __future__ import annotations

import httptools


class BadAnswer(ValueError):
    """The bytes are not an answer to one request in HTTP/1."""


class AnyAnswer:
    """Reads one answer, and those with a status below 200 that may precede it."""

    __slots__ = ("_body", "_fields", "_parser", "headers", "is_complete", "keeps_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        """0 until the headers are there."""
        self.headers: dict[str, str] = {}
        """Lower-case names; the last one of equal names. Without trailers."""
        self.is_complete = False
        self.keeps_alive = False
        """The connection can carry another exchange, if the answer is complete."""
        self._parser = httptools.HttpResponseParser(self)
        self._fields: dict[str, str] = {}
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return the body in them. Raises BadAnswer, after which status and headers count."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.keeps_alive = False
            if not self.is_complete:  # what follows a complete answer cannot spoil it
                raise BadAnswer from None
        if not self._body:
            return b""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def close(self) -> None:
        """Nothing more is read. The parser knows its reader: they would be a cycle of garbage."""
        del self._parser

    # httptools callbacks: what they raise, feed_data raises as HttpParserError

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("a second answer to one request")
        self._fields = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # what follows the body is no news to anybody, and has no bound
            self._fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600 or self._parser.get_http_version()[0] != "1":
            raise ValueError("not an answer of HTTP/1")
        if status >= 200:
            self.status, self.headers = status, self._fields

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = bool(self.status)  # a 1xx answer is followed by the real one
        self.keeps_alive = self._parser.should_keep_alive()  # known only here: the parser resets itself next
