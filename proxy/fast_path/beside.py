"""The prefill leg of a Pair, in the callbacks of its connection.

`connectors.driver` does the same in a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import UpstreamError
from proxy.upstream.response import WholeResponse

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.connectors.legs import Pair
    from proxy.fast_path.parts import FastParts
    from proxy.upstream.connection import Connection


class Beside:
    """Under way from `start` on. The pair stops it."""

    __slots__ = ("_connecting", "_connection", "_on_failure", "_pair", "_parts")

    def __init__(self, parts: FastParts, pair: Pair, on_failure: Callable[[Exception], None]) -> None:
        self._parts = parts
        self._pair = pair
        self._on_failure = on_failure
        self._connecting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Send it."""
        self._pair.stop = self._stop
        connection = self._parts.upstream.take_idle(self._pair.prefill.backend)
        if connection is None:
            self._connecting = self._parts.loop.create_task(self._connect())
        else:
            self._send(connection)

    async def _connect(self) -> None:
        try:
            connection = await self._parts.upstream.connect(self._pair.prefill.backend)
        except UpstreamError as error:
            self._connecting = None
            self._failed(error)
            return
        self._connecting = None
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        leg = self._pair.prefill
        exchange = WholeResponse(connection, self._arrived)
        connection.begin(exchange, leg.path, leg.body, leg.headers, answer_seconds=leg.answer_seconds)

    def _arrived(self, response: WholeResponse, body: bytes, error: UpstreamError | None) -> None:
        """The whole answer has arrived, or will not."""
        self._give_back()
        if error is not None:
            self._failed(error)
            return
        try:
            self._pair.read(response, body)
        except Exception as problem:
            self._failed(problem)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, UpstreamError) and error.is_stale:  # it is sent with the next attempt
            self._parts.upstream.distrust(error.backend)
        self._pair.error = error
        self._on_failure(error)

    def _stop(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self._give_back()

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._parts.upstream.give_back(connection)
