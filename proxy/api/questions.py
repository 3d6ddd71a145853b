"""Small questions to engines, asked for clients: JSON comes back, or the error that says why it did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from proxy.errors import Failure, GatewayError, UpstreamError
from proxy.upstream import read_bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aiohttp import web

    from proxy.api.key_auth import KeyAuth
    from proxy.backend import Backend
    from proxy.observe.metrics import Metrics

_MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024


def counted(
    api: str,
    answer: Callable[[web.Request], Awaitable[web.Response]],
    client_keys: KeyAuth,
    metrics: Metrics,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route that asks for clients with a key, if they need one, and counts how that ends under the label `api`."""

    async def route(request: web.Request) -> web.Response:
        status = 499
        try:
            client_keys.identify(request)
            response = await answer(request)
            status = 200
        except GatewayError as error:
            status = error.status
            raise
        finally:
            metrics.requests_total.labels(api, str(status)).inc()
        return response

    return route


async def ask(
    session: aiohttp.ClientSession,
    backend: Backend,
    path: str,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout,
    what: str,
) -> Any:
    """GET a path of an engine. `what`: what it is asked to do, for the message. Raises UpstreamError."""
    request = session.get(backend.url + path, headers=headers, timeout=timeout, allow_redirects=False)
    try:
        async with request as answer:
            body = await read_bounded(answer, _MAX_ANSWER_BYTES)
    except TimeoutError:
        raise UpstreamError(Failure.TIMEOUT, backend, f"{backend.role} instance did not {what} in time") from None
    except (aiohttp.ClientError, ValueError):  # ValueError: a name that can be no host's
        raise UpstreamError(Failure.CONNECT, backend, f"{backend.role} instance did not {what}") from None
    if answer.status >= 400:
        message = f"{backend.role} instance answered with status {answer.status}"
        kind = {"content-type": answer.headers.get("Content-Type", "application/json")}
        raise UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=kind)
    try:
        if answer.status == 200:
            return orjson.loads(body)
    except ValueError:
        pass
    raise bad_answer(backend, what)


def bad_answer(backend: Backend, what: str) -> UpstreamError:
    """The error for an answer of another shape than it must have."""
    return UpstreamError(
        Failure.BAD_ANSWER, backend, f"{backend.role} instance did not {what} in the way that engines do"
    )


def nobody(errors: Sequence[UpstreamError], what: str) -> GatewayError:
    """No engine has answered. One that refuses the client's request has the word; otherwise nobody can be asked."""
    for error in errors:
        if error.is_clients_fault:
            return error
    found = GatewayError(f"no instance answered when asked for {what}", code="no_healthy_instance", status=503)
    found.retry_after_seconds = 1.0
    return found
