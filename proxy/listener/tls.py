"""Performs the TLS handshake of a new connection. After it, a protocol reads the requests.

Each connection takes the context that is in force when it is accepted, so a new certificate disturbs no open one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final, cast

from proxy.settings.tls import describe_tls_problem

if TYPE_CHECKING:
    from collections.abc import Callable

_SHUTDOWN_SECONDS: Final = 2.0


class TlsHandshake(asyncio.Protocol):
    """The handshake of one accepted connection. After it, another protocol takes over.

    It takes the socket from the accepted transport before the event loop reads from it, and gives it to a new
    transport with TLS. `start_tls` would lose data that uvloop reads before the handshake begins.
    """

    def __init__(
        self,
        ssl_context: ssl.SSLContext,
        max_seconds: float,
        make_protocol: Callable[[], asyncio.Protocol],
        on_end: Callable[[TlsHandshake, str | None], None],
    ) -> None:
        """Create the tls handshake.

        Args:
            ssl_context: The certificate, and what is required of clients.
            max_seconds: Time limit of the handshake.
            make_protocol: Makes the protocol for a connection after its handshake.
            on_end: Called once at the end, with the reason of a failure. None: the handshake succeeded, was cancelled,
                or the client closed the connection.
        """
        self._ssl_context = ssl_context
        self._max_seconds = max_seconds
        self._make_protocol = make_protocol
        self._on_handshake_end = on_end
        self._client_socket: socket.socket | None = None
        """The accepted socket; None once a transport has it."""
        self.client_address = "-"
        """Address of the client."""
        self.handshake_task: asyncio.Task[None] | None = None
        """The task that performs the handshake; None before the connection is made."""

    def cancel_handshake(self) -> None:
        """Cancel the handshake and close the connection."""
        if self.handshake_task is not None:
            self.handshake_task.cancel()
        if self._client_socket is not None:
            self._client_socket.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.client_address = str(peer[0])
        try:
            self._client_socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self.handshake_task = asyncio.get_running_loop().create_task(self._run_handshake())
        except OSError:  # no file descriptor is left
            self._on_handshake_end(self, None)
        cast("asyncio.Transport", transport).abort()  # closes only its own descriptor

    async def _run_handshake(self) -> None:
        accepted, self._client_socket = self._client_socket, None
        assert accepted is not None
        reason = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._ssl_context,
                ssl_handshake_timeout=self._max_seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
        except ssl.SSLError as error:
            reason = describe_tls_problem(error)
        except ConnectionAbortedError:
            reason = f"not complete after {self._max_seconds:g} s"
        except OSError:
            pass  # the client has closed the connection
        finally:
            self._on_handshake_end(self, reason)
