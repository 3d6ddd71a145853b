"""The port between a listener and what reads its connections before aiohttp does."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.common.errors import GatewayError


class FirstProtocol(asyncio.Protocol, ABC):
    """Reads a new connection before aiohttp does.

    It calls the listener as an AiohttpConnection does, and also its `hand_over`.
    It may have the connection back once it is certain that a request ends where the next bytes begin.
    """

    __slots__ = ()

    door: asyncio.Transport
    """The transport, also when the connection is lost."""

    @property
    @abstractmethod
    def client(self) -> str:
        """The address of the other side."""

    @property
    @abstractmethod
    def awaits_request(self) -> bool:
        """Nothing is being answered here, and nothing has arrived that could be."""

    @abstractmethod
    def end(self, error: GatewayError | None = None) -> None:
        """Close a connection that awaits a request; an error is told before."""

    @abstractmethod
    def end_after_answer(self) -> None:
        """Close it as soon as nothing is being answered on it."""

    @abstractmethod
    def close(self) -> None:
        """What comes from now on is not looked at."""

    @abstractmethod
    def cut(self) -> None:
        """End it, and what is being answered on it, now."""

    @abstractmethod
    def sweep(self, now: float, keepalive_seconds: float) -> None:
        """Close it if it has been idle for so long. Called at each tick, with the time of the listener's clock."""

    @staticmethod
    @abstractmethod
    def is_one_request(data: bytes) -> bool:
        """Whether this is certainly one request, with nothing missing and nothing behind it."""

    @abstractmethod
    def takes_back(self, data: bytes) -> bool:
        """Whether it goes on with a connection that it has handed over. It is given these bytes then, with which a
        request begins.
        """
