"""Simulated engines in virtual time: the batches of proxy.sim.hardware, driven by the loop's timers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.sim.hardware.batch import Batch, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.hardware.batch import Shape
    from proxy.sim.hardware.cost import Cost


class Engine:
    """One engine. `transfer` says how many seconds the KV of so many tokens travels to it."""

    def __init__(self, cost: Cost, shape: Shape, transfer_seconds_per_token: float) -> None:
        self.batch = Batch(cost, shape, on_tokens=self._on_tokens, on_admitted=self._on_admitted)
        self._transfer_seconds_per_token = transfer_seconds_per_token
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Work, asyncio.Future[None]] = {}  # for a first token, then for the last

    async def prefill(self, prompt_tokens: int, names: Sequence[int]) -> Work:
        """Compute a prompt, whose KV is kept until `give_back`."""
        work = Work(prompt_tokens, 1, names, keeps_kv=True)
        await self._submit(work)
        return work

    async def begin(self, prompt_tokens: int, answer_tokens: int) -> Work:
        """Fetch a prompt's KV and decode; return with the first token."""
        work = Work(prompt_tokens, answer_tokens, awaits_kv=True)
        await self._submit(work)
        return work

    async def end(self, work: Work) -> None:
        """Return with the last token."""
        if not work.is_ended:
            self._waiting[work] = self._loop.create_future()
            await self._waiting[work]

    def give_back(self, work: Work) -> None:
        """The KV of a prompt is kept no longer."""
        self.batch.give_back(work, self._loop.time())
        self._arm()

    async def _submit(self, work: Work) -> None:
        told = self._waiting[work] = self._loop.create_future()
        self.batch.submit(work, self._loop.time())
        self._arm()
        await told

    def _on_tokens(self, work: Work, tokens: int) -> None:
        waiter = self._waiting.get(work)
        if waiter is not None and (work.is_ended or work.generated == tokens):
            del self._waiting[work]
            waiter.set_result(None)

    def _on_admitted(self, work: Work) -> None:
        self._loop.call_later(self._transfer_seconds_per_token * work.prompt_tokens, self._arrive, work)

    def _arrive(self, work: Work) -> None:
        self.batch.arrive(work, self._loop.time())
        self._arm()

    def _arm(self) -> None:
        due = self.batch.due
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.batch.advance(self._loop.time())
        self._arm()
