"""What every answer has in common: a request id, our name, and errors in OpenAI's shape.

A GatewayError becomes its status and JSON body, an engine's own error passes byte for byte, aiohttp's 404, 405, 413 …
look like ours, and an unexpected error is a 500 with one traceback in the log. Cancellation is never caught here.
An answer that is given before the request's body has arrived closes the connection.
"""

from __future__ import annotations

import logging
import math
import re
from email.utils import formatdate
from http.client import responses
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy import SERVER
from proxy.common.errors import BadRequest, GatewayError, Unauthorized, UpstreamError
from proxy.observe import logs
from proxy.observe.metrics import REJECTIONS
from proxy.wire.ids import new_id
from proxy.wire.openai import error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp.typedefs import Handler

    from proxy.observe.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Where a `web.Request` keeps its id."""
LOST: Final[web.AppKey[Callable[[web.Request, int], web.Response | GatewayError | None]]] = web.AppKey("lost")
"""Where an application keeps what it says to requests for which it has no route: instead of a 404, or of a 405 for a
method that the route does not take. None: nothing else.
"""
ERROR_BODIES: Final[web.AppKey[Mapping[str, Callable[[GatewayError], bytes | None]]]] = web.AppKey("error_bodies")
"""Where an application keeps, by path, how errors are told where clients do not expect OpenAI's; None: as elsewhere."""
REQUEST_ID_HEADERS: Final[web.AppKey[Mapping[str, str]]] = web.AppKey("request_id_headers")
"""Where an application keeps, by path, the header in which clients look for the id of their request. X-Request-Id is
always there, too.
"""
_COMMITTED: Final = web.RequestKey("is_committed", bool)

# Anything else could break a log line or a header further on.
_is_acceptable_id: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}").fullmatch

# RFC 9110 5.1 and 5.5. Lone surrogates are what is no UTF-8 in a header of an engine.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")

HTTP_ERRORS: Final = {
    400: ("bad_request", "this gateway does not understand the request"),
    404: ("not_found", "there is no such route on this gateway"),
    405: ("method_not_allowed", "this route does not support that method"),
    408: ("request_timeout", "the request did not arrive in time"),
    411: ("length_required", "the request does not state the length of its body"),
    413: ("request_too_large", "the request body is larger than this gateway accepts"),
    415: ("unsupported_media_type", "this gateway does not accept a body of that type"),
    417: ("expectation_failed", "the only expectation that this gateway meets is 100-continue"),
    431: ("headers_too_large", "the headers of the request are larger than this gateway accepts"),
    500: ("internal_error", "the gateway failed; its log has the details"),
    501: ("not_implemented", "this gateway does not support that"),
    505: ("http_version_not_supported", "this gateway speaks HTTP/1.1"),
}

# Reasons of `rejected_total` that are called otherwise in the code of the error; most are called the same.
_REJECTIONS_BY_CODE: Final = {"request_too_large": "too_large", "too_many_connections": "connections"} | {
    reason: reason for reason in REJECTIONS
}

# What the OpenAI SDK repeats by itself, twice, unless it is told not to.
_REPEATED_BY_SDK: Final = frozenset({408, 409, 429, *range(500, 600)})

# What a browser would show as a page of this gateway's origin, and run: such as an engine's proxy writes with a 502.
_MARKUP: Final = frozenset({"text/html", "application/xhtml+xml", "image/svg+xml", "text/xml", "application/xml"})


def install(app: web.Application, metrics: Metrics) -> None:
    """Make `app` answer like this. Middlewares added before stand around, those added later inside."""
    app.middlewares.append(_Replies(metrics).middleware)
    app.on_response_prepare.append(_on_prepare)


