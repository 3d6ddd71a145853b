"""Decides whether to retry a failed attempt, and how long to wait before it.

Two questions decide: may the engine have begun the work, and has the client seen any of it?
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, Self

from proxy.common.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from proxy.common.errors import UpstreamError
    from proxy.settings import Retry


_UNLIMITED: Final = frozenset(
    {Failure.CONNECT, Failure.BOOTSTRAP, Failure.RESTARTED, Failure.RECOMPUTED, Failure.REMOVED, Failure.ABORTED},
)
"""Failures after which the attempts are limited by `retry.max_attempts` only."""


def may_retry(error: UpstreamError, *, sent_to_client: bool, attempt_count: int, max_attempts: int) -> bool:
    """Return whether to retry a failed attempt on another backend.

    All attempts are available after a refused connection, a failed bootstrap, a busy engine (429, 503), a decoder that
    ran out of KV memory, and an instance that was removed, was restarted or is stopping.

    A lost or broken answer and a 5xx may have pinned KV cache on a prefiller, so they are retried once. So are requests
    of a stalled backend. Timeouts are not retried, because a second wait of the same length helps no client. Errors of
    the client would fail on all instances.

    Args:
        error: The failure of the last attempt.
        sent_to_client: Whether the client has received bytes. If so, nothing is retried.
        attempt_count: The number of attempts that failed in the error's role.
        max_attempts: The setting `retry.max_attempts`.
    """
    return not sent_to_client and attempt_count < min(_max_attempts_for(error, max_attempts), max_attempts)


def _max_attempts_for(attempt_error: UpstreamError, max_attempts: int) -> int:
    if attempt_error.failure in _UNLIMITED or attempt_error.is_backpressure:
        return max_attempts
    if (
        attempt_error.failure in (Failure.TIMEOUT, Failure.MISSING_KV, Failure.NOT_RESUMED)
        or attempt_error.is_fault_of_client
    ):
        return 1
    return 2


def backoff_seconds(retry_options: Retry, attempts: int, random_draw: float | None = None) -> float:
    """Return the wait before the next attempt: exponential with full jitter.

    `random_draw`: a random number in [0, 1).
    """
    random_draw = random.random() if random_draw is None else random_draw
    doublings = min(attempts - 1, 64)  # far beyond any bound, and still a float
    ceiling: float = min(retry_options.max_delay_seconds, retry_options.base_delay_seconds * 2**doublings)
    return random_draw * ceiling


class RetryBudget:
    """Limits how many requests are retried at a time.

    The limit is `budget_share` of the requests in flight, rounded down, but at least `budget_least`.
    """

    def __init__(self, options: Callable[[], Retry]) -> None:
        """Create a budget of retries without any request."""
        self.in_flight_count = 0
        """Requests in flight. `count_request` adds one, and its caller subtracts it again."""
        self.held_permits = 0
        """Permits that are held."""
        self._get_options = options
        self._waiting_permits: dict[RetryPermit, asyncio.Future[None]] = {}  # in the order in which they came

    @property
    def permit_capacity(self) -> int:
        """The present limit. It may fall below the number of permits that are held, which stay valid."""
        options = self._get_options()
        return max(options.budget_least, int(options.budget_share * self.in_flight_count))

    @property
    def waiting_count(self) -> int:
        """The number of requests that wait for a permit."""
        return len(self._waiting_permits)

    def count_request(self) -> None:
        """Count a request that is in flight towards the budget of retries."""
        self.in_flight_count += 1
        if self._waiting_permits:
            self.grant_free_permits()

    def grant_free_permits(self) -> None:
        """Grant free permits in the order of the requests, before later requests can take them."""
        while self._waiting_permits and self.held_permits < self.permit_capacity:
            permit = next(iter(self._waiting_permits))
            granted = self._waiting_permits.pop(permit)
            permit._take_permit()
            granted.set_result(None)


class RetryPermit:
    """The permit of one request to be retried, held from `acquire_permit` to `release_permit` or the end of `with`.

    The request is in flight within the block. The block is not asynchronous, so that it cannot be cancelled halfway.
    """

    def __init__(self, budget: RetryBudget) -> None:
        self._retry_budget = budget
        self.is_held = False

    def __enter__(self) -> Self:
        self._retry_budget.count_request()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before the permit goes to another unit, because the budget gets smaller.
        self._retry_budget.in_flight_count -= 1
        self.release_permit()

    def try_acquire_permit(self) -> bool:
        """Take the permit if one is free. Return whether it is held now."""
        budget = self._retry_budget
        if not self.is_held and budget.held_permits < budget.permit_capacity:
            self._take_permit()
        return self.is_held

    async def acquire_permit(self, timeout_seconds: float) -> bool:
        """Take the permit, and wait for one to become free if necessary. Return False after the timeout."""
        if self.try_acquire_permit():
            return True
        granted = asyncio.get_running_loop().create_future()
        self._retry_budget._waiting_permits[self] = granted
        is_acquired = False
        try:
            await asyncio.wait((granted,), timeout=timeout_seconds)
            is_acquired = self.is_held
        finally:
            self._retry_budget._waiting_permits.pop(self, None)
            if not is_acquired:
                self.release_permit()  # the wait was cancelled, perhaps just as the permit was granted
        return is_acquired

    def release_permit(self) -> None:
        """Release the permit after the first token or the end of the attempt. May be called again."""
        if self.is_held:
            self.is_held = False
            self._retry_budget.held_permits -= 1
            self._retry_budget.grant_free_permits()

    def _take_permit(self) -> None:
        self.is_held = True
        self._retry_budget.held_permits += 1
