"""Adds a request ID and the server name to all answers, and turns errors into answers in OpenAI's format.

A GatewayError becomes its status and a JSON body. Errors of engines pass unchanged. Errors of aiohttp, such as 404, 405
and 413, get the same format. An unexpected exception becomes a 500, with one traceback in the log. Cancellations are
not caught. An answer before the whole body of the request has arrived closes the connection.
"""

from __future__ import annotations

import logging
import math
import re
from email.utils import formatdate
from functools import partial
from http.client import responses
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from proxy import SERVER
from proxy.common.errors import BadRequest, GatewayError, Unauthorized, UpstreamError
from proxy.observe import logs
from proxy.observe.metrics import REJECTIONS, Metrics
from proxy.wire.ids import make_request_id
from proxy.wire.openai import error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp.typedefs import Handler


logger = logging.getLogger(__name__)

json_response: Final = partial(web.json_bytes_response, dumps=orjson.dumps)
"""Return an answer with a JSON body."""
REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Key of the request ID in a `web.Request`."""
LOST: Final[web.AppKey[Callable[[web.Request, int], web.Response | GatewayError | None]]] = web.AppKey("lost")
"""Key of an application's function that replaces answers with 404 or 405. It returns None to keep such an answer."""
ERROR_BODIES: Final[web.AppKey[Mapping[str, Callable[[GatewayError], bytes | None]]]] = web.AppKey("error_bodies")
"""Key of an application's functions that return the error body of another API, by path. None: OpenAI's body."""
REQUEST_ID_HEADERS: Final[web.AppKey[Mapping[str, str]]] = web.AppKey("request_id_headers")
"""Key of an application's names of the header for the request ID, by path. X-Request-Id is always sent, too."""
_COMMITTED: Final = web.RequestKey("is_committed", bool)

# Other IDs could break a log line, or a header of a later request.
_is_acceptable_id: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}").fullmatch

# RFC 9110 5.1 and 5.5. A lone surrogate stands for a byte of an engine header that is not UTF-8.
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

# Reasons of `rejected_total` by error code. Most have the same name.
_REJECTIONS_BY_CODE: Final = {"request_too_large": "too_large", "too_many_connections": "connections"} | {
    reason: reason for reason in REJECTIONS
}

# Statuses after which the OpenAI SDK repeats a request twice, unless a header forbids it.
_REPEATED_BY_SDK: Final = frozenset({408, 409, 429, *range(500, 600)})

# Content types that a browser would run as a page of this origin. A proxy before an engine may send one with a 502.
_MARKUP: Final = frozenset({"text/html", "application/xhtml+xml", "image/svg+xml", "text/xml", "application/xml"})


def install_replies(application: web.Application, metrics: Metrics) -> None:
    """Add the middleware to `application`. It runs inside middlewares that were added before, and around later ones."""
    application.middlewares.append(_Replies(metrics).answer_errors)
    application.on_response_prepare.append(_on_prepare)


