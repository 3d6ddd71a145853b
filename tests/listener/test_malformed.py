"""Test that errors about invalid requests do not quote them. See also test_http_listener."""

from __future__ import annotations

import pytest
from aiohttp.http_exceptions import (
    BadHttpMessage,
    BadHttpMethod,
    BadStatusLine,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)

from proxy.listener.connection import make_unreadable_error

SECRET = "my prompt"


@pytest.mark.parametrize(
    ("problem", "status", "reason"),
    [
        (LineTooLong(SECRET), 431, "the request line or a header is too long"),
        (InvalidHeader(SECRET), 400, "a header is not valid"),
        (InvalidURLError(SECRET), 400, "the request target is not valid"),
        (BadHttpMessage("Too many headers received"), 431, "Too many headers received"),
        (BadHttpMessage("Duplicate 'Host' header found."), 400, "Duplicate 'Host' header found."),
        (BadHttpMessage("Missing 'Host' header in request."), 400, "Missing 'Host' header in request."),
        (BadHttpMessage(f"Duplicate '{SECRET}' header found."), 400, "it cannot be read"),
        (BadHttpMessage(f"Chunk size overflow:\n\n  {SECRET}\n  ^"), 400, "Chunk size overflow"),
        (BadHttpMessage(SECRET), 400, "it cannot be read"),
        (BadHttpMethod(SECRET), 400, "it cannot be read"),
        (BadHttpMethod(error="Received HTTPS traffic on an HTTP port"), 400, "Received HTTPS traffic on an HTTP port"),
        (BadStatusLine(SECRET), 400, "it cannot be read"),
        (
            BadStatusLine(error=f"Bad status line:\n  Invalid HTTP version:\n\n  {SECRET}\n  ^"),
            505,
            "Bad status line: Invalid HTTP version",
        ),
        (ValueError(SECRET), 400, "it cannot be read"),
    ],
)
def test_errors_of_aiohttp_are_sent_without_quotations(problem: Exception, status: int, reason: str) -> None:
    error = make_unreadable_error(problem)
    assert (error.status, error.code) == (status, "malformed_http")
    assert error.message == f"the request is not valid HTTP/1.1: {reason}"
