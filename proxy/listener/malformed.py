"""What is no request that any route should see, and what is wrong with it.

Nothing of the request is quoted, neither to the client nor in the log: one that begins in the wrong place begins in the
middle of somebody's prompt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion10, HttpVersion11, hdrs
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong

from proxy.common.errors import GatewayError

if TYPE_CHECKING:
    from aiohttp import web

MALFORMED: Final = "malformed_http"
"""The code of every error about the form of a request."""

# Exceptions of aiohttp whose text is a quotation, and what is told instead.
_WORDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (LineTooLong, "the request line or a header is too long"),
    (InvalidHeader, "a header is not valid"),
    (InvalidURLError, "the request target is not valid"),
)
_has_no_quotation: Final = re.compile(
    r"(Missing|Duplicate) '[A-Za-z-]+' header [a-z ]+\."
    r"|Too many headers received"
    r"|Received HTTPS traffic on an HTTP port"
).fullmatch

_VERSIONS: Final = (HttpVersion11, HttpVersion10)
_is_host: Final = re.compile(r"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*").fullmatch  # RFC 3986 3.2.2 and 3.2.3

# Who counts the first one and who counts the last one see two different callers.
_CREDENTIALS: Final = (hdrs.AUTHORIZATION, "X-Api-Key", "X-Admin-Key")


def malformed(reason: str, status: int = 400) -> GatewayError:
    """The error for a request of the wrong form."""
    return GatewayError(f"the request is not valid HTTP/1.1: {reason}", code=MALFORMED, status=status)


def unreadable(problem: BaseException) -> GatewayError:
    """The error for what aiohttp could not read."""
    for kind, words in _WORDS:
        if isinstance(problem, kind):
            return malformed(words, status=431 if kind is LineTooLong else 400)
    told = problem.message if isinstance(problem, HttpProcessingError) else ""
    told, separator, _ = told.partition(":\n\n")  # llhttp's own words, then the quotation
    if not separator and not _has_no_quotation(told):
        return malformed("it cannot be read")
    reason = " ".join(told.split())
    if reason.startswith("Too many headers"):
        return malformed(reason, status=431)
    return malformed(reason, status=505 if reason.endswith("Invalid HTTP version") else 400)


def refusal_of(request: web.BaseRequest) -> GatewayError | None:
    """What is wrong with a request that aiohttp could read; None when a route may see it."""
    headers, version, target = request.headers, request.version, request.raw_path
    coding = headers.get(hdrs.TRANSFER_ENCODING)
    if version not in _VERSIONS:
        return malformed("the version is not 1.1 or 1.0", status=505)
    if coding is not None and coding.lower() != "chunked":
        # llhttp takes any list that ends in chunked, and others in front of us may not.
        return malformed("the transfer encoding is not chunked", status=501)
    if coding is not None and version == HttpVersion10:
        return malformed("HTTP/1.0 has no transfer encodings")  # RFC 9112 6.1
    if not _is_host(headers.get(hdrs.HOST, "")):
        return malformed("the Host header is not valid")
    for name in _CREDENTIALS:
        if len(headers.getall(name, ())) > 1:
            return malformed("it has more than one credential of the same kind")
    if request.method == hdrs.METH_CONNECT:
        return GatewayError("this gateway does not support CONNECT", code="method_not_allowed", status=405)
    # RFC 9112 3.2.2 has every server accept the absolute form. Only its path counts: no URL is made of the rest.
    if not (target.startswith("/") or target == "*" or target.lower().startswith(("http://", "https://"))):
        return malformed("the request target is not valid")
    if hdrs.EXPECT in headers:  # the one that can be met was taken out
        return GatewayError(
            "the only expectation that this gateway meets is 100-continue", code="expectation_failed", status=417
        )
    return None
