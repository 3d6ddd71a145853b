"""aiohttp's client, for everything that is not the hot path: probes, lists of models, single-hop routes, broadcasts.

It connects to the same addresses under the same rules as the hot path, follows nobody anywhere by itself, and reads no
more of an answer than it is told to.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from proxy.upstream.connection import SOCKET_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.connector import AddrInfoType

    from proxy.upstream.names import Names

_KEEP_ALIVE_SECONDS: Final = 3.5  # engines close idle connections after 5 s
# Twice this is what a slow client makes us hold of an answer.
_BUFFER_BYTES: Final = 64 * 1024


def new_session(
    names: Names, traces: Sequence[aiohttp.TraceConfig] = (), *, keeps_connections: bool = True
) -> aiohttp.ClientSession:
    """A client that does not decompress answers and keeps no cookies. Redirects are its users' to refuse. `traces` hear
    of what it does. `keeps_connections` False: each request has a connection of its own.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEP_ALIVE_SECONDS if keeps_connections else None,
            force_close=not keeps_connections,
            resolver=_Resolver(names),
            use_dns_cache=False,
            socket_factory=partial(_open_socket, names),
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=2.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        read_bufsize=_BUFFER_BYTES,
        trace_configs=list(traces),
    )


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body. Raises aiohttp.ClientPayloadError when it ends early, or is larger than that."""
    try:
        await answer.content.readexactly(max_bytes + 1)
    except asyncio.IncompleteReadError as all_of_it:
        return all_of_it.partial
    raise aiohttp.ClientPayloadError(f"the answer is larger than {max_bytes} bytes")


class _Resolver(AbstractResolver):
    """What aiohttp asks about names."""

    def __init__(self, names: Names) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses, of any family. Raises AddressProblem."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._names.find(host)
        ]

    async def close(self) -> None:
        """The names belong to somebody else."""


def _open_socket(names: Names, info: AddrInfoType) -> socket.socket:
    """What aiohttp connects with. It asks no resolver about literals: they are checked here. Raises AddressProblem."""
    family, kind, protocol, _, address = info
    names.check(str(address[0]))
    opened = socket.socket(family, kind, protocol)
    for option in SOCKET_OPTIONS:
        opened.setsockopt(*option)
    return opened
