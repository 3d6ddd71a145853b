"""Sends the legs of one attempt. The callbacks of the connections trigger each next step."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.connectors.legs import Attempt, EngineLeg, LegPair, fail_legs, finish_legs
from proxy.upstream.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from proxy.connectors.legs import Legs
    from proxy.upstream import Upstream
    from proxy.upstream.connection import EngineConnection


class AttemptOwner(Protocol):
    """The owner of one attempt, which receives its outcome."""

    def on_attempt(self, attempt: Attempt) -> None:
        """Take the decoder's answer.

        To end the attempt, call `LegDriver.finish_attempt`, `fail_attempt` or `release_attempt`.
        """

    def on_failure(self, error: NoBackendAvailable | UpstreamError) -> None:
        """Handle a failed attempt, whose leases and connections have already been given back."""

    def on_defect(self, error: Exception) -> None:
        """Handle an attempt that ended because of a defect in this program."""


class LegDriver:
    """Drives one attempt. It sends the legs one after the other, or two legs at the same time."""

    def __init__(self, upstream: Upstream, owner: AttemptOwner) -> None:
        self._upstream = upstream
        self._owner: AttemptOwner | None = owner
        self._legs: Legs | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connection: EngineConnection | None = None
        """The connection to an engine whose answer has not begun; None if no leg waits for an answer."""
        self._sent: EngineLeg | None = None
        self._response: Response | None = None

    def start_legs(self, legs: Legs) -> None:
        """Send the first leg of an attempt. The owner may receive the outcome before this method returns."""
        self._legs = legs
        self._advance_legs(None)

    def finish_attempt(self) -> None:
        """End an attempt whose answer was received completely."""
        legs = self._take_legs()
        if legs is not None:
            finish_legs(legs)

    def fail_attempt(self, error: BaseException) -> None:
        """End an attempt whose answer failed. Raises `error`, or the prefill leg's error if that leg has failed."""
        legs = self._take_legs()
        if legs is None:
            raise error
        fail_legs(legs, error)

    def release_attempt(self, error: BaseException) -> None:
        """Give up the attempt in any state. Closes its connections and gives back its leases."""
        self._drop_response()
        with suppress(type(error)):
            self.fail_attempt(error)

    def _take_legs(self) -> Legs | None:
        """Return the legs and drop the references to the owner and the response, so that no reference cycle remains."""
        legs, self._legs = self._legs, None
        self._owner = self._response = None
        return legs

    def _advance_legs(self, result: Any, failed: Exception | None = None) -> None:
        """Give the legs the result of the last step, and take the next step. `result` is None for the first step."""
        legs, owner = self._legs, self._owner
        if legs is None or owner is None:
            return
        try:
            step = legs.send(result) if failed is None else legs.throw(failed)
        except (NoBackendAvailable, UpstreamError) as error:
            self._take_legs()
            owner.on_failure(error)
            return
        except Exception as error:
            self._take_legs()
            owner.on_defect(error)
            return
        if type(step) is EngineLeg:
            self._send_leg(step)
        elif isinstance(step, Attempt):
            owner.on_attempt(step)
        elif type(step) is LegPair:
            prefill, decode = step.take_legs()
            PrefillLegOfPair(self._upstream, step, self._on_prefill_failure).start_leg(prefill)
            self._send_leg(decode)
        else:
            assert isinstance(step, Response)
            step.collect_body(self._on_body)

    def _send_leg(self, leg: EngineLeg, connection: EngineConnection | None = None) -> None:
        """Send a leg on `connection` if there is one, otherwise on an idle or a new connection."""
        upstream = self._upstream
        self._sent = leg
        if connection is None and (connection := upstream.take_idle_connection(leg.backend)) is None:
            self._connecting = asyncio.create_task(self._connect_and_send(leg))
            return
        self._connection = connection
        if leg.preconnect_to is not None:
            upstream.open_in_advance(leg.preconnect_to)
        response = self._response = Response(connection, None if leg.wants_whole_body else self._on_head)
        if leg.wants_whole_body:
            response.collect_body(self._on_whole_answer)
        connection.begin_exchange(response, leg.path, leg.body, leg.headers, answer_seconds=leg.answer_seconds)

    async def _connect_and_send(self, leg: EngineLeg, stale: UpstreamError | None = None) -> None:
        """Open a connection and send a leg. `stale`: the error of this leg on an idle connection that was closed."""
        try:
            connection = await self._upstream.open_connection(leg.backend)
        except UpstreamError as error:
            self._connecting = None
            # Report the stale connection rather than CONNECT: the engine had the request and may have died of it.
            self._advance_legs(None, stale or error)
            return
        self._connecting = None
        self._send_leg(leg, connection)

    def _on_whole_answer(self, body: bytes, error: UpstreamError | None) -> None:
        """Handle the complete answer of an engine."""
        self._give_back_connection()
        if error is None:
            self._advance_legs((self._response, body))
        else:
            self._on_no_answer(error)

    def _on_head(self, error: UpstreamError | None) -> None:
        """Handle the headers of an engine's answer."""
        if error is None:
            self._connection = None
            self._sent = None  # a long answer would keep its body
            self._advance_legs(self._response)
        else:
            self._give_back_connection()
            self._on_no_answer(error)

    def _on_no_answer(self, error: UpstreamError) -> None:
        leg = self._sent
        assert leg is not None
        if error.is_stale_connection:  # which happens on idle connections only
            self._upstream.stop_reuse_briefly(leg.backend)
            if leg.resend_if_stale:
                self._connecting = asyncio.create_task(self._connect_and_send(leg, error))
                return
        self._advance_legs(None, error)

    def _on_body(self, body: bytes, error: UpstreamError | None) -> None:
        """Handle the body of an answer for which the legs wait."""
        if error is None:
            self._advance_legs(body)
        else:
            self._advance_legs(None, error)

    def _on_prefill_failure(self, error: Exception) -> None:
        """End the decode leg because the prefill leg of the same pair failed."""
        if self._sent is not None:  # the decoder has not answered yet
            self._drop_response()
            self._advance_legs(None, error)
        elif self._response is not None:
            abort_decode(self._response, error)

    def _drop_response(self) -> None:
        """Give up the leg that is under way, and close its connection."""
        self._sent = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        self._give_back_connection()

    def _give_back_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._upstream.return_connection(connection)


