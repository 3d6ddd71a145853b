"""When a failed attempt may be repeated, and how long to wait before it. Pure.

The questions are always the same two: can the engine have begun the work, and has the client seen any of it?
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, Self

from proxy.common.errors import Failure

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.common.errors import UpstreamError
    from proxy.settings import Retry


_FREE: Final = frozenset(
    {Failure.CONNECT, Failure.BOOTSTRAP, Failure.RECOMPUTED, Failure.REMOVED, Failure.ABORTED},
)
"""Failures after which all attempts may be used."""


def may_retry(error: UpstreamError, *, sent_to_client: bool, attempts: int, max_attempts: int) -> bool:
    """May the request be tried again on another backend, after `attempts` tries that failed in this error's role?

    Nothing is repeated once the client has bytes. A refused connection, a prefiller that decoders cannot meet, a busy
    engine (429, 503), a decoder that gave up for lack of memory, and an instance that was removed or is being stopped
    are no reason to give up, so they may use all attempts.

    A lost or broken answer and a 5xx may have pinned KV cache on a prefiller. Those are repeated once, and so is what a
    stalled backend held. A deadline that passed is not repeated, since a second wait of that length helps no client.
    What is the client's fault fails everywhere.
    """
    return not sent_to_client and attempts < min(_attempts(error, max_attempts), max_attempts)


def _attempts(error: UpstreamError, max_attempts: int) -> int:
    if error.failure in _FREE or error.is_backpressure:
        return max_attempts
    if error.failure in (Failure.TIMEOUT, Failure.MISSING_KV, Failure.NOT_RESUMED) or error.is_clients_fault:
        return 1
    return 2


def backoff_seconds(retry: Retry, attempts: int, draw: float | None = None) -> float:
    """Wait before the next attempt: exponential with full jitter. `draw` is the random number in [0, 1)."""
    draw = random.random() if draw is None else draw
    doublings = min(attempts - 1, 64)  # far beyond any bound, and still a float
    ceiling: float = min(retry.max_delay_seconds, retry.base_delay_seconds * 2**doublings)
    return draw * ceiling


class RetryBudget:
    """Counts the requests in flight, and those of them that are being retried. Only permits change it."""

    def __init__(self, share: float = 0.2, least: int = 3) -> None:
        """The larger of `share` of the requests in flight, rounded down, and `least` may be retried at once."""
        self.in_flight = 0
        self.repeating = 0
        """Permits that are held."""
        self._share = share
        self._least = least
        self._waiting: dict[RetryPermit, asyncio.Future[None]] = {}  # in the order in which they came

    def configure(self, share: float, least: int) -> None:
        """Change how many may be retried."""
        self._share = share
        self._least = least
        self._grant()

    @property
    def capacity(self) -> int:
        """Permits there are now. As requests end it may fall below those that are held, which stay valid."""
        return max(self._least, int(self._share * self.in_flight))

    @property
    def waiting(self) -> int:
        """Requests that wait for a permit."""
        return len(self._waiting)

    def request(self) -> RetryPermit:
        """The permit of one unit of work, which is in flight from entering to leaving it."""
        return RetryPermit(self)

    def enter(self) -> None:
        """A request is in flight, until it leaves. As entering its permit, for one that is not being retried."""
        self.in_flight += 1
        if self._waiting:
            self._grant()

    def leave(self) -> None:
        """It is no longer in flight."""
        self.in_flight -= 1

    def _grant(self) -> None:
        """Give free permits to those that wait, so that later requests find none free while others are waiting."""
        while self._waiting and self.repeating < self.capacity:
            permit = next(iter(self._waiting))
            granted = self._waiting.pop(permit)
            permit._take()
            granted.set_result(None)


class RetryPermit:
    """What one request needs to be retried. It is held from `acquire` to `release`, at the latest until the `with`
    block is left. That is a `with` and not an `async with`, so that no cancellation comes in between.
    """

    __slots__ = ("_budget", "is_held")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self.is_held = False

    def __enter__(self) -> Self:
        self._budget.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.leave()  # before the permit goes to another, because it makes the budget smaller
        self.release()

    def try_acquire(self) -> bool:
        """Hold the permit if one is free, or if it is held already; whether it is held now."""
        budget = self._budget
        if not self.is_held and budget.repeating < budget.capacity:
            self._take()
        return self.is_held

    async def acquire(self, timeout_seconds: float) -> bool:
        """Hold the permit, if need be as soon as others release theirs; False when that takes too long."""
        if self.try_acquire():
            return True
        granted = asyncio.get_running_loop().create_future()
        self._budget._waiting[self] = granted
        is_acquired = False
        try:
            await asyncio.wait((granted,), timeout=timeout_seconds)
            is_acquired = self.is_held
        finally:
            self._budget._waiting.pop(self, None)
            if not is_acquired:
                self.release()  # the wait was cancelled, perhaps just as the permit was granted
        return is_acquired

    def release(self) -> None:
        """The retried attempt has its first token, or is over. May be called again."""
        if self.is_held:
            self.is_held = False
            self._budget.repeating -= 1
            self._budget._grant()

    def _take(self) -> None:
        self.is_held = True
        self._budget.repeating += 1
