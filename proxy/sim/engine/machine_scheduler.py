"""When tokens appear on an engine whose hardware is known: every step is one of `hardware.Batch`'s, in real time.

Unlike with `Scheduler` prompts are computed in chunks beside the sequences that decode, in the order of their
admission; KV memory is finite, and a sequence that finds none free has the last one preempted, which then computes
everything again. What is cached is what is in that memory. What a prefiller keeps for decoders is in its metrics, but
takes no room here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.sim.hardware.batch import Batch
from proxy.sim.hardware.work import Work
from proxy.sim.kv.cache import block_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from proxy.sim.hardware.blocks import Watcher
    from proxy.sim.hardware.work import Shape
    from proxy.sim.model.sequence import Sequence
    from proxy.sim.options import Options


class MachineScheduler:
    """Owns the sequences between `submit` and their end or `drop`, as Scheduler does, and the KV memory."""

    def __init__(self, options: Options, shape: Shape, on_step: Callable[[int], None]) -> None:
        self.batch = Batch(options.cost, shape, on_tokens=self._on_tokens, on_admitted=self._on_admitted, stepwise=True)
        self._options = options
        self._on_step = on_step
        self._works: dict[Sequence, Work] = {}
        self._sequences: dict[Work, Sequence] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> int:
        return self.batch.running

    @property
    def waiting(self) -> int:
        return self.batch.waiting

    @property
    def used_blocks(self) -> int:
        """Of KV memory, by sequences that run."""
        return self.batch.blocks.used

    @property
    def preemptions(self) -> int:
        return self.batch.preemptions

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        for sequence in list(self._works):
            self._forget(sequence)
        if self._timer is not None:
            self._timer.cancel()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. With `on_admitted` it is held, once admitted, until `begin`."""
        size = self._options.block_size
        work = Work(
            len(sequence.prompt),
            sequence.max_tokens,
            block_names(sequence.prompt, size, sequence.cache_salt),
            awaits_kv=sequence.on_admitted is not None,
        )
        self._works[sequence], self._sequences[work] = work, sequence
        self.batch.submit(work, self._now())
        self._arm()

    def begin(self, sequence: Sequence) -> None:
        """Go on with an admitted sequence, whose KV has come or is to be computed."""
        work = self._works.get(sequence)
        if work is None:
            return
        if sequence.prefill_tokens:
            self.batch.compute(work, self._now())
        else:
            self.batch.arrive(work, self._now())
        self._arm()

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: finished, failed or aborted."""
        self._forget(sequence)
        self._arm()

    def _forget(self, sequence: Sequence) -> None:
        work = self._works.pop(sequence, None)
        if work is not None:
            del self._sequences[work]
            self.batch.drop(work, self._now())

    def _on_admitted(self, work: Work) -> None:
        on_admitted = self._sequences[work].on_admitted
        assert on_admitted is not None
        on_admitted()

    def _on_tokens(self, work: Work, tokens: int) -> None:
        sequence = self._sequences.get(work)
        if sequence is None:
            return  # another one's end was the end of its request
        if sequence.prefill_tokens and not sequence.output:
            sequence.cached_tokens = work.cached_tokens
        before = len(sequence.output)
        goes_on = sequence.step(tokens * self._options.tokens_per_step)
        self._on_step(len(sequence.output) - before)
        if not goes_on or work.is_ended:
            self._forget(sequence)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _arm(self) -> None:
        assert self._loop is not None
        due = self.batch.due
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        # Steps begin when they were due, unless the machine cannot follow at all.
        self._timer = None
        self.batch.advance(max(due, self._now() - 1.0))
        self._arm()


class MachineCache:
    """What of a prompt is in the KV memory now."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self.queries = 0
        self.hits = 0

    def add(self, ids: Seq[int], salt: str = "") -> int:
        """How many of a prompt's tokens are there, never all of them. It comes there when it is computed."""
        names = block_names(ids, self._block_size, salt)[: (len(ids) - 1) // self._block_size]
        cached = self._batch.blocks.hit(names) * self._block_size
        self.queries += len(ids)
        self.hits += cached
        return cached

    def clear(self) -> None:
        self._batch.blocks.forget()

    def watch(self, watcher: Watcher) -> None:
        """Tell it what is cached from now on."""
        self._batch.blocks.watcher = watcher
