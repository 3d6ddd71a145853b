"""Simulated engines: the batches of proxy.sim.hardware on the timers of a virtual or real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

from proxy.sim.hardware.batch import Batch
from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.work import Shape, Work

# vLLM's `kv_recompute_threshold` (nixl/base_scheduler.py): fewer tokens are computed instead of read.
_LEAST_READ_TOKENS: Final = 64
# Block size of vLLM. An answer's last full block of this size is cached, although named blocks are larger here.
_CACHED_BLOCK_TOKENS: Final = 16


class AnswerClock:
    """Counts the tokens of one answer, as the gateway's token clock does."""

    def __init__(self, batch: Batch, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self._batch = batch
        self._work = work
        self._loop = loop

    @property
    def timed_gaps(self) -> int:
        """Number of gaps between tokens so far, one of eight."""
        return self._batch.generated_at(self._work, self._loop.time()) // 8


class Engine:
    """One engine. `transfer_seconds_per_token`: time to transfer the KV cache of one token to it."""

    def __init__(self, cost: Cost, shape: Shape, transfer_seconds_per_token: float) -> None:
        self.batch = Batch(cost, shape, on_tokens=self._on_tokens, on_admitted=self._on_admitted)
        self._transfer_seconds_per_token = transfer_seconds_per_token
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Work, asyncio.Future[None]] = {}  # for the first token, then for the last one
        self.cost = cost
        self._block_tokens = shape.block_tokens
        self._prompts: dict[Work, None] = {}  # not computed yet
        self._watchers: dict[Work, Callable[[int], None]] = {}
        self._link_factors: dict[Work, float] = {}  # of those that wait for KV over a slow link
        self._kept_tokens: dict[Work, int] = {}  # of prompts of which another engine keeps a part
        self._tails: dict[Work, tuple[int, int]] = {}  # of prompts that a decoder computes; see `append`

    def hit(self, names: Sequence[int]) -> int:
        """Return how many blocks of a new prompt, from its beginning, would be cached here.

        Blocks of prompts that are not computed yet count, too.
        """
        hits = self.batch.blocks.hit(names)
        for work in self._prompts:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(work.names, names, strict=False)))
            hits = max(hits, same)
        return hits

    @property
    def seconds_left(self) -> float:
        """Seconds until all prompts here are computed."""
        seconds = -self.batch.spent_seconds(self._loop.time())
        for work in self._prompts:
            cached = work.computed or self._block_tokens * self.batch.blocks.hit(work.names)
            seconds += self.cost.chunk(work.prompt_tokens - cached, cached)
            seconds += 0.0 if work.is_begun else self.cost.prompt
        return max(0.0, seconds)

    async def prefill(self, prompt_tokens: int, names: Sequence[int], kept_tokens: int = 0) -> Work:
        """Compute a prompt. Its KV cache is kept until `give_back`.

        `kept_tokens`: number of leading tokens of which another engine keeps the KV cache, to be fetched from it.
        """
        work = Work(prompt_tokens, 1, names, keeps_kv=True, awaits_kv=kept_tokens > 0)
        if kept_tokens:
            self._kept_tokens[work] = kept_tokens
        self._prompts[work] = None
        await self._submit(work)
        del self._prompts[work]
        return work

    async def begin(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        on_tokens: Callable[[int], None] | None = None,
        *,
        link_factor: float = 1.0,
        keeps_kv: bool = False,
        names: Sequence[int] = (),
    ) -> Work:
        """Fetch a prompt's KV cache and decode. Return with the first token, or without one if it is evacuated.

        `on_tokens` gets the number of new tokens at each step. `link_factor`: relative time of the transfer.
        `keeps_kv`: whether the KV cache is kept after the answer until `give_back`. `names`: full blocks of the prompt,
        which later prompts can share.
        """
        work = Work(prompt_tokens, answer_tokens, names, awaits_kv=True, keeps_kv=keeps_kv)
        if link_factor != 1.0:
            self._link_factors[work] = link_factor
        if on_tokens is not None:
            self._watchers[work] = on_tokens
        await self._submit(work)
        return work

    async def append(
        self, prompt_tokens: int, answer_tokens: int, names: Sequence[int], tail: tuple[int, int] = (0, 0)
    ) -> Work:
        """Compute a prompt between the tokens of running answers, and decode. Return as `begin` does.

        `tail`: full blocks of the prompt before that this one continues, and the tokens of that prompt and its answer.
        They are cached here if all these blocks are.
        """
        work = Work(prompt_tokens, answer_tokens, names, awaits_kv=True)
        self._tails[work] = tail
        await self._submit(work)
        return work

    def clock_of(self, work: Work) -> AnswerClock:
        """Return the token clock of an answer."""
        return AnswerClock(self.batch, work, self._loop)

    async def end(self, work: Work) -> int:
        """Return with the last token, or when the answer is evacuated. Return the number of its tokens."""
        if not work.is_ended:
            self._waiting[work] = self._loop.create_future()
            await self._waiting[work]
        return work.generated

    def evacuate(self) -> None:
        """Break off all answers. Those that have not begun end without a token."""
        for work in [work for work in self._waiting if not work.keeps_kv]:
            self._watchers.pop(work, None)
            self.batch.drop(work, self._loop.time())
            self._waiting.pop(work).set_result(None)
        self._arm()

    def give_back(self, work: Work) -> None:
        """Free the KV cache of a prompt."""
        self.batch.give_back(work, self._loop.time())
        self._arm()

    async def _submit(self, work: Work) -> None:
        first_token = self._waiting[work] = self._loop.create_future()
        self.batch.submit(work, self._loop.time())
        self._arm()
        await first_token

    def _on_tokens(self, work: Work, tokens: int) -> None:
        watcher = self._watchers.pop(work, None) if work.is_ended else self._watchers.get(work)
        if watcher is not None:
            watcher(tokens)
        waiter = self._waiting.get(work)
        if waiter is not None and (work.is_ended or work.generated == tokens):
            del self._waiting[work]
            waiter.set_result(None)

    def _on_admitted(self, work: Work) -> None:
        tail = self._tails.pop(work, None)
        if tail is not None:
            blocks, tokens = tail
            has_tail = len(work.held.named) >= blocks
            self.batch.take_arrived(work, tokens // _CACHED_BLOCK_TOKENS * _CACHED_BLOCK_TOKENS if has_tail else 0)
            return
        kept_tokens = self._kept_tokens.pop(work, 0)
        if kept_tokens:
            missing = kept_tokens - self._block_tokens * len(work.held.named)
            arrived_tokens = kept_tokens if missing >= _LEAST_READ_TOKENS else 0
            seconds = self._transfer_seconds_per_token * missing if arrived_tokens else 0.0
            self._loop.call_later(seconds, self._arrive_in_part, work, arrived_tokens)
            return
        seconds = self._transfer_seconds_per_token * self._link_factors.pop(work, 1.0)
        seconds *= work.prompt_tokens - self._block_tokens * len(work.held.named)
        self._loop.call_later(seconds, self._arrive, work)

    def _arrive(self, work: Work) -> None:
        if work not in self._waiting:
            return  # it was evacuated during the transfer
        self.batch.arrive(work, self._loop.time())
        self._arm()

    def _arrive_in_part(self, work: Work, tokens: int) -> None:
        self.batch.compute(work, self._loop.time(), tokens)
        self._arm()

    def _arm(self) -> None:
        due = self.batch.due
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        # In real time the clock is later than `due` here. Steps still begin at `due`.
        self._timer = None
        self.batch.advance(due)
        self._arm()
