"""Schedulers decide when the tokens of a simulated engine appear: `Scheduler` and `MachineScheduler`.

`Scheduler` runs at most `max_num_seqs` sequences and queues the others in order. It computes prompts one after another.
Running sequences advance together, and a step takes longer the more of them there are. One timer drives the batch.
Without configured delays every turn of the event loop is a step.

`MachineScheduler` runs `hardware.Batch` in real time. It computes prompts in chunks beside decoding sequences. Its KV
memory is finite: if no block is free, the sequence that was admitted last is preempted and computed again. KV that a
prefiller keeps for decoders is reported in the metrics, but uses no memory here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from proxy.sim.hardware.batch import Batch
from proxy.sim.hardware.work import Shape, Watcher, Work
from proxy.sim.kv.cache import block_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.sim.model.request import TokenSequence
    from proxy.sim.options import Options


class Scheduler:
    """Schedules the sequences of an engine from `submit` until their end or `drop`."""

    def __init__(self, options: Options, on_step: Callable[[int], None]) -> None:
        self._options = options
        self.cost = options.cost
        self._on_step = on_step
        self._waiting: deque[TokenSequence] = deque()
        self._running: set[TokenSequence] = set()
        self._prefilling: deque[TokenSequence] = deque()
        self._decoding: list[TokenSequence] = []
        self._prefill_free_at = 0.0
        self._next_step_at = 0.0
        self._is_held = self._holds_prefills = False
        self._timer: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_blocks(self) -> int:
        """The number of KV blocks in use. Always 0: only MachineScheduler counts the memory of running sequences."""
        return 0

    @property
    def preemptions(self) -> int:
        """Return 0, because this scheduler preempts no sequence."""
        return 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._schedule_tick()

    def hold(self, *, prefills: bool = False) -> None:
        """Hold back all tokens after the first of each sequence until `go_on`.

        `prefills`: hold back first tokens, too.
        """
        self._is_held, self._holds_prefills = True, prefills

    def go_on(self) -> None:
        """Continue the sequences that were held back."""
        self._is_held = self._holds_prefills = False
        self._schedule_tick()

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a sequence. A sequence with `on_admitted` waits after its admission until `begin`."""
        self._waiting.append(sequence)
        self._admit_waiting_sequences()

    def begin(self, sequence: TokenSequence) -> None:
        """Start the prefill of an admitted sequence. Its first token follows when the prefill is done."""
        if sequence not in self._running:
            return
        seconds = self.cost.prefill(sequence.prefill_tokens, sequence.cached_tokens) if sequence.prefill_tokens else 0.0
        self._prefill_free_at = max(self._now(), self._prefill_free_at) + seconds
        sequence.ready_at = self._prefill_free_at
        self._prefilling.append(sequence)
        self._schedule_tick()

    def drop(self, sequence: TokenSequence) -> None:
        """Remove a sequence in any state: queued, running or ended."""
        self._running.discard(sequence)
        for sequences in (self._waiting, self._prefilling, self._decoding):
            if sequence in sequences:
                sequences.remove(sequence)
        self._admit_waiting_sequences()

    def _admit_waiting_sequences(self) -> None:
        while self._waiting and len(self._running) < self._options.max_num_seqs:
            sequence = self._waiting.popleft()
            self._running.add(sequence)
            if sequence.on_admitted is None:
                self.begin(sequence)
            else:
                sequence.on_admitted()

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _step_seconds(self) -> float:
        # KV memory counts on known hardware. There are few sequences then, and this runs for each step.
        kv_tokens = 0
        if self.cost.step_kv_token:
            kv_tokens = sum(len(sequence.prompt) + len(sequence.output) for sequence in self._decoding)
        return self.cost.decode(len(self._decoding), kv_tokens)

    def _schedule_tick(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [self._prefilling[0].ready_at] if self._prefilling and not self._holds_prefills else []
        if self._decoding and not self._is_held:
            due.append(self._next_step_at)
        if due:
            at = min(due)
            self._timer = (
                self._loop.call_soon(self._run_due_steps)
                if at <= self._now()
                else self._loop.call_at(at, self._run_due_steps)
            )

    def _run_due_steps(self) -> None:
        self._timer = None
        now = self._now()
        decodes = self._decoding and not self._is_held and self._next_step_at <= now
        tokens = self._run_decode_step(now) if decodes else 0
        was_idle = not self._decoding
        while self._prefilling and not self._holds_prefills and self._prefilling[0].ready_at <= now:
            sequence = self._prefilling.popleft()
            tokens += self._advance_sequence(sequence, 1, self._decoding)
        if self._decoding and was_idle:
            self._next_step_at = now + self._step_seconds()
        self._admit_waiting_sequences()
        self._schedule_tick()
        self._on_step(tokens)

    def _run_decode_step(self, now: float) -> int:
        going_on: list[TokenSequence] = []
        decoding, self._decoding = self._decoding, going_on
        tokens = sum(
            [self._advance_sequence(sequence, self._options.tokens_per_step, going_on) for sequence in decoding]
        )
        # Steps keep their rhythm unless the machine cannot follow.
        self._next_step_at = max(self._next_step_at + self._step_seconds(), now)
        return tokens

    def _advance_sequence(self, sequence: TokenSequence, count: int, going_on: list[TokenSequence]) -> int:
        before = len(sequence.output)
        if sequence in self._running and sequence.step(count):
            going_on.append(sequence)
        elif not sequence.is_live:
            self._running.discard(sequence)
        return len(sequence.output) - before


class MachineScheduler:
    """Schedules sequences like Scheduler, with the times and the KV memory of real hardware."""

    def __init__(self, options: Options, shape: Shape, on_step: Callable[[int], None]) -> None:
        self.batch = Batch(options.cost, shape, on_tokens=self._on_tokens, on_admitted=self._on_admitted, stepwise=True)
        self._options = options
        self._on_step = on_step
        self._works: dict[TokenSequence, Work] = {}
        self._sequences: dict[Work, TokenSequence] = {}
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
        """Return the number of KV blocks in use by running sequences."""
        return self.batch.blocks.used

    @property
    def preemptions(self) -> int:
        return self.batch.preemptions

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        for sequence in list(self._works):
            self._forget_sequence(sequence)
        if self._timer is not None:
            self._timer.cancel()

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a sequence. A sequence with `on_admitted` waits after its admission until `begin`."""
        size = self._options.block_size
        work = Work(
            len(sequence.prompt),
            sequence.max_tokens,
            block_names(sequence.prompt, size, sequence.cache_salt),
            awaits_kv=sequence.on_admitted is not None,
        )
        self._works[sequence], self._sequences[work] = work, sequence
        self.batch.submit(work, self._now())
        self._schedule_tick()

    def begin(self, sequence: TokenSequence) -> None:
        """Continue an admitted sequence. Its KV has arrived, or has to be computed."""
        work = self._works.get(sequence)
        if work is None:
            return
        if sequence.prefill_tokens:
            self.batch.compute(work, self._now())
        else:
            self.batch.arrive(work, self._now())
        self._schedule_tick()

    def drop(self, sequence: TokenSequence) -> None:
        """Remove a sequence in any state: queued, running or ended."""
        self._forget_sequence(sequence)
        self._schedule_tick()

    def _forget_sequence(self, sequence: TokenSequence) -> None:
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
            self._forget_sequence(sequence)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _schedule_tick(self) -> None:
        assert self._loop is not None
        due = self.batch.due
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._run_due_batch, due)

    def _run_due_batch(self, due: float) -> None:
        # Steps begin when they were due, unless the machine cannot follow at all.
        self._timer = None
        self.batch.advance(max(due, self._now() - 1.0))
        self._schedule_tick()


class MachineCache:
    """Reports which part of a prompt is cached in the KV memory of the hardware."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self.queries = 0
        self.hits = 0

    def add(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a prompt are cached; at least one never is. Computing the prompt caches it."""
        names = block_names(ids, self._block_size, salt)[: (len(ids) - 1) // self._block_size]
        cached = self._batch.blocks.hit(names) * self._block_size
        self.queries += len(ids)
        self.hits += cached
        return cached

    def clear(self) -> None:
        self._batch.blocks.forget()

    def watch(self, watcher: Watcher) -> None:
        """Notify this watcher of changes of the cache from now on."""
        self._batch.blocks.watcher = watcher