def error_response(error: GatewayError, body: bytes | None = None) -> web.Response:
    """Return the answer for an error: the engine's own answer if there is one, otherwise the gateway's.

    `body` replaces the body, for other APIs; None: the body of the engine, or the OpenAI format.
    """
    if isinstance(error, UpstreamError) and error.body is not None:
        content_type = "application/json" if body is not None else error.headers.get("content-type", "")
        kind, separator, parameters = content_type.partition(";")
        if kind.strip().lower() in _MARKUP:
            content_type = f"text/plain{separator}{parameters}"
        is_valid = content_type and can_be_sent("Content-Type", content_type)
        headers = {"Content-Type": content_type} if is_valid else {}
        headers["X-Content-Type-Options"] = "nosniff"
        headers |= retry_headers(error)
        return web.Response(status=error.status, body=error.body if body is None else body, headers=headers)
    headers = {"Content-Type": "application/json", "X-PDProxy-Error-Code": error.code, **retry_headers(error)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 415:
        headers["Accept-Encoding"] = "identity"  # shows the cause of the error (RFC 9110 15.5.16)
    return web.Response(status=error.status, body=error_body(error) if body is None else body, headers=headers)


def can_be_sent(header_name: str, header_value: str) -> bool:
    """Return whether a header of an engine can be sent safely: no client can read it as several headers."""
    return bool(_TOKEN.fullmatch(header_name) and _FIELD_VALUE.fullmatch(header_value))


def closing_error_bytes(error: GatewayError, request_id: str) -> bytes:
    """Return the bytes of an error answer. The connection closes after it."""
    response = error_response(error)
    if error.status == 405:
        response.headers["Allow"] = ""  # required (RFC 9110 15.5.6); empty means that no method is allowed
    return response_bytes(response, request_id, closes_connection=True)


def response_bytes(
    response: web.Response, request_id: str, *, closes_connection: bool, more_headers: bytes = b""
) -> bytes:
    """Return the HTTP/1.1 bytes of a complete answer.

    Args:
        response: The answer.
        request_id: The ID of the request.
        closes_connection: Whether the connection is closed after it.
        more_headers: Further header lines, each with CRLF.
    """
    assert isinstance(response.body, bytes)
    headers = {
        **response.headers,
        "Content-Length": str(len(response.body)),
        **({"Connection": "close"} if closes_connection else {}),
        "Date": formatdate(usegmt=True),
        "Server": SERVER,
        "X-Request-Id": request_id,
    }
    lines = (
        f"HTTP/1.1 {response.status} {responses.get(response.status, '')}",
        *(f"{name}: {value}" for name, value in headers.items()),
    )
    head = "\r\n".join((*lines, "")).encode("utf-8", "surrogateescape")
    return b"%b%b\r\n%b" % (head, more_headers, response.body)


def request_id_of(request: web.BaseRequest) -> str:
    """Return the client's request ID if it is valid, otherwise a new one."""
    return choose_request_id(request.headers.get("X-Request-Id", ""))


def choose_request_id(given_id: str) -> str:
    """Return the given ID if it is valid, otherwise a new one."""
    return given_id if given_id and _is_acceptable_id(given_id) else make_request_id()


def rejection_reason(gateway_error: GatewayError) -> str | None:
    """Return the metric label `reason` of a rejected request; None if the error is not a rejection."""
    if isinstance(gateway_error, UpstreamError):
        return None
    if isinstance(gateway_error, Unauthorized):
        return "unauthorized"
    if isinstance(gateway_error, BadRequest):
        return "invalid_request"
    return _REJECTIONS_BY_CODE.get(gateway_error.code)


def count_rejection(metrics: Metrics, error: GatewayError) -> None:
    """Count a request that was rejected before a part of its answer was sent."""
    reason = rejection_reason(error)
    if reason:
        metrics.rejected_total.labels(reason).inc()


def log_unexpected_exception(method: str, path: str, error: BaseException | None) -> GatewayError:
    """Log an unexpected exception with its traceback, and return the error for the client.

    The text of the exception is removed, because it may quote the prompt, as that of `int("…")` does.
    """
    kind = type(error).__name__
    trace = error.__traceback__ if error is not None else None
    logger.error(
        "request: unexpected %s: %s %s", kind, method, path, exc_info=(_PrivateError, _PrivateError(kind), trace)
    )
    code, message = HTTP_ERRORS[500]
    return GatewayError(message, code=code)


def retry_headers(error: GatewayError) -> dict[str, str]:
    """Return the headers that tell clients, such as the OpenAI SDK, when to retry or not to retry."""
    seconds = error.retry_after_seconds
    if seconds is not None:
        return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(round(seconds * 1000))}
    is_busy_engine = isinstance(error, UpstreamError) and error.is_backpressure
    if error.status in _REPEATED_BY_SDK and not is_busy_engine:
        return {"x-should-retry": "false"}
    return {}


class _PrivateError(Exception):
    """Replaces an exception in the log, because its text may quote the request."""


class _Replies:
    def __init__(self, metrics: Metrics) -> None:
        self._gateway_metrics = metrics

    @web.middleware
    async def answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = given_or_new = request_id_of(request)
        token = logs.request_id.set(given_or_new)
        try:
            return await handler(request)
        except GatewayError as error:
            return self._make_refusal(request, error)
        except web.HTTPException as answer:
            if answer.status < 400:
                raise
            return self._make_response_without_answer(request, answer)
        except Exception as error:
            if isinstance(error, ConnectionError) and _client_has_left(request):
                return web.Response(status=499)  # the client does not receive it
            return self._make_refusal(request, log_unexpected_exception(request.method, request.path, error))
        finally:
            logs.request_id.reset(token)

    def _make_response_without_answer(self, request: web.Request, answer: web.HTTPException) -> web.Response:
        lost = request.app.get(LOST)
        found = lost(request, answer.status) if lost is not None and answer.status in (404, 405) else None
        if not isinstance(found, web.Response):
            return self._make_refusal(request, found or _to_gateway_error(answer), allow=answer.headers.get("Allow"))
        if not request.content.is_eof():
            found.force_close()
        return found

    def _make_refusal(self, request: web.Request, error: GatewayError, allow: str | None = None) -> web.Response:
        in_words_of = request.app.get(ERROR_BODIES, {}).get(request.path)
        response = error_response(error, None if in_words_of is None else in_words_of(error))
        if allow:
            response.headers["Allow"] = allow
        if not request.content.is_eof() or request.content.exception() is not None:
            response.force_close()
        if _COMMITTED not in request:
            count_rejection(self._gateway_metrics, error)
        elif request.transport is not None:
            # Part of another answer was sent. Closing the connection marks it as incomplete. `response` is not sent.
            request.transport.abort()
        return response


def _client_has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _to_gateway_error(answer: web.HTTPException) -> GatewayError:
    code, message = HTTP_ERRORS.get(answer.status, ("http_error", answer.reason))
    return GatewayError(message, code=code, status=answer.status)


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    request[_COMMITTED] = True
    response.headers["Server"] = SERVER
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    name = request.app.get(REQUEST_ID_HEADERS, {}).get(request.path)
    if name is not None:
        response.headers[name] = request[REQUEST_ID]
