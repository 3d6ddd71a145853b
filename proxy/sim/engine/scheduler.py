"""When tokens appear: admission, prefill time and decode steps of one simulated engine.

At most `max_num_seqs` sequences run, the rest wait in order. Prefills take time by their tokens, one after the other;
running sequences advance together, and a step takes longer the more of them there are. One timer drives the whole
batch; with no delays configured every turn of the event loop is a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.model.sequence import Sequence
    from proxy.sim.options import Options


class Scheduler:
    """Owns the sequences between `submit` and their end or `abort`."""

    def __init__(self, options: Options, on_step: Callable[[int], None]) -> None:
        self._options = options
        self._cost = options.cost
        self._on_step = on_step
        self._waiting: deque[Sequence] = deque()
        self._running: set[Sequence] = set()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
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
        """Memory for sequences that run is not accounted for here: see MachineScheduler."""
        return 0

    @property
    def preemptions(self) -> int:
        """So nobody has to make room."""
        return 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._arm()

    def hold(self, *, prefills: bool = False) -> None:
        """Give no sequence more than its first token until `go_on`, or with `prefills` no token at all."""
        self._is_held, self._holds_prefills = True, prefills

    def go_on(self) -> None:
        """Run the sequences that were held."""
        self._is_held = self._holds_prefills = False
        self._arm()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. With `on_admitted` it is held, once admitted, until `begin`."""
        self._waiting.append(sequence)
        self._admit()

    def begin(self, sequence: Sequence) -> None:
        """Start the prefill of an admitted sequence; its first token follows when that is done."""
        if sequence not in self._running:
            return
        seconds = (
            self._cost.prefill(sequence.prefill_tokens, sequence.cached_tokens) if sequence.prefill_tokens else 0.0
        )
        self._prefill_free_at = max(self._now(), self._prefill_free_at) + seconds
        sequence.ready_at = self._prefill_free_at
        self._prefilling.append(sequence)
        self._arm()

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: finished, failed or aborted."""
        self._running.discard(sequence)
        for sequences in (self._waiting, self._prefilling, self._decoding):
            if sequence in sequences:
                sequences.remove(sequence)
        self._admit()

    def _admit(self) -> None:
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
        # What is held counts on hardware where it does: there are few sequences then, and this is asked for each step.
        kv_tokens = 0
        if self._cost.step_kv_token:
            kv_tokens = sum(len(sequence.prompt) + len(sequence.output) for sequence in self._decoding)
        return self._cost.decode(len(self._decoding), kv_tokens)

    def _arm(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [self._prefilling[0].ready_at] if self._prefilling and not self._holds_prefills else []
        if self._decoding and not self._is_held:
            due.append(self._next_step_at)
        if due:
            at = min(due)
            self._timer = self._loop.call_soon(self._tick) if at <= self._now() else self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._now()
        decodes = self._decoding and not self._is_held and self._next_step_at <= now
        tokens = self._decode(now) if decodes else 0
        was_idle = not self._decoding
        while self._prefilling and not self._holds_prefills and self._prefilling[0].ready_at <= now:
            sequence = self._prefilling.popleft()
            tokens += self._advance(sequence, 1, self._decoding)
        if self._decoding and was_idle:
            self._next_step_at = now + self._step_seconds()
        self._admit()
        self._arm()
        self._on_step(tokens)

    def _decode(self, now: float) -> int:
        going_on: list[Sequence] = []
        decoding, self._decoding = self._decoding, going_on
        tokens = sum([self._advance(sequence, self._options.tokens_per_step, going_on) for sequence in decoding])
        # Steps keep their rhythm unless the machine cannot follow.
        self._next_step_at = max(self._next_step_at + self._step_seconds(), now)
        return tokens

    def _advance(self, sequence: Sequence, count: int, going_on: list[Sequence]) -> int:
        before = len(sequence.output)
        if sequence in self._running and sequence.step(count):
            going_on.append(sequence)
        elif not sequence.is_live:
            self._running.discard(sequence)
        return len(sequence.output) - before
