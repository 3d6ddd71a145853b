"""What one worker knows of all prefillers, and what a prompt probably takes each of them."""

from __future__ import annotations

import logging
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import Unlearned
from proxy.balancer.policies.concurrency import Concurrency
from proxy.balancer.policies.prefill_cost import SECONDS_PER_LOAD, PrefillCost
from proxy.balancer.policies.prefill_samples import Step
from proxy.balancer.policies.prefiller import Prefiller, hear
from proxy.balancer.shared.scoreboard import SlotReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import Candidate, PolicyContext
    from proxy.balancer.policies.prefill_samples import ComparedPrompt, PrefillSample, Sent
    from proxy.common.backend import Backend

logger = logging.getLogger(__name__)

# What takes less than this part of what is predicted was computed together with what was before it.
_TOGETHER: Final = 0.25
# Prompts of this size together fit into one step of an engine that computes several together.
_SURELY_FIT_TOKENS: Final = 8192
# A prompt that was sent by this time before a step began, and is not in it, had no room there.
_SURELY_BEFORE_SECONDS: Final = 0.02
# More answers than one in such a time teach nothing new.
_LESSON_SECONDS: Final = 0.05
# An answer teaches nothing if the event loop was late by more than this, or this share of what it took, meanwhile.
_MOST_LAG_SECONDS: Final = 0.05
_MOST_LAG_SHARE: Final = 0.1
# Samples that wait until it is known whether the loop was late.
_MOST_UNLEARNED: Final = 256
# So many lessons are enough to tell by what a prompt takes what several take.
_TAUGHT: Final = 16


