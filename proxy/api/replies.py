"""What every answer has in common: a request id, our name, and errors in OpenAI's shape.

A GatewayError becomes its status and JSON body, an engine's own error passes byte for byte, aiohttp's 404, 405, 413 …
look like ours, and what nobody expected is a 500 with one traceback in the log. Cancellation is never caught here.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy import logs
from proxy.errors import BadRequest, GatewayError, NoBackendAvailable, UpstreamError
from proxy.wire.openai import error_body

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from proxy.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID: Final = web.RequestKey("request_id", str)
"""Where a `web.Request` keeps its id."""
_COMMITTED: Final = web.RequestKey("is_committed", bool)

# Anything else could break a log line or a header further on.
_ACCEPTABLE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_HTTP_ERRORS: Final = {
    404: ("not_found", "there is no such route on this gateway"),
    405: ("method_not_allowed", "this route does not take that method"),
    413: ("request_too_large", "the request body is larger than this gateway accepts"),
}

# What the OpenAI SDK repeats by itself, twice, unless it is told not to.
_REPEATED_BY_SDK: Final = frozenset({408, 409, 429, *range(500, 600)})


def install(app: web.Application, metrics: Metrics) -> None:
    """Make `app` answer like this. Middlewares added before stand around, those added later inside."""
    app.middlewares.append(_Replies(metrics).middleware)
    app.on_response_prepare.append(_on_prepare)


def error_response(error: GatewayError) -> web.Response:
    """The answer for an error: the engine's own if it gave one, otherwise ours."""
    if isinstance(error, UpstreamError) and error.body is not None:
        headers = {
            name: value for name, value in error.headers.items() if name.lower() in ("content-type", "retry-after")
        }
        return web.Response(status=error.status, body=error.body, headers={**headers, **retry_headers(error)})
    headers = {"Content-Type": "application/json", **retry_headers(error)}
    return web.Response(status=error.status, body=error_body(error), headers=headers)


def retry_headers(error: GatewayError) -> dict[str, str]:
    """What tells the OpenAI SDK, and others, when to try again or not to."""
    seconds = error.retry_after_seconds
    if seconds is not None:
        return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(round(seconds * 1000))}
    is_busy_engine = isinstance(error, UpstreamError) and error.is_backpressure
    if error.status in _REPEATED_BY_SDK and not is_busy_engine:
        return {"x-should-retry": "false"}
    return {}


class _Replies:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id", "")
        if not _ACCEPTABLE_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        request[REQUEST_ID] = request_id
        token = logs.request_id.set(request_id)
        try:
            return await handler(request)
        except GatewayError as error:
            return self._refuse(request, error)
        except web.HTTPException as answer:
            if answer.status < 400:
                raise
            return self._refuse(request, _in_our_words(answer), allow=answer.headers.get("Allow"))
        except Exception as error:
            if isinstance(error, ConnectionError) and _has_left(request):
                return web.Response(status=499)  # written to nobody
            logger.exception("unexpected error in %s %s", request.method, request.path)
            return self._refuse(request, GatewayError("the gateway failed; its log has the details"))
        finally:
            logs.request_id.reset(token)

    def _refuse(self, request: web.Request, error: GatewayError, allow: str | None = None) -> web.Response:
        response = error_response(error)
        if allow:
            response.headers["Allow"] = allow
        if _COMMITTED not in request:
            reason = _rejection(error)
            if reason:
                self._metrics.rejected_total.labels(reason).inc()
        elif request.transport is not None:
            # Part of another answer is out. Cut off it is recognisably incomplete; `response` then reaches nobody.
            request.transport.abort()
        return response


def _has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _in_our_words(answer: web.HTTPException) -> GatewayError:
    code, message = _HTTP_ERRORS.get(answer.status, ("http_error", answer.reason))
    return GatewayError(message, code=code, status=answer.status)


def _rejection(error: GatewayError) -> str | None:
    """The `reason` under which a refused request is counted; None for errors that are no refusals."""
    if isinstance(error, NoBackendAvailable):
        return error.code
    if isinstance(error, BadRequest):
        return "invalid_request"
    return "too_large" if error.status == 413 else None


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    request[_COMMITTED] = True
    response.headers["Server"] = "pdproxy"
    response.headers["X-Request-Id"] = request[REQUEST_ID]
