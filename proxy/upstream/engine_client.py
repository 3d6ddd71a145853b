"""The HTTP client for all requests to engines that are not legs of a call.

Health checks, lists of models, metrics, bootstrap servers, broadcasts and passed-through routes use it. It connects to
the same addresses under the same rules as `Upstream`. An instance may have been added at run time, so the client
follows no redirects, and answers have limits in bytes and in time.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult

from proxy.common.errors import Failure
from proxy.upstream.connection import SOCKET_OPTIONS
from proxy.upstream.names import HostNames, describe_connect_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from types import TracebackType

    from aiohttp.connector import AddrInfoType

    from proxy.settings.tls import EngineTls

_MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_KEEP_ALIVE_SECONDS: Final = 3.5  # engines close idle connections after 5 s
# Bounds how much of an answer is in memory while a client reads slowly: aiohttp buffers up to twice this.
_BUFFER_BYTES: Final = 64 * 1024


class EngineRequestError(Exception):
    """A request got no complete response. The text says why, such as `/health did not answer within 5 s`.

    Attributes:
        failure: CONNECT, TIMEOUT, RESET (closed without an answer), BROKEN (the answer broke off, or is too large) or
            BAD_ANSWER (it is not valid HTTP).
        reason: Why there was no connection, for CONNECT; otherwise empty.
    """

    def __init__(self, failure: Failure, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.failure_kind = failure
        self.error_reason = reason


@dataclass(frozen=True, slots=True)
class BufferedResponse:
    """A complete response of any status, with its body in memory."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def parsed_json(self) -> Any:
        """The decoded body. Raises ValueError if it is not JSON."""
        return orjson.loads(self.body)

    @property
    def parsed_json_or_none(self) -> Any:
        """The decoded body, or None if it is not JSON."""
        try:
            return self.parsed_json
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A POST request to one engine, and its time limit."""

    path: str
    query_parameters: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes
    """Empty: the request has no body."""


class EngineClient:
    """HTTP client for engines, on aiohttp. `async with` it; leaving closes the connections.

    It keeps no cookies, decompresses nothing and ignores proxies.
    """

    def __init__(
        self,
        names: HostNames | None = None,
        *,
        keeps_connections: bool = True,
        on_reuse: Callable[[], None] | None = None,
        tls: EngineTls | None = None,
    ) -> None:
        """Create a client of engines without connections.

        Args:
            names: Addresses of host names, and which are allowed. None: the system resolves names, and every address
                is allowed.
            keeps_connections: False: each request opens a new connection.
            on_reuse: Called when a request uses a connection that has carried one before.
            tls: TLS to engines. None: engines with TLS cannot be reached.
        """
        self.engine_tls = tls
        """TLS to engines. None: engines with TLS cannot be reached."""
        self._host_names = names
        self._keeps_connections = keeps_connections
        self._on_reuse = on_reuse
        self._session: aiohttp.ClientSession
        """Set by `__aenter__`."""

    async def __aenter__(self) -> Self:
        names = self._host_names
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_SECONDS if self._keeps_connections else None,
                force_close=not self._keeps_connections,
                resolver=None if names is None else _Resolver(names),
                use_dns_cache=False,
                socket_factory=partial(_open_socket, names),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            read_bufsize=_BUFFER_BYTES,
            trace_configs=[] if self._on_reuse is None else [_make_reuse_trace(self._on_reuse)],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get_body(
        self,
        url: str,
        path: str,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = _MAX_BODY_BYTES,
    ) -> BufferedResponse:
        """GET a path of the engine at `url`, with its whole body. Raises EngineRequestError."""
        async with self._open_request("GET", url, path, timeout_seconds, headers=headers) as answer:
            return BufferedResponse(answer.status, answer.headers, await read_bounded(answer, max_bytes))

    async def get_status(
        self, url: str, path: str, timeout_seconds: float, headers: Mapping[str, str] | None = None
    ) -> int:
        """GET a path and return the status without reading the body. Raises EngineRequestError."""
        async with self._open_request("GET", url, path, timeout_seconds, headers=headers) as answer:
            return answer.status

    async def post_json(
        self, url: str, path: str, timeout_seconds: float, body: bytes, headers: Mapping[str, str] | None = None
    ) -> BufferedResponse:
        """POST JSON to a path and return the answer with its whole body. Raises EngineRequestError."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        async with self._open_request("POST", url, path, timeout_seconds, headers=headers, data=body) as answer:
            return BufferedResponse(answer.status, answer.headers, await read_bounded(answer, _MAX_BODY_BYTES))

    async def post_status(
        self, url: str, request: EngineRequest, timeout_seconds: float, connect_seconds: float
    ) -> int:
        """POST a request that may take long, and return the status. Raises EngineRequestError.

        Args:
            url: URL of the engine.
            request: What to send.
            timeout_seconds: Limit for the whole exchange.
            connect_seconds: Limit for connecting.
        """
        async with self._open_request(
            "POST",
            url,
            request.path,
            timeout_seconds,
            connect_seconds=connect_seconds,
            params=request.query_parameters,
            data=request.body or None,
            headers=request.headers,
        ) as answer:
            return answer.status

    def stream_response(
        self, method: str, url: str, path: str, body: bytes, headers: Mapping[str, str], connect_seconds: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request with exactly these headers. Entering returns the answer, whose body the caller reads.

        The caller bounds the time of the exchange. Entering, and reading in the block, raise EngineRequestError.
        `connect_seconds` includes the time to look up a name.
        """
        return self._open_request(
            method,
            url,
            path,
            None,
            connect_seconds=connect_seconds,
            data=body or None,
            headers={**headers, "Accept-Encoding": "identity"},
            skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
        )

    @asynccontextmanager
    async def _open_request(
        self,
        method: str,
        url: str,
        path: str,
        timeout_seconds: float | None,
        *,
        connect_seconds: float | None = None,
        **options: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the block reads the answer. Translates exceptions of aiohttp into EngineRequestError."""
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=connect_seconds)
        if url.startswith("https:"):
            if self.engine_tls is None:
                raise _make_connect_error("TLS is not configured")
            options.update(ssl=self.engine_tls.current_context, server_hostname=self.engine_tls.server_name)
        try:
            async with self._session.request(
                method, url + path, timeout=timeout, allow_redirects=False, **options
            ) as answer:
                yield answer
        except aiohttp.ConnectionTimeoutError:
            raise _make_connect_error("timed out") from None
        except TimeoutError:
            if timeout_seconds is None:
                raise  # the caller's own limit
            raise EngineRequestError(Failure.TIMEOUT, f"{path} did not answer within {timeout_seconds:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            problem = error.certificate_error
            raise _make_connect_error(
                describe_connect_error(problem) if isinstance(problem, OSError) else "TLS"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise _make_connect_error(describe_connect_error(error.os_error)) from None
        except ValueError:  # from the codec for international names, or aiohttp.InvalidURL
            raise _make_connect_error("not a host name") from None
        except aiohttp.ClientError as error:
            raise EngineRequestError(_failure_kind_of(error), f"{path} failed ({type(error).__name__})") from None


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the whole body. Raises aiohttp.ClientPayloadError if it breaks off or exceeds `max_bytes`."""
    try:
        await answer.content.readexactly(max_bytes + 1)
    except asyncio.IncompleteReadError as all_of_it:
        return all_of_it.partial
    raise aiohttp.ClientPayloadError(f"the answer is larger than {max_bytes} bytes")


def _make_connect_error(reason: str) -> EngineRequestError:
    return EngineRequestError(Failure.CONNECT, f"cannot connect ({reason})", reason)


def _failure_kind_of(error: aiohttp.ClientError) -> Failure:
    match error:
        case aiohttp.ClientPayloadError():
            return Failure.BROKEN
        case aiohttp.ClientConnectionError():
            return Failure.RESET
    return Failure.BAD_ANSWER


def _make_reuse_trace(on_reuse: Callable[[], None]) -> aiohttp.TraceConfig:
    async def report(*_: object) -> None:
        on_reuse()

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(report)
    return trace


class _Resolver(AbstractResolver):
    """Resolves host names for aiohttp."""

    def __init__(self, names: HostNames) -> None:
        self._host_names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses, of any family. Raises AddressProblem."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._host_names.find_addresses(host)
        ]

    async def close(self) -> None:
        """Do nothing: the owner of the names closes them."""


def _open_socket(names: HostNames | None, info: AddrInfoType) -> socket.socket:
    """Open the socket for a connection of aiohttp. Raises AddressProblem.

    aiohttp does not resolve IP addresses, so these are checked here.
    """
    family, kind, protocol, _, address = info
    if names is not None:
        names.check_address(str(address[0]))
    opened = socket.socket(family, kind, protocol)
    for option in SOCKET_OPTIONS:
        opened.setsockopt(*option)
    return opened
