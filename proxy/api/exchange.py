"""One exchange with one engine on a route that is passed through: what of its answer is passed back, and what is wrong
with it, in our words.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import aiohttp
from multidict import CIMultiDict

from proxy.balancer.engines.engine_keys import without_key
from proxy.common.errors import Failure, UpstreamError
from proxy.listener import replies
from proxy.upstream import connect_problem, read_bounded, upstream_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.common.backend import Backend

# About one connection (RFC 9110 7.6.1) or set by the gateway itself; the length is kept apart.
_NOT_PASSED_BACK: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "server", "date", "x-request-id"),
    }
)
# Nobody waits for more: not for an answer, and not for an engine to say why there is none.
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
_MAX_REFUSAL_BYTES: Final = 1024 * 1024


@contextmanager
def held_back(deadline: asyncio.Timeout) -> Iterator[None]:
    """Time spent in here is not the engine's."""
    loop, when = asyncio.get_running_loop(), deadline.when()
    assert when is not None
    left_seconds = when - loop.time()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(loop.time() + left_seconds)


def passed_back(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The engine's headers without those that are about its connection to us."""
    named = {name.strip().lower() for line in answer.headers.getall("Connection", ()) for name in line.split(",")}
    left_out = _NOT_PASSED_BACK | named
    return CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in left_out and replies.can_be_sent(name, value)
    )


async def refusal(backend: Backend, answer: aiohttp.ClientResponse) -> UpstreamError:
    """The error for an answer that is none: the engine's own words, or a redirect, which is not followed."""
    message = f"{backend.role} instance answered with status {answer.status}"
    if answer.status < 400:
        return UpstreamError(Failure.BAD_ANSWER, backend, message)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    body = without_key(await read_bounded(answer, _MAX_REFUSAL_BYTES), answer.request_info.headers.get("Authorization"))
    return UpstreamError(Failure.STATUS, backend, message, engine_status=answer.status, body=body, headers=headers)


def too_large(backend: Backend) -> UpstreamError:
    return upstream_error(Failure.BAD_ANSWER, backend, "the engine's answer is too large")


def in_our_words(backend: Backend, problem: Exception) -> UpstreamError:
    """An exception of aiohttp in our words."""
    failure, message = Failure.BAD_ANSWER, "the engine's answer is not valid HTTP"
    match problem:
        case aiohttp.ClientConnectorError():
            failure, message = Failure.CONNECT, f"cannot connect ({connect_problem(problem.os_error)})"
        case aiohttp.ConnectionTimeoutError():
            failure, message = Failure.CONNECT, "cannot connect (timed out)"
        case aiohttp.InvalidURL() | ValueError():
            failure, message = Failure.CONNECT, "cannot connect (not a host name)"
        case TimeoutError():
            failure, message = Failure.TIMEOUT, "the engine did not answer in time"
        case aiohttp.ClientPayloadError():
            failure, message = Failure.BROKEN, "the engine closed the connection in the middle of its answer"
        case aiohttp.ClientConnectionError():
            failure, message = Failure.RESET, "the engine closed the connection without an answer"
    return upstream_error(failure, backend, message)
