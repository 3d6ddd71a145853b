"""Certificates for tests, issued by an authority that each test session creates."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import trustme

from proxy.sim.engine import SimulatedEngine

_DAY = datetime.timedelta(days=1)
NAMES = ("localhost", "127.0.0.1")


@dataclass
class Certificates:
    """An authority and the files of its certificates, in one directory."""

    directory: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    @property
    def ca(self) -> Path:
        """Return the file of the authority's certificate."""
        path = self.directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def issue(self, name: str, *identities: str, days: int = 30) -> tuple[Path, Path]:
        """Write a certificate and its key; return their paths. `days` until the end of its validity, from now."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self.authority.issue_cert(
            *(identities or NAMES), not_before=now - 400 * _DAY, not_after=now + days * _DAY
        )
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        # One replacement each, as tools that rotate certificates do it.
        for path, text in (
            (certificate, b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
            (key, issued.private_key_pem.bytes()),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(text)
            new.replace(path)
        return certificate, key

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts the authority, and presents a certificate if one is given."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context


class TlsFront:
    """A TLS server in front of an engine, which decrypts and encrypts its connections.

    The simulated engine keeps its port, at which others fetch its KV without TLS.
    """

    def __init__(self, engine: SimulatedEngine, pair: tuple[Path, Path], client_ca: Path | None = None) -> None:
        """Prepare the server. `client_ca`: authority of the certificates that clients must present; None: no one."""
        self._engine = engine
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
        self._context.load_cert_chain(*pair)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.server_names: list[str | None] = []
        """The names that clients have asked for."""
        self._context.sni_callback = lambda connection, name, context: self.server_names.append(name)
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        """Return the port of the server."""
        return int(self._sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, sock=self._sockets[0], ssl=self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        inner_reader, inner_writer = await asyncio.open_connection(self._engine.host, self._engine.port)
        copies = [
            asyncio.create_task(_copy(reader, inner_writer)),
            asyncio.create_task(_copy(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for each in (writer, inner_writer):
                each.transport.abort()
            self._writers.discard(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
