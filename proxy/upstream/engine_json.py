"""One question to an engine, asked through aiohttp's client: a whole answer comes back, or why there is none.

For all that is not the hot path: probes, what engines are, lists of models, counters, bootstrap servers. An instance
that anybody added may be behind an address, so answers are bounded in bytes and in time, and followed nowhere.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from proxy.common.errors import Failure
from proxy.upstream.names import connect_problem
from proxy.upstream.session import read_bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

_MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024


class EngineRequestError(Exception):
    """The request got no complete response. The text says why: `/health did not answer within 5 s`.

    `failure`: TIMEOUT; CONNECT, there was no connection, for `reason`; BAD_ANSWER, it broke off or was too long.
    """

    def __init__(self, failure: Failure, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.failure = failure
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BufferedResponse:
    """A complete response of any status, with its body in memory."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What is in the body. Raises ValueError when it is no JSON."""
        return orjson.loads(self.body)

    @property
    def json_or_none(self) -> Any:
        """None when it is no JSON."""
        try:
            return self.json
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request with a body, to one engine."""

    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes
    """Empty: the request has no body."""


async def get(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    timeout_seconds: float,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = _MAX_ANSWER_BYTES,
) -> BufferedResponse:
    """GET a path of an engine at `url`, the whole answer in this time. Raises EngineRequestError."""
    async with _answering(session, url, path, timeout_seconds, headers) as answer:
        return BufferedResponse(answer.status, answer.headers, await read_bounded(answer, max_bytes))


async def get_status(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    timeout_seconds: float,
    headers: Mapping[str, str] | None = None,
) -> int:
    """The same, of which only the status counts: a body is not waited for. Raises EngineRequestError."""
    async with _answering(session, url, path, timeout_seconds, headers) as answer:
        return answer.status


async def post(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    timeout_seconds: float,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> BufferedResponse:
    """POST JSON to a path of an engine at `url`, the whole answer in this time. Raises EngineRequestError."""
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    headers = {"Content-Type": "application/json", **(headers or {})}
    asking = session.post(url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False)
    async with _mapped(asking, path, timeout_seconds) as answer:
        return BufferedResponse(answer.status, answer.headers, await read_bounded(answer, _MAX_ANSWER_BYTES))


async def post_status(
    session: aiohttp.ClientSession, url: str, request: EngineRequest, timeout_seconds: float, connect_seconds: float
) -> int:
    """POST a request that may take long, and return the status. Raises EngineRequestError.

    Args:
        session: Connections to engines.
        url: URL of the engine.
        request: What to send.
        timeout_seconds: Limit for the whole exchange.
        connect_seconds: Limit for connecting.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=connect_seconds)
    path = request.path
    sending = session.post(
        url + path,
        params=request.query,
        data=request.body or None,
        headers=request.headers,
        timeout=timeout,
        allow_redirects=False,
    )
    async with _mapped(sending, path, timeout_seconds) as answer:
        return answer.status


def _answering(
    session: aiohttp.ClientSession, url: str, path: str, timeout_seconds: float, headers: Mapping[str, str] | None
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    asking = session.get(url + path, headers=headers, timeout=timeout, allow_redirects=False)
    return _mapped(asking, path, timeout_seconds)


@asynccontextmanager
async def _mapped(
    request: AbstractAsyncContextManager[aiohttp.ClientResponse], path: str, timeout_seconds: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a request that begins here, also while it is read. Raises EngineRequestError."""
    try:
        async with request as answer:
            yield answer
    except aiohttp.ConnectionTimeoutError:
        raise EngineRequestError(Failure.CONNECT, "cannot connect (timed out)", "timed out") from None
    except TimeoutError:
        raise EngineRequestError(Failure.TIMEOUT, f"{path} did not answer within {timeout_seconds:g} s") from None
    except aiohttp.ClientConnectorError as error:
        reason = connect_problem(error.os_error)
        raise EngineRequestError(Failure.CONNECT, f"cannot connect ({reason})", reason) from None
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a name that can be no host's
        raise EngineRequestError(Failure.BAD_ANSWER, f"{path} failed ({type(error).__name__})") from None
