"""Messages to systemd, if the program is a service of `Type=notify` (sd_notify(3), sd_watchdog_enabled(3)).

Each of several workers sends them, which requires `NotifyAccess=all`. Repeated messages have no effect.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_ALIVE: Final = "WATCHDOG=1"


class ServiceManager:
    """Sends messages to the service manager; does nothing without one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        patience = environ.get("WATCHDOG_USEC", "")
        self._beat_seconds = int(patience) / 1e6 / 3 if self._address and patience.isdecimal() else None

    def tell(self, state: str, status: str) -> None:
        """Report an event, which may be empty, and a line for `systemctl status`."""
        self._send(f"{state}\nSTATUS={status}".strip())

    @asynccontextmanager
    async def told_that_it_lives(self) -> AsyncIterator[None]:
        """Report regularly that the event loop runs, as often as `WatchdogSec=` requires, inside this context."""
        beating = asyncio.create_task(self._beat(self._beat_seconds)) if self._beat_seconds else None
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat(self, seconds: float) -> None:
        while True:
            self._send(_ALIVE)
            await asyncio.sleep(seconds)

    def _send(self, message: str) -> None:
        """Send without waiting, because a service manager that does not read must not delay tokens."""
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), self._address)