class Prefillers:
    """It learns from what ends here, and hears of what other workers send and learn."""

    def __init__(self, context: PolicyContext) -> None:
        self.cost = PrefillCost()
        self.reader: SlotReader
        """Of the candidates that were asked about last."""
        self._clock = context.clock
        self._facts = context.facts
        self._journal = context.journal
        self.by_key: dict[str, Prefiller] = {}
        """By `Backend.key`."""
        self._by_slot: dict[int, Prefiller] = {}
        self._candidates: Sequence[Candidate] = ()  # those that were asked about last, and what is known of them
        self._known: list[Prefiller] = []
        self._unlearned: Unlearned[tuple[Prefiller, PrefillSample]] = Unlearned(
            context, most_lag_seconds=_MOST_LAG_SECONDS, most_lag_share=_MOST_LAG_SHARE, capacity=_MOST_UNLEARNED
        )
        self._next_lesson = 0.0
        self._is_taught = False

    @property
    def remembered(self) -> int:
        """Keys of prefixes."""
        return sum(len(prefiller.cached) for prefiller in self.by_key.values())

    def known(self, candidates: Sequence[Candidate]) -> list[Prefiller]:
        """Of each of them."""
        if candidates is not self._candidates:
            self._look_up(candidates)
        if self._journal is not None:
            self.listen()
        return self._known

    @property
    def last_candidates(self) -> Sequence[Candidate]:
        """The candidates that were asked about last."""
        return self._candidates

    @property
    def last_known(self) -> Sequence[Prefiller]:
        """Those that were asked about last."""
        return self._known

    def _look_up(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._known = [self.of(candidate.backend) for candidate in candidates]
        for prefiller, candidate in zip(self._known, candidates, strict=True):
            if prefiller.backend is not candidate.backend:  # it may have left, and come back in another slot
                prefiller.backend = candidate.backend
                self._by_slot[candidate.backend.slot] = prefiller
            self._take_facts(prefiller)
        if candidates:
            slots = [candidate.backend.slot for candidate in candidates]
            self.reader = SlotReader(candidates[0].scoreboard, slots)

    def listen(self) -> None:
        """Take in what other workers have told, if there are any."""
        if self._journal is not None and self._journal.has_new_records:
            for prefiller, sample, at in hear(self._journal, self._by_slot):
                self.learn(prefiller, sample, at)

    def of(self, backend: Backend) -> Prefiller:
        """Of one of them."""
        known = self.by_key.get(backend.key)
        if known is None:
            journal = self._journal
            heard = journal if journal is not None and journal.has_readers else None
            known = Prefiller(backend, journal=heard)
            known.on_end = partial(self._ended, known)
            self.by_key[backend.key] = self._by_slot[backend.slot] = known
        return known

    def _ended(self, prefiller: Prefiller, sent: Sent, served: bool) -> None:
        """An answer teaches how long prompts take and what is cached."""
        if self._journal is not None:
            self.listen()  # since when it has computed this one, another worker may know
        now = self._clock()
        sample = prefiller.end(sent, served, now, now >= self._next_lesson or prefiller.step is not None)
        if sample is not None:
            self._unlearned.add((prefiller, sample), now - sample.whole, now)
            self._learn_known()

    def _learn_known(self) -> None:
        """Learn from samples once it is known whether the event loop was late meanwhile. Late ones teach nothing."""
        for (prefiller, sample), at, is_timely in self._unlearned.known():
            if is_timely:
                prefiller.write_sample(sample, at)
                self.learn(prefiller, sample, at)
            else:
                self._close(prefiller, at)
                prefiller.concurrency.miss()

    def learn(self, prefiller: Prefiller, sample: PrefillSample, now: float) -> None:
        """Learn how long a prompt has taken a prefiller, which has answered at the clock's time `now`."""
        if now < self._next_lesson and prefiller.step is None and not sample.ahead and not sample.was_behind:
            return  # it would teach nothing
        concurrency = prefiller.concurrency
        predicted = self.cost.seconds(sample.uncached, sample.cached) * prefiller.slowness
        doubted_until = concurrency.doubted_until
        concurrency.saw(sample, self.cost.shape, now)
        if concurrency.doubted_until > doubted_until:
            logger.warning(
                "prefill policy: learned order of prompts dropped: the instance computes more with more prompts",
                extra={"fields": {"backend": prefiller.backend.name}},
            )
        if not concurrency.is_orderly or concurrency.lanes > 1:
            self._close(prefiller, now)
            if sample.ahead < (concurrency.lanes if concurrency.is_orderly else 1):  # it was computed at once
                self._teach(prefiller, sample.uncached, sample.cached, sample.whole, now)
            return
        is_together = sample.seconds < _TOGETHER * predicted
        step = prefiller.step
        if sample.was_behind and (is_together or (step and step.uncached + sample.uncached <= _SURELY_FIT_TOKENS)):
            prefiller.saw(is_together)
        if step is not None and is_together and not prefiller.works_on_one:
            prefiller.step = step.and_another(sample)
        else:
            if step is not None:
                was_there = now - sample.whole < step.began - _SURELY_BEFORE_SECONDS
                prefiller.note_step(step, left_out=sample.uncached if was_there else None)
            self._close(prefiller, now)
            prefiller.step = Step(
                sample.uncached, sample.attention, sample.seconds, began=now - sample.seconds, largest=sample.uncached
            )
        if not prefiller.under_way:
            self._close(prefiller, now)

    def _close(self, prefiller: Prefiller, now: float) -> None:
        """What was computed together is complete, and teaches as one."""
        step, prefiller.step = prefiller.step, None
        if step is not None and step.uncached > 0:
            self._teach(prefiller, step.uncached, step.cached, step.seconds, now)

    def _teach(self, prefiller: Prefiller, uncached: float, cached: float, seconds: float, now: float) -> None:
        if now >= self._next_lesson or not self._is_taught:
            self.cost.learn(prefiller.backend.key, uncached, cached, seconds)
            self._is_taught = self.cost.samples >= _TAUGHT
            if self._is_taught:
                self._next_lesson = now + _LESSON_SECONDS
            prefiller.slowness = self.cost.slowness(prefiller.backend.key)
        prefiller.overhead_seconds = self.cost.overhead
        had_shared = prefiller.shared_seconds > 0
        prefiller.shared_seconds = 0.0 if prefiller.works_on_one else self.cost.shape[0] * prefiller.slowness
        if had_shared != (prefiller.shared_seconds > 0):
            prefiller.concurrency.forget_limit()

    def _take_facts(self, prefiller: Prefiller) -> None:
        facts = self._facts(prefiller.backend)
        if facts is not None and facts.ranks != prefiller.concurrency.ranks:
            prefiller.concurrency = Concurrency(facts.ranks)

    def own(self, prefiller: Prefiller, asked: ComparedPrompt) -> tuple[int, float]:
        """The pieces of a prompt that are probably cached there, and the seconds that the rest takes."""
        known = asked.there.get(prefiller)
        if known is None or known[0] != prefiller.version:
            if asked.request.subject is None:  # what is only passed on
                hit, seconds = 0, asked.request.prefill.compute * SECONDS_PER_LOAD
            else:
                prefixes = prefiller.cached
                hit = prefixes.hit(asked.keys)
                cached = prefixes.trust * prefixes.found(asked.ends, hit, asked.tokens)
                seconds = self.cost.seconds(asked.tokens - cached, cached) * prefiller.slowness
            known = asked.there[prefiller] = prefiller.version, hit, seconds
        return known[1], known[2]

    def work(self, prefillers: Sequence[Prefiller], asked: ComparedPrompt) -> list[float]:
        """The seconds that a prompt takes each of these."""
        if asked.keys or asked.request.subject is None:
            own, among = self.own, repeat(asked)
            return [seconds for _, seconds in map(own, prefillers, among)]
        work = [self.cost.seconds(asked.tokens, 0.0)] * len(prefillers)
        for place, prefiller in enumerate(prefillers):
            work[place] *= prefiller.slowness
        return work
