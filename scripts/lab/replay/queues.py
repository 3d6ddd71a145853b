"""A fast model of an elastic fleet: one queue in front of prefillers, and decoders whose answers share their steps.

It has the sample and the moves of the product's controller, but neither policies nor engines. So a day of a fleet takes
a second, and hundreds of drawn worlds can be compared. `ElasticReplay` is the slow model with all parts of the gateway.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lab.replay.fleet import Fleet
from lab.replay.trace import Request
from proxy.balancer.split import FleetSample, MoveAdvice, MovePlanner
from proxy.common.backend import Role
from proxy.settings.fleet import Elastic
from proxy.sim.hardware.cost import Cost

_SAMPLE_SECONDS: Final = 1.0
# The share of KV memory that answers fill before a decoder is full, as in proxy.balancer.split.
_FULL_KV: Final = 0.95


@dataclass(slots=True, eq=False)
class Job:
    """One request and its outcome, in seconds of the model's clock."""

    request: Request
    done: int = 0
    """Tokens of the answer from decoders that were evacuated."""
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def kv_tokens(self) -> float:
        """Mean tokens of KV memory while the answer runs."""
        return self.request.input_tokens + (self.request.output_tokens + self.done) / 2


@dataclass(slots=True, eq=False)
class _Prefiller:
    job: Job | None = None
    is_leaving: bool = False


@dataclass(slots=True, eq=False)
class _Decoder:
    """Answers that share the steps. Each ends when `tokens` has grown by its tokens since it began."""

    active: list[tuple[float, int, Job]] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    tokens: float = 0.0
    """Tokens that an answer would have that has run from the beginning."""
    rate: float = 0.0
    """Tokens per second of each answer."""
    at: float = 0.0
    kv: float = 0.0
    turn: int = 0
    """Number of the last expected end. An event with another number is outdated."""
    is_leaving: bool = False

    @property
    def count(self) -> int:
        return len(self.active) + len(self.waiting)


