"""A name server on a loopback port, over UDP and TCP, with the records that a test sets."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

_UDP_BYTES = 1232


class NameServer:
    """Serves records inside `async with`. Other names do not exist (NXDOMAIN)."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        """Number of queries by name and type."""
        self.over_tcp = 0
        self.failure: dns.rcode.Rcode | None = None
        """Code of all answers; None: the server works."""
        self.is_silent = False
        self._zone: dict[str, dict[str, dns.rrset.RRset]] = {}
        self._stack = AsyncExitStack()
        self.address = ""
        """Address and port, `host:port`."""

    def set_records(self, name: str, kind: str, *records: str, ttl: int = 0) -> None:
        """Set the records of a name. Without records the name still exists. `kind`: A, AAAA, SRV or CNAME."""
        rows = self._zone.setdefault(f"{name}.", {})
        rows.pop(kind, None)
        if records:
            rows[kind] = dns.rrset.from_text(f"{name}.", ttl, "IN", kind, *records)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        tcp = await asyncio.start_server(self._serve_tcp, "127.0.0.1", 0)
        self._stack.push_async_callback(tcp.wait_closed)
        self._stack.callback(tcp.close)
        port = tcp.sockets[0].getsockname()[1]
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), ("127.0.0.1", port))
        self._stack.callback(transport.close)
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def answer(self, query: bytes) -> dns.message.Message | None:
        if self.is_silent:
            return None
        asked = dns.message.from_wire(query)
        response = dns.message.make_response(asked)
        response.flags |= dns.flags.RA
        (question,) = asked.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked[name.rstrip("."), kind] += 1
        if self.failure is not None:
            response.set_rcode(self.failure)
            return response
        while alias := self._zone.get(name, {}).get("CNAME"):
            response.answer.append(alias)
            name = alias[0].target.to_text()
        if name not in self._zone:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif kind in self._zone[name]:
            response.answer.append(self._zone[name][kind])
        return response

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            query = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            if response := self.answer(query):
                self.over_tcp += 1
                wire = response.to_wire()
                writer.write(len(wire).to_bytes(2, "big") + wire)
                await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if (response := self._server.answer(data)) is None:
            return
        wire = response.to_wire()
        if len(wire) > _UDP_BYTES:
            response.answer.clear()
            response.flags |= dns.flags.TC
            wire = response.to_wire()
        self._transport.sendto(wire, addr)