def error_response(error: GatewayError, body: bytes | None = None) -> web.Response:
    """The answer for an error: the engine's own if it gave one, otherwise ours. `body`: the same in other words."""
    if isinstance(error, UpstreamError) and error.body is not None:
        told = "application/json" if body is not None else error.headers.get("content-type", "")
        kind, separator, parameters = told.partition(";")
        if kind.strip().lower() in _MARKUP:
            told = f"text/plain{separator}{parameters}"
        headers = {"Content-Type": told} if told and can_be_sent("Content-Type", told) else {}
        headers["X-Content-Type-Options"] = "nosniff"
        headers |= retry_headers(error)
        return web.Response(status=error.status, body=error.body if body is None else body, headers=headers)
    headers = {"Content-Type": "application/json", "X-PDProxy-Error-Code": error.code, **retry_headers(error)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 415:
        headers["Accept-Encoding"] = "identity"  # which is how to tell what was wrong (RFC 9110 15.5.16)
    return web.Response(status=error.status, body=error_body(error) if body is None else body, headers=headers)


def can_be_sent(name: str, value: str) -> bool:
    """Whether a header that came from an engine may go to a client: nothing else can be taken for more than that."""
    return bool(_TOKEN.fullmatch(name) and _FIELD_VALUE.fullmatch(value))


def last_words(error: GatewayError, request_id: str) -> bytes:
    """The answer for an error of our own, as it is written to a connection that is closed after it."""
    response = error_response(error)
    if error.status == 405:
        response.headers["Allow"] = ""  # it has to be there (RFC 9110 15.5.6), and empty means nothing is allowed
    return written(response, request_id, closes=True)


def written(response: web.Response, request_id: str, *, closes: bool, more: bytes = b"") -> bytes:
    """Return an answer as it is written to a connection.

    Args:
        response: The answer.
        request_id: The ID of the request.
        closes: Whether the connection is closed after it.
        more: Further header lines, each with CRLF.
    """
    assert isinstance(response.body, bytes)
    headers = {
        **response.headers,
        "Content-Length": str(len(response.body)),
        **({"Connection": "close"} if closes else {}),
        "Date": formatdate(usegmt=True),
        "Server": SERVER,
        "X-Request-Id": request_id,
    }
    lines = (
        f"HTTP/1.1 {response.status} {responses.get(response.status, '')}",
        *(f"{name}: {value}" for name, value in headers.items()),
    )
    head = "\r\n".join((*lines, "")).encode("utf-8", "surrogateescape")
    return b"%b%b\r\n%b" % (head, more, response.body)


def request_id(request: web.BaseRequest) -> str:
    """The client's own id if it is a sane one, otherwise a new one."""
    return accepted_id(request.headers.get("X-Request-Id", ""))


def accepted_id(given: str) -> str:
    """The id that a client gave, or a new one in place of one that is not sane, or empty."""
    return given if given and _is_acceptable_id(given) else new_id()


def rejection(error: GatewayError) -> str | None:
    """The `reason` under which a refused request is counted; None for errors that are no refusals."""
    if isinstance(error, UpstreamError):
        return None
    if isinstance(error, Unauthorized):
        return "unauthorized"
    if isinstance(error, BadRequest):
        return "invalid_request"
    return _REJECTIONS_BY_CODE.get(error.code)


def count_rejection(metrics: Metrics, error: GatewayError) -> None:
    """Count a request that was refused before anything of an answer was sent."""
    reason = rejection(error)
    if reason:
        metrics.rejected_total.labels(reason).inc()


def unexpected(method: str, path: str, error: BaseException | None) -> GatewayError:
    """Log an unexpected error, once and with its traceback; the error for the client.

    The text of the exception is left out: it may quote the prompt, as `int("…")` does.
    """
    kind = type(error).__name__
    trace = error.__traceback__ if error is not None else None
    logger.error("unexpected %s in %s %s", kind, method, path, exc_info=(_Untold, _Untold(kind), trace))
    code, message = HTTP_ERRORS[500]
    return GatewayError(message, code=code)


def retry_headers(error: GatewayError) -> dict[str, str]:
    """What tells the OpenAI SDK, and others, when to try again or not to."""
    seconds = error.retry_after_seconds
    if seconds is not None:
        return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(round(seconds * 1000))}
    is_busy_engine = isinstance(error, UpstreamError) and error.is_backpressure
    if error.status in _REPEATED_BY_SDK and not is_busy_engine:
        return {"x-should-retry": "false"}
    return {}


class _Untold(Exception):
    """Stands in the log for an exception whose text may quote the request."""


class _Replies:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = given_or_new = request_id(request)
        token = logs.request_id.set(given_or_new)
        try:
            return await handler(request)
        except GatewayError as error:
            return self._refuse(request, error)
        except web.HTTPException as answer:
            if answer.status < 400:
                raise
            return self._without_answer(request, answer)
        except Exception as error:
            if isinstance(error, ConnectionError) and _has_left(request):
                return web.Response(status=499)  # written to nobody
            return self._refuse(request, unexpected(request.method, request.path, error))
        finally:
            logs.request_id.reset(token)

    def _without_answer(self, request: web.Request, answer: web.HTTPException) -> web.Response:
        lost = request.app.get(LOST)
        found = lost(request, answer.status) if lost is not None and answer.status in (404, 405) else None
        if not isinstance(found, web.Response):
            return self._refuse(request, found or _in_our_words(answer), allow=answer.headers.get("Allow"))
        if not request.content.is_eof():
            found.force_close()
        return found

    def _refuse(self, request: web.Request, error: GatewayError, allow: str | None = None) -> web.Response:
        in_words_of = request.app.get(ERROR_BODIES, {}).get(request.path)
        response = error_response(error, None if in_words_of is None else in_words_of(error))
        if allow:
            response.headers["Allow"] = allow
        if not request.content.is_eof() or request.content.exception() is not None:
            response.force_close()
        if _COMMITTED not in request:
            count_rejection(self._metrics, error)
        elif request.transport is not None:
            # Part of another answer is out. Cut off it is recognisably incomplete; `response` is then not sent.
            request.transport.abort()
        return response


def _has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _in_our_words(answer: web.HTTPException) -> GatewayError:
    code, message = HTTP_ERRORS.get(answer.status, ("http_error", answer.reason))
    return GatewayError(message, code=code, status=answer.status)


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    request[_COMMITTED] = True
    response.headers["Server"] = SERVER
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    name = request.app.get(REQUEST_ID_HEADERS, {}).get(request.path)
    if name is not None:
        response.headers[name] = request[REQUEST_ID]
