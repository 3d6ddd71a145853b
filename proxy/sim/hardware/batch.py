"""Simulates continuous batching of one engine: admission, steps and preemption. No clock: its owner passes the time.

As in vLLM's scheduler (v1/core/sched/scheduler.py), each decoding sequence gets a token in every step, and the rest of
the token budget computes prompts in chunks, in the order of their admission. If a sequence needs a block and none is
free, the sequence that was admitted last is preempted, and later computes everything again.

Nothing happens within a step, so steps that differ only in length are combined into a run. `stepwise` gives the same
results in runs of one step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.sim.hardware.work import KvBlocks, Shape, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.sim.hardware.cost import Cost


@dataclass(frozen=True, slots=True)
class _StepRun:
    """Consecutive steps of one batch. The first takes `first_seconds`; each next one takes `growth_seconds` longer."""

    began: float
    steps: int
    first_seconds: float
    growth_seconds: float
    decoding: Sequence[Work]
    chunks: Sequence[tuple[Work, int]]

    def seconds(self, steps: int) -> float:
        return steps * self.first_seconds + self.growth_seconds * steps * (steps - 1) / 2

    def until(self, now: float) -> _StepRun:
        """Return the same run, shortened so that it ends with the step that is under way at `now`."""
        wanted = now - self.began
        first, growth = self.first_seconds, self.growth_seconds
        if growth > 0:
            half = first - growth / 2
            steps = math.ceil((math.sqrt(half * half + 2 * growth * max(0.0, wanted)) - half) / growth)
        else:
            steps = math.ceil(wanted / first) if first else self.steps
        return _StepRun(self.began, min(self.steps, max(1, steps)), first, growth, self.decoding, self.chunks)


class Batch:
    """Continuous batching of one engine.

    `on_admitted` is called when work that awaits KV has got its blocks. `on_tokens` is called with work that has
    generated more tokens, and their number. Both may submit and drop work.
    """

    def __init__(
        self,
        cost: Cost,
        shape: Shape,
        *,
        on_tokens: Callable[[Work, int], None],
        on_admitted: Callable[[Work], None] | None = None,
        stepwise: bool = False,
    ) -> None:
        self.blocks = KvBlocks(shape.kv_tokens // shape.block_tokens)
        self.busy_seconds = 0.0
        self.recomputed_tokens = 0
        """Tokens that were computed again after a preemption."""
        self.preemptions = 0
        self._cost = cost
        self._shape = shape
        self._on_tokens = on_tokens
        self._on_admitted = on_admitted
        self._stepwise = stepwise
        self._waiting: deque[Work] = deque()
        self._running: dict[Work, None] = {}  # in the order of their admission; some may await KV
        self._run: _StepRun | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def due(self) -> float | None:
        """The time of the next call of `advance`; None if no step is under way."""
        return None if self._run is None else self._run.began + self._run.seconds(self._run.steps)

    def spent_seconds(self, now: float) -> float:
        """Return the elapsed time of the running steps."""
        return 0.0 if self._run is None else now - self._run.began

    def submit(self, work: Work, now: float) -> None:
        """Submit work. Raises ValueError if it does not fit into the engine's memory even alone."""
        if self._count_blocks(work.prompt_tokens + work.answer_tokens) > self.blocks.count:
            raise ValueError(f"{work.prompt_tokens} + {work.answer_tokens} tokens do not fit into the KV memory")
        self._waiting.append(work)
        if len(self._running) < self._shape.max_num_seqs:
            self._interrupt_run(now)

    def arrive(self, work: Work, now: float) -> None:
        """Record that the awaited KV of admitted work has arrived.

        The last token is computed again, as in real engines.
        """
        work.awaits_kv = False
        work.computed = work.tokens - 1
        work.is_decoding = True
        self.blocks.name(work.held, work.names[: work.prompt_tokens // self._shape.block_tokens])
        self._interrupt_run(now)

    def compute(self, work: Work, now: float, arrived_tokens: int = 0) -> None:
        """Record that no more of the awaited KV of admitted work arrives. Its other tokens are computed here.

        `arrived_tokens`: the number of leading tokens whose KV is cached or has arrived.
        """
        self.take_arrived(work, arrived_tokens)
        self._interrupt_run(now)

    def take_arrived(self, work: Work, arrived_tokens: int) -> None:
        """Do the same for work that is being admitted, so that the next run computes its other tokens."""
        work.awaits_kv = False
        cached = len(work.held.named) * self._shape.block_tokens
        work.fetched_tokens = max(0, arrived_tokens - cached)
        work.computed = work.began_behind = work.cached_tokens = cached + work.fetched_tokens

    def drop(self, work: Work, now: float) -> None:
        """Remove work in any state, and release its blocks."""
        if work in self._waiting:
            self._waiting.remove(work)
        if work in self._running:
            del self._running[work]
        self.blocks.give_back(work.held)
        self._interrupt_run(now)

    def give_back(self, work: Work, now: float) -> None:
        """Release the KV of ended work."""
        self.blocks.give_back(work.held)
        if self._waiting:
            self._interrupt_run(now)

    def advance(self, now: float) -> None:
        """End the current run, apply its results, and begin the next run."""
        run, self._run = self._run, None
        if run is not None:
            self._settle_run(run)
        if self._run is None:
            self._begin_run(now)

    def _interrupt_run(self, now: float) -> None:
        """Make the next run begin at the end of the current step, or now. Called when the batch has changed."""
        if self._run is None:
            self._begin_run(now)
        elif self._run.steps > 1:
            self._run = self._run.until(now)

    def _settle_run(self, run: _StepRun) -> None:
        self.busy_seconds += run.seconds(run.steps)
        told: list[tuple[Work, int]] = []
        for work in run.decoding:
            if work in self._running:  # otherwise it was dropped meanwhile
                work.generated += run.steps
                work.computed += run.steps
                told.append((work, run.steps))
        self._grow_blocks([work for work, _ in told], 0)
        for work, tokens in run.chunks:
            if work not in self._running:
                continue
            work.computed += tokens
            self.blocks.name(work.held, work.names[: work.computed // self._shape.block_tokens])
            if work.computed == work.tokens:
                work.is_decoding = True
                work.generated += 1
                told.append((work, 1))
        for work, _ in told:
            if work.is_ended:
                del self._running[work]
                if not work.keeps_kv:
                    self.blocks.give_back(work.held)
        for work, tokens in told:
            self._on_tokens(work, tokens)

    def _begin_run(self, now: float) -> None:
        preemptions = self.preemptions
        decoding = self._make_room()
        self._grow_blocks(decoding, 1)
        is_short = self.preemptions > preemptions
        if not is_short:
            self._admit_waiting_work()
        chunks = self._plan_chunks(len(decoding))
        if not decoding and not chunks:
            return
        cost = self._cost
        kv_tokens = sum(work.tokens for work in decoding)
        seconds = cost.decode(len(decoding), kv_tokens) if decoding else 0.0
        seconds += sum(cost.chunk(tokens, work.computed) for work, tokens in chunks)
        if not all(work.is_begun for work, _ in chunks):
            seconds += cost.prompt  # once for all prompts that begin together
        growth = cost.decode(len(decoding), kv_tokens + len(decoding)) - seconds if decoding and not chunks else 0.0
        steps = 1 if chunks or is_short or self._stepwise else self._count_steps(decoding)
        self._run = _StepRun(now, steps, seconds, growth, decoding, chunks)

    def _admit_waiting_work(self) -> None:
        while self._waiting and len(self._running) < self._shape.max_num_seqs:
            work = self._waiting[0]
            # The last token is always computed, for there must be something to sample from.
            sharable = work.names[: (work.prompt_tokens - 1) // self._shape.block_tokens]
            taken = self.blocks.take(sharable, self._count_blocks(work.tokens + 1))
            if taken is None:
                return
            self._waiting.popleft()
            work.held, hits = taken
            self._running[work] = None
            if work.awaits_kv:
                if self._on_admitted is not None:
                    self._on_admitted(work)
                continue
            work.computed = work.began_behind = hits * self._shape.block_tokens
            if work.preemptions:
                self.recomputed_tokens += work.tokens - work.computed
            else:
                work.cached_tokens = work.computed

    def _make_room(self) -> list[Work]:
        """Return the decoding sequences that have a block for their next token.

        Preempts other sequences if necessary.
        """
        while True:
            decoding = [work for work in self._running if work.is_decoding]
            if self._count_lacking_blocks(decoding, 1) <= self.blocks.free:
                return decoding
            last = next(work for work in reversed(self._running) if not work.awaits_kv)
            del self._running[last]
            self.blocks.give_back(last.held)
            last.computed = 0
            last.is_decoding = False
            last.preemptions += 1
            self.preemptions += 1
            self._waiting.appendleft(last)

    def _plan_chunks(self, decoding: int) -> list[tuple[Work, int]]:
        left = self._shape.max_num_batched_tokens - decoding
        chunks = []
        for work in self._running:
            if left > 0 and not work.awaits_kv and not work.is_decoding:
                tokens = min(left, work.tokens - work.computed)
                chunks.append((work, tokens))
                left -= tokens
        return chunks

    def _count_steps(self, decoding: Sequence[Work]) -> int:
        """Return the number of next steps that differ only in their length."""
        if any(not work.generated for work in decoding):
            return 1  # when first tokens come is worth knowing
        steps = min(work.answer_tokens - work.generated for work in decoding)
        if self._count_lacking_blocks(decoding, steps) > self.blocks.free:
            steps = max(1, (self.blocks.free // len(decoding) - 1) * self._shape.block_tokens)
        return steps

    def _grow_blocks(self, decoding: Sequence[Work], steps: int) -> None:
        for work in decoding:
            lacks = self._count_blocks(work.tokens + steps) - work.held.blocks
            if lacks > 0:
                self.blocks.grow(work.held, lacks)

    def _count_lacking_blocks(self, decoding: Sequence[Work], steps: int) -> int:
        return sum(max(0, self._count_blocks(work.tokens + steps) - work.held.blocks) for work in decoding)

    def _count_blocks(self, tokens: int) -> int:
        return -(-tokens // self._shape.block_tokens)