class PrefillLegOfPair:
    """The prefill leg of a pair. It runs from `start_leg` until it ends or the pair stops it."""

    def __init__(self, upstream: Upstream, pair: LegPair, on_failure: Callable[[Exception], None]) -> None:
        self._upstream = upstream
        self._pair = pair
        self._on_failure = on_failure
        self._connecting: asyncio.Task[None] | None = None
        self._connection: EngineConnection | None = None
        self._response: Response | None = None
        """The answer that is arriving. None if there is none."""
        self._waiting: asyncio.Future[None] | None = None
        """The future of the task that waits for the end of this leg; None if no task waits."""

    def start_leg(self, leg: EngineLeg) -> None:
        """Send the prefill leg of a pair."""
        pair = self._pair
        pair.stop_prefill, pair.wait_for_prefill_end = self._stop_leg, self._wait_for_end
        connection = self._upstream.take_idle_connection(leg.backend)
        if connection is None:
            self._connecting = asyncio.create_task(self._connect_and_send(leg))
        else:
            self._send_leg(leg, connection)

    async def _wait_for_end(self) -> None:
        """Wait for the end of the prefill leg. Raises the leg's error if it failed."""
        if self._connecting is not None or self._connection is not None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._pair.error is not None:
            raise self._pair.error

    async def _connect_and_send(self, leg: EngineLeg) -> None:
        try:
            connection = await self._upstream.open_connection(leg.backend)
        except UpstreamError as error:
            self._connecting = None
            self._fail_leg(error)
            return
        self._connecting = None
        self._send_leg(leg, connection)

    def _send_leg(self, leg: EngineLeg, connection: EngineConnection) -> None:
        self._connection = connection
        response = self._response = Response(connection)
        response.collect_body(self._on_whole_answer)
        connection.begin_exchange(response, leg.path, leg.body, leg.headers, answer_seconds=leg.answer_seconds)

    def _on_whole_answer(self, body: bytes, error: UpstreamError | None) -> None:
        """Handle the complete answer of the prefiller."""
        response = self._response
        self._give_back_connection()
        if error is not None:
            self._fail_leg(error)
            return
        assert response is not None
        try:
            self._pair.read_prefill_answer(response, body)
        except Exception as problem:
            self._fail_leg(problem)
            return
        self._wake_waiter()

    def _fail_leg(self, error: Exception) -> None:
        if isinstance(error, UpstreamError) and error.is_stale_connection:  # the next attempt sends it again
            self._upstream.stop_reuse_briefly(error.backend)
        is_served = self._pair.is_served
        if is_served is not None and is_served():
            self._wake_waiter()
            return
        self._pair.error = error
        self._wake_waiter()
        self._on_failure(error)

    def _stop_leg(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        self._give_back_connection()
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _give_back_connection(self) -> None:
        connection, self._connection = self._connection, None
        self._response = None
        if connection is not None:
            self._upstream.return_connection(connection)


class open_attempt:  # noqa: N801 - used as a function
    """Opens an attempt from a coroutine.

    It is an async context manager whose value is the Attempt; see Connector.open_attempt.

    Raises the errors of the legs: NoBackendAvailable, UpstreamError.
    """

    def __init__(self, legs: Legs, upstream: Upstream) -> None:
        self._legs = legs
        self._driver = LegDriver(upstream, self)
        self._opening: asyncio.Future[Attempt]

    async def __aenter__(self) -> Attempt:
        self._opening = asyncio.get_running_loop().create_future()
        self._driver.start_legs(self._legs)
        try:
            return await self._opening
        except BaseException as error:
            if self._opening.done() and not self._opening.cancelled():
                self._opening.exception()  # retrieved, also where the task was cancelled in the same moment
            self._driver.release_attempt(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._driver.finish_attempt()
        else:
            self._driver.fail_attempt(error)

    # AttemptOwner

    def on_attempt(self, attempt: Attempt) -> None:
        if not self._opening.done():
            self._opening.set_result(attempt)

    def on_failure(self, error: NoBackendAvailable | UpstreamError) -> None:
        if not self._opening.done():
            self._opening.set_exception(error)

    def on_defect(self, error: Exception) -> None:
        if not self._opening.done():
            self._opening.set_exception(error)


def abort_decode(response: Response, error: BaseException) -> None:
    """End the decode leg because the prefill leg failed. Otherwise the decoder would wait for KV that does not arrive.

    The error of the prefill leg replaces that of the decode leg; see `run_prefill_beside` and LegPair.
    """
    if not isinstance(error, UpstreamError):
        error = response.make_failure(Failure.BROKEN, "the prefill leg failed")
    response.abort_exchange(error)