class QueueModel:
    """One run of a fleet, in a fixed split or with the controller."""

    def __init__(self, fleet: Fleet, options: Elastic | None, until: float) -> None:
        """Create an idle fleet. `options`: of the controller; None: the split is fixed. `until`: end of the load."""
        self.moves: list[tuple[float, MoveAdvice]] = []
        self.jobs: list[Job] = []
        self._fleet = fleet
        self._options = options
        self._until = until
        self._planner = MovePlanner(lambda: options or Elastic())
        self._prefill_cost: Cost = fleet.prefill_machine.cost
        self._decode_cost: Cost = fleet.decode_machine.cost
        self._shape = fleet.decode_machine.decode
        self._prefillers = [_Prefiller() for _ in range(fleet.prefillers)]
        self._decoders = [_Decoder() for _ in range(fleet.decoders)]
        self._queue: deque[Job] = deque()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._number = 0
        self._handoffs = 0
        self._is_moving = False
        self._now = 0.0
        token_seconds = (options or Elastic()).token_seconds
        fits = [n for n in range(1, self._shape.max_num_seqs + 1) if self._decode_cost.decode(n, 0) <= token_seconds]
        self._full = float(max(fits, default=1))
        # The gateway learns the saturation point of a decoder, and sends it no more requests.
        self._most = min(self._shape.max_num_seqs, self._decode_cost.knee or self._shape.max_num_seqs)

    def run(self, requests: Sequence[Request]) -> None:
        """Run all requests to their ends."""
        for request in requests:
            self._at(request.at, self._arrive, Job(request))
        if self._options is not None:
            self._at(_SAMPLE_SECONDS, self._sample, None)
        while self._events:
            self._now, _, act, subject = heapq.heappop(self._events)
            act(subject)

    def _at(self, when: float, act: Any, subject: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, act, subject))

    # Prefill

    def _arrive(self, job: Job) -> None:
        if not job.done:
            self.jobs.append(job)
        self._queue.append(job)
        self._feed()

    def _feed(self) -> None:
        """Begin queued prompts. A request has room on a decoder before its prompt is computed."""
        if not self._queue:
            return
        room = self._most * sum(not each.is_leaving for each in self._decoders)
        room -= sum(each.count for each in self._decoders if not each.is_leaving)
        room -= sum(each.job is not None for each in self._prefillers)
        for prefiller in self._prefillers:
            if prefiller.job is None and not prefiller.is_leaving and self._queue and room > 0:
                room -= 1
                prefiller.job = job = self._queue.popleft()
                seconds = self._prefill_cost.prefill(job.request.input_tokens + job.done)
                self._at(self._now + seconds, self._prefilled, prefiller)

    def _prefilled(self, prefiller: _Prefiller) -> None:
        job, prefiller.job = prefiller.job, None
        assert job is not None
        available = [decoder for decoder in self._decoders if not decoder.is_leaving]
        decoder = min(available, key=lambda each: each.count)
        decoder.waiting.append(job)
        self._admit(decoder)
        self._feed()

    # Decode

    def _admit(self, decoder: _Decoder) -> None:
        """Begin waiting answers for which there is room, and expect the next end."""
        now = self._now
        decoder.tokens += (now - decoder.at) * decoder.rate
        decoder.at = now
        most, memory = self._shape.max_num_seqs, self._shape.kv_tokens
        while decoder.waiting and len(decoder.active) < most:
            job = decoder.waiting[0]
            if decoder.active and decoder.kv + job.kv_tokens > memory:
                break
            decoder.waiting.popleft()
            self._number += 1
            heapq.heappush(decoder.active, (decoder.tokens + job.request.output_tokens - job.done, self._number, job))
            decoder.kv += job.kv_tokens
            self._handoffs += 1
            job.first_token_at = job.first_token_at or now
        decoder.turn += 1
        if decoder.active:
            seconds = self._decode_cost.decode(len(decoder.active), round(decoder.kv))
            decoder.rate = 1 / seconds
            left = decoder.active[0][0] - decoder.tokens
            self._at(now + max(0.0, left) * seconds, self._ended, (decoder, decoder.turn))
        else:
            decoder.rate = 0.0

    def _ended(self, subject: tuple[_Decoder, int]) -> None:
        decoder, turn = subject
        if turn == decoder.turn:
            _, _, job = heapq.heappop(decoder.active)
            decoder.kv -= job.kv_tokens
            job.ended_at = self._now
            self._admit(decoder)
            self._feed()

    def _evacuate(self, decoder: _Decoder) -> None:
        decoder.tokens += (self._now - decoder.at) * decoder.rate
        decoder.at = self._now
        left = [*decoder.waiting]
        for ends, _, job in decoder.active:
            job.done = min(
                job.request.output_tokens - 1, max(1, round(job.request.output_tokens - ends + decoder.tokens))
            )
            left.append(job)
        decoder.active.clear()
        decoder.waiting.clear()
        decoder.turn += 1
        decoder.kv = decoder.rate = 0.0
        for job in left:
            self._queue.append(job)
        self._feed()

    # The controller

    def _sample(self, _: None) -> None:
        now, options = self._now, self._options
        assert options is not None
        if now < self._until:
            self._at(now + _SAMPLE_SECONDS, self._sample, None)
        if self._is_moving:
            return
        advice = self._planner.add_sample(self._sampled())
        if advice is not None:
            self._planner.record_move(advice)
            self.moves.append((now, advice))
            self._is_moving = True
            leaving: _Prefiller | _Decoder
            if advice.new_role is Role.PREFILL:
                leaving = min(self._decoders, key=lambda each: each.count)
                wait = options.evacuate_after_seconds
                self._at(now + (options.drain_seconds if wait is None else wait), self._evacuate, leaving)
            else:
                leaving = min(self._prefillers, key=lambda each: each.job is not None)
            leaving.is_leaving = True
            self._at(now, self._finish_move, leaving)

    def _sampled(self) -> FleetSample:
        computing = sum(each.job is not None for each in self._prefillers)
        held = sum(each.count for each in self._decoders)
        kv = sum(each.kv for each in self._decoders)
        active = sum(len(each.active) for each in self._decoders)
        memory = _FULL_KV * self._shape.kv_tokens * active / kv if kv else math.inf
        return FleetSample(
            taken_at=self._now,
            prefiller_count=sum(not each.is_leaving for each in self._prefillers),
            decoder_count=sum(not each.is_leaving for each in self._decoders),
            computing_prompts=computing,
            running_answers=held + computing,
            full_answers=max(1.0, min(self._full, memory)),
            waiting_requests=len(self._queue),
            handoff_count=self._handoffs,
        )

    def _finish_move(self, leaving: _Prefiller | _Decoder) -> None:
        is_idle = leaving.job is None if isinstance(leaving, _Prefiller) else not leaving.count
        if not is_idle:
            self._at(self._now + _SAMPLE_SECONDS, self._finish_move, leaving)
            return
        if isinstance(leaving, _Prefiller):
            self._prefillers.remove(leaving)
            self._decoders.append(_Decoder(at=self._now))
        else:
            self._decoders.remove(leaving)
            self._prefillers.append(_Prefiller())
        self._is_moving = False
        self._feed()
