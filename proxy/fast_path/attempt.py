"""The first attempt at a plain request: its legs, one after the other, in the callbacks of their connections.

`connectors.legs.opened` does the same in a coroutine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.connectors import legs as steps
from proxy.connectors.attempt import Attempt
from proxy.connectors.concurrent import abort_decode
from proxy.connectors.legs import Leg, Pair
from proxy.errors import NoBackendAvailable, UpstreamError
from proxy.fast_path.beside import Beside
from proxy.upstream.response import Response, WholeResponse

if TYPE_CHECKING:
    import asyncio
    from typing import Any

    from proxy.connectors.legs import Legs
    from proxy.fast_path.parts import FastParts
    from proxy.upstream.connection import Connection


class FastAttempt(ABC):
    """Until it is taken, or has failed: what is done then is the request's, which is a subclass since an object for
    each of them would cost a request a tenth of all else.
    """

    __deletable__ = ("_legs",)  # for mypyc
    __slots__ = ("_connecting", "_connection", "_legs", "_parts", "_response", "_sent")

    def __init__(self, parts: FastParts) -> None:
        self._parts = parts
        self._legs: Legs
        """Set before the first step."""
        self._connecting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        """To the engine whose answer has not begun."""
        self._sent: Leg | None = None
        self._response: Response | None = None

    # What becomes of it

    @abstractmethod
    def _take(self, attempt: Attempt) -> None:
        """A decoder answers."""

    @abstractmethod
    def _leave(self, error: NoBackendAvailable | UpstreamError) -> None:
        """The attempt has failed."""

    @abstractmethod
    def _break(self, error: Exception) -> None:
        """What nobody expected has happened."""

    # Its steps

    def _go(self, result: Any, failed: Exception | None = None) -> None:
        """Tell the legs what came of the last step, None before the first one, and do what they ask for."""
        try:
            step = self._legs.send(result) if failed is None else self._legs.throw(failed)
        except (NoBackendAvailable, UpstreamError) as error:
            self._leave(error)
            return
        except Exception as error:
            self._break(error)
            return
        if type(step) is Leg:
            self._send(step)
        elif isinstance(step, Attempt):
            self._take(step)
        elif type(step) is Pair:
            Beside(self._parts, step, self._prefill_failed).start()
            self._send(step.decode)
        else:
            assert isinstance(step, Response)
            step.collect(self._read)

    def _send(self, leg: Leg, connection: Connection | None = None) -> None:
        """`connection`: a fresh one; None: any that is there, or else a fresh one."""
        self._sent = leg
        if connection is None and (connection := self._parts.upstream.take_idle(leg.backend)) is None:
            self._connecting = self._parts.loop.create_task(self._connect(leg))
            return
        self._connection = connection
        if leg.then is not None:
            self._parts.upstream.preconnect(leg.then)
        exchange: WholeResponse | Response
        if leg.is_whole:
            exchange = WholeResponse(connection, self._arrived)
        else:
            exchange = self._response = Response(connection, self._answered)
        connection.begin(exchange, leg.path, leg.body, leg.headers, answer_seconds=leg.answer_seconds)

    async def _connect(self, leg: Leg, stale: UpstreamError | None = None) -> None:
        """`stale`: what ended the same leg before; it is to be sent once more."""
        try:
            connection = await self._parts.upstream.connect(leg.backend)
        except UpstreamError as error:
            self._connecting = None
            # Not CONNECT after it was asked: it may be gone because of that.
            self._go(None, stale or error)
            return
        self._connecting = None
        self._send(leg, connection)

    def _arrived(self, response: WholeResponse, body: bytes, error: UpstreamError | None) -> None:
        """An engine's whole answer has arrived, or will not."""
        connection, self._connection = self._connection, None
        assert connection is not None
        self._parts.upstream.give_back(connection)
        if error is None:
            self._go((response, body))
        else:
            self._unanswered(error)

    def _answered(self, error: UpstreamError | None) -> None:
        """The headers of an engine's answer have arrived, or will not."""
        connection, self._connection = self._connection, None
        assert connection is not None
        if error is None:
            self._sent = None  # with its body, however long the answer takes
            self._go(self._response)
        else:
            self._parts.upstream.give_back(connection)
            self._unanswered(error)

    def _unanswered(self, error: UpstreamError) -> None:
        leg = self._sent
        assert leg is not None
        if error.is_stale:  # as no fresh connection is
            self._parts.upstream.distrust(leg.backend)
            if leg.resend_if_stale:
                self._connecting = self._parts.loop.create_task(self._connect(leg, error))
                return
        self._go(None, error)

    def _read(self, body: bytes, error: UpstreamError | None) -> None:
        """The body that the legs wait for has arrived, or has not."""
        if error is None:
            self._go(body)
        else:
            self._go(None, error)

    def _prefill_failed(self, error: Exception) -> None:
        """That of a pair."""
        if self._sent is not None:  # the decoder has not answered yet
            self._drop()
            self._go(None, error)
        elif self._response is not None:
            abort_decode(self._response, error)

    def _drop(self) -> None:
        """Give up what was sent."""
        self._sent = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._parts.upstream.give_back(connection)

    def _release(self, error: BaseException) -> None:
        """Give everything back: the attempt ends with this error."""
        self._drop()
        with suppress(type(error)):
            steps.fail(self._legs, error)
