"""How many requests may be repeated at once, so that failing engines are not buried under second attempts.

A share of the requests in flight may be repeated at the same time (as Envoy's retry budget: concurrency, not a rate),
and a small number always. Others wait for their turn, and whoever waits longest is next: when one engine dies, many
requests fail at once, and none of them has to fail its client. One budget per worker.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class RetryBudget:
    """Counts requests, and those of them that are being repeated. Only `request` changes it."""

    def __init__(self, share: float = 0.2, least: int = 3) -> None:
        """Up to `share` of the requests in flight, rounded down, or `least` if that is more."""
        self.in_flight = 0
        self.repeating = 0
        self._share = share
        self._least = least
        self._waiting: dict[Repeat, asyncio.Future[None]] = {}  # the longest first

    def configure(self, share: float, least: int) -> None:
        """Change how many may be repeated."""
        self._share = share
        self._least = least
        self._admit()

    @property
    def capacity(self) -> int:
        """How many may be repeated now. When requests end it may fall below those that are: they go on."""
        return max(self._least, int(self._share * self.in_flight))

    @property
    def waiting(self) -> int:
        """Resumes that wait for their turn."""
        return len(self._waiting)

    def request(self) -> Repeat:
        """One unit of work, in flight from entering to leaving it."""
        return Repeat(self)

    def _admit(self) -> None:
        """Let in who waits, as far as there is room. So while anybody waits, there is none for who comes later."""
        while self._waiting and self.repeating < self.capacity:
            repeat = next(iter(self._waiting))
            turn = self._waiting.pop(repeat)
            repeat._take()
            turn.set_result(None)


class Repeat:
    """One request's place in the budget: it has it from `try_begin` or `begin` until `end`, at the latest until it is
    left. Get it from `RetryBudget.request`; `with`, not `async with`, so that no cancellation comes in between.
    """

    __slots__ = ("_budget", "is_repeating")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self.is_repeating = False

    def __enter__(self) -> Self:
        self._budget.in_flight += 1
        self._budget._admit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.in_flight -= 1  # before its place goes to another, for it makes the budget smaller
        self.end()

    def try_begin(self) -> bool:
        """Begin to repeat the request; False when it is not its turn yet. True also if it is being repeated already."""
        budget = self._budget
        if not self.is_repeating and budget.repeating < budget.capacity:
            self._take()
        return self.is_repeating

    async def begin(self, timeout_seconds: float) -> bool:
        """Begin to repeat the request, if need be when others have ended; False when that takes too long."""
        if self.try_begin():
            return True
        turn = asyncio.get_running_loop().create_future()
        self._budget._waiting[self] = turn
        has_begun = False
        try:
            await asyncio.wait((turn,), timeout=timeout_seconds)
            has_begun = self.is_repeating
        finally:
            self._budget._waiting.pop(self, None)
            if not has_begun:
                self.end()  # cancelled, perhaps when its turn had just come
        return has_begun

    def end(self) -> None:
        """The repeated attempt has its first token, or is over. May be called again."""
        if self.is_repeating:
            self.is_repeating = False
            self._budget.repeating -= 1
            self._budget._admit()

    def _take(self) -> None:
        self.is_repeating = True
        self._budget.repeating += 1
