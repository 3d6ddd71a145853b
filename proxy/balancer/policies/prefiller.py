"""What one worker knows of one prefiller: what it has sent there, how far that is, and what is probably cached."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import PendingSamples
from proxy.balancer.policies.concurrency import Concurrency, soonest_free
from proxy.balancer.policies.prefill_cost import (
    NO_AGE,
    SECONDS_PER_LOAD,
    PrefillCost,
    PrefillSample,
    Record,
    RecordKind,
    Sent,
    Step,
    kind_and_slot,
    packed,
    unpacked,
)
from proxy.balancer.policies.prefixes import CacheCount, CachedPrefixes
from proxy.balancer.shared.scoreboard import SlotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.balancer.pick import Candidate, PolicyContext
    from proxy.balancer.policies.prefill_cost import PromptCosts
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.backend import Backend

logger = logging.getLogger("proxy.balancer.policies.prefillers")

# So many prompts that could have been computed together and were not show that the backend works on one at a time; that
# is believed for so many more, and then found out once more.
_ENOUGH_ALONE: Final = 3
_BELIEVED: Final = 1000
# Of shorter ones the order does not matter.
_LEAST_SECONDS: Final = 0.1

# What is under way is not thought to be over before its answer is here.
_LEAST_LEFT: Final = 0.1

# The last part of a step, in which the prompts of the next one are gathered: this time, or this share of the step.
_ENDING_SECONDS: Final = 0.05
_ENDING_SHARE: Final = 0.2

# The tokens that a step has room for, until full steps show it, and how fast that is followed.
_FIRST_STEP_TOKENS: Final = 16_384.0
_STEP_TOKENS_STEP: Final = 0.1

# A cache that reaches further or less far by this part is another one.
_NOTICED: Final = 0.02

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
_MAX_PENDING: Final = 256
# So many lessons are enough to tell by what a prompt takes what several take.
_TAUGHT: Final = 16


@dataclass(slots=True, eq=False)
class Prefiller:
    """`version` moves with what is cached and how fast it is."""

    backend: Backend
    on_end: Callable[[Sent, bool], None] = field(init=False)
    """Called when what was sent there has been computed, or will not be."""
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)
    slowness: float = 1.0
    journal: JournalWriter | None = None
    """Where the other workers hear what this one has sent there; None: there are none."""
    version: int = 0
    charged_tokens: int = 0
    """Of all that was sent and is under way."""
    uncached_tokens: float = 0.0
    """Tokens of it that are not expected to be cached."""
    concurrency: Concurrency = field(default_factory=Concurrency)
    step: Step | None = None
    """What it has answered last, as long as more may belong to it."""
    shared_seconds: float = 0.0
    """Of what each prompt takes by prediction, what those that are computed together take only once."""
    overhead_seconds: float = 0.0
    """What each prompt counts besides where it is not known when it will be computed, see `PrefillCost.overhead`."""
    behind: int = 0
    """Prompts of this worker that will be computed after those that are being computed now."""
    behind_seconds: float = 0.0
    """Predicted of these, each by itself."""
    behind_tokens: float = 0.0
    """Tokens of these that are not expected to be cached."""
    step_tokens: float = _FIRST_STEP_TOKENS
    """Uncached tokens that it computes in one step at most."""
    _sent: dict[Sent, None] = field(default_factory=dict)  # the oldest first
    _began: float = 0.0  # of what is being computed: since when, how long it takes, and what that is in charges
    _step_seconds: float = 0.0
    _step_charged: float = 0.0
    _answered_at: float = 0.0
    _answered_before: float = 0.0  # the answer before that one
    _alone: int = 0  # see `note_completion`
    _others: deque[tuple[float, float, float]] = field(default_factory=deque)
    """When others have sent something that is under way, its predicted seconds, and the tokens that are not expected to
    be cached, the oldest first."""

    @property
    def computes_one_at_a_time(self) -> bool:
        """It was seen to compute prompts one after the other."""
        return self._alone > _ENOUGH_ALONE

    def note_completion(self, batched: bool) -> None:
        """One that was behind others has been computed, together with the one before it or alone."""
        if batched:
            self._alone = 0
        elif self._alone <= _ENOUGH_ALONE:
            self._alone += 1
            if self._alone == _ENOUGH_ALONE:
                self._alone += _BELIEVED

    def note_step(self, step: Step, *, left_out: float | None) -> None:
        """Learn how many tokens a step has room for.

        `left_out`: the tokens of the next prompt, if that was there when the step began, and had no room in it.
        """
        if step.largest > self.step_tokens:
            return  # it took several steps
        if step.uncached >= self.step_tokens:
            self.step_tokens = step.uncached + 1
        elif left_out is not None and step.uncached + left_out < self.step_tokens:
            self.step_tokens += _STEP_TOKENS_STEP * (step.uncached + left_out - self.step_tokens)

    def fits_in_step(self, tokens: float) -> bool:
        """Return whether the next step has room for all tokens of a prompt. To find out more, there are three."""
        return self.behind_tokens + tokens <= self.step_tokens * self.concurrency.wanted

    @property
    def _fill(self) -> float:
        """See PrefillSample."""
        if not self.shared_seconds or self.concurrency.lanes > 1:
            return self.under_way / self.concurrency.lanes
        return (self.uncached_tokens + sum([computed for _, _, computed in self._others])) / self.step_tokens

    @property
    def under_way(self) -> int:
        """Prompts that any worker has sent."""
        return len(self._sent) + len(self._others)

    def wait(self, now: float) -> float:
        """Seconds until it begins with what is sent to it now, by what is known to be under way: something is."""
        load = self.charged_tokens * SECONDS_PER_LOAD
        if self._others:
            load += sum([seconds for _, seconds, _ in self._others])
        wait = self.left(load, now)
        return max(0.0, wait - self.shared_seconds) if self.behind else wait

    @property
    def is_busy(self) -> bool:
        """This worker has sent something that is under way."""
        return bool(self._sent)

    def send(self, prompt: PromptCosts, hit: int, seconds: float, compute: int, kv: int, now: float) -> Sent:
        """A prompt goes there, of whose pieces so many are probably cached. It takes so long by prediction, for which
        the backend is charged `compute`, beside `kv`. What is under way counts as cached, or a burst would scatter.
        """
        prefixes, before = self.cached, self._sent
        ahead = len(before) + len(self._others)
        wait = self.wait(now) if ahead else 0.0
        cached = prefixes.found(prompt.ends, hit, prompt.tokens) if hit else 0.0
        computed = prompt.tokens - cached
        odometer = prefixes.odometer
        known: Sequence[float | None] = ()
        if prompt.keys:
            known = prefixes.use(prompt.keys, prompt.ends, computed)
        else:
            prefixes.odometer += computed
        if self.journal is not None:
            self._write(RecordKind.SENT, prompt.keys, prompt.ends, now, seconds, computed)
        self.version += 1
        self.charged_tokens += compute
        self.uncached_tokens += computed
        if before:
            self.behind += 1
            self.behind_seconds += seconds
            self.behind_tokens += computed
        else:
            self._began, self._step_seconds, self._step_charged = now, seconds, seconds
        sent = Sent(self.on_end, compute, kv, prompt, now, seconds, cached, known, odometer, ahead, wait)
        before[sent] = None
        return sent

    def end(self, sent: Sent, served: bool, now: float, is_lesson: bool = True) -> PrefillSample | None:
        """It has been computed, or will not be; None: that teaches nothing of the time it takes, or it had no company
        and would only be one more lesson, which is not wanted.
        """
        prompt, cached = sent.prompt, sent.cached
        fill = self._fill
        has_overtaken = next(iter(self._sent)) is not sent or (bool(self._others) and self._others[0][0] < sent.at)
        del self._sent[sent]
        self.version += 1
        self.charged_tokens -= sent.compute
        if self._sent:
            self.uncached_tokens -= prompt.tokens - cached
            self._begin(now if served else self._began)
        else:
            self.uncached_tokens = 0.0
        prefixes = self.cached
        dropped: Sequence[int] = ()
        further, sample = 0.0, None
        found_age: float | None = None
        missed_age: float | None = None
        if served:
            tokens = float(prompt.tokens)
            if sent.answer is not None:
                told_tokens, told_cached = sent.answer
                if prompt.keys:
                    prefixes.tell(told_cached)
                    there = tokens * told_cached / max(1, told_tokens)
                    further = cached - there
                    prefixes.odometer += further
                    found_age, missed_age = prefixes.learn(sent.known, sent.odometer, prompt.ends, cached, there)
                tokens, cached = float(told_tokens), float(told_cached)
            # Prompts that were sent one behind the other were computed one after the other.
            was_behind = sent.at < self._answered_before and sent.seconds > _LEAST_SECONDS
            # Otherwise nothing is known of it, or nothing new.
            if tokens > cached and (is_lesson or sent.ahead or was_behind):
                seconds = now - max(sent.at, self._answered_at)
                company = sent.ahead, float(was_behind), float(has_overtaken), fill
                sample = PrefillSample(tokens - cached, cached, seconds, now - sent.at, *company)
            self._answered_before, self._answered_at = self._answered_at, now
            if self._alone > _ENOUGH_ALONE:
                self._alone -= 1
                if self._alone == _ENOUGH_ALONE:
                    self._alone = 0
        else:  # of a failure there is nothing in the cache
            dropped = [key for key, reading in zip(prompt.keys, sent.known, strict=True) if reading is None]
            prefixes.drop(dropped)
        if self.journal is not None:
            ages = _written_age(found_age), _written_age(missed_age)
            self._write(RecordKind.ENDED, dropped, (), now, further, prefixes.trust, *ages, float(served))
        return sample

    def write_sample(self, sample: PrefillSample, at: float) -> None:
        """Let other workers learn from a prompt that this one has sent, and that had been computed at this time."""
        if self.journal is not None:
            self._write(RecordKind.SAMPLED, (), (), at, *sample)

    def forget_cache(self) -> None:
        """Nothing is cached there any more. This worker has found out, as the others will."""
        self._alone = 0
        self.step_tokens = _FIRST_STEP_TOKENS
        self.concurrency = Concurrency(self.concurrency.ranks)
        if len(self.cached):
            self.cached.clear()
            self.version += 1

    def left(self, load: float, now: float) -> float:
        """Seconds until it begins with what is sent to it now. `load`: of all workers, in seconds, too."""
        others = self._others
        if others and load <= (self.charged_tokens + 0.5) * SECONDS_PER_LOAD:
            others.clear()  # some ends were missed
        concurrency = self.concurrency
        if concurrency.is_orderly is False:
            return (load + self.under_way * self.overhead_seconds) / concurrency.lanes
        if concurrency.lanes > 1:
            return self._lane_left(now)
        sent = self._sent
        if not sent and not others:
            return load
        at, seconds, charged = self._began, self._step_seconds, self._step_charged
        if others and (not sent or others[0][0] < next(iter(sent)).at):
            at, charged, _ = others[0]
            seconds = charged
        left = _left(seconds, now - max(at, self._answered_at))
        if self.behind > 1:
            charged += (self.behind - 1) * self.shared_seconds
        return max(0.0, load - charged + left)

    def is_ending(self, now: float) -> bool:
        """Whether what it computes now is nearly done, by prediction."""
        seconds = self._step_seconds
        return self._began + seconds - now < max(_ENDING_SECONDS, _ENDING_SHARE * seconds)

    def _lane_left(self, now: float) -> float:
        """The same, where several are computed side by side."""
        under_way = [(sent.at, sent.seconds) for sent in self._sent]
        if self._others:
            under_way = sorted([*under_way, *[(at, seconds) for at, seconds, _ in self._others]])
        lanes = self.concurrency.lanes
        if len(under_way) < lanes:
            return 0.0
        lefts = [_left(seconds, now - at) for at, seconds in under_way[:lanes]]
        return soonest_free(lefts, [seconds for _, seconds in under_way[lanes:]])

    def _begin(self, now: float) -> None:
        """It has answered: what it computes now is the oldest, together with all that were there by then, unless it
        works on one at a time.
        """
        count, step, total = 0, 0.0, 0.0
        tokens, all_tokens = 0.0, 0.0
        for sent in self._sent:
            total += sent.seconds
            all_tokens += sent.prompt.tokens - sent.cached
            if not count or (self.shared_seconds and sent.at <= now and all_tokens < self.step_tokens):
                count += 1
                step, tokens = total, all_tokens
        self._began = now
        self._step_charged, self._step_seconds = step, step - (count - 1) * self.shared_seconds
        self.behind, self.behind_seconds, self.behind_tokens = (
            len(self._sent) - count,
            total - step,
            all_tokens - tokens,
        )

    def _write(self, kind: RecordKind, keys: Sequence[int], ends: Sequence[float], *numbers: float) -> None:
        assert self.journal is not None
        self.journal.write(packed(Record(kind, self.backend.slot, keys, ends, numbers)))

    def _apply(self, record: Record) -> PrefillSample | None:
        if record.kind == RecordKind.COUNTED:
            self._apply_count(CacheCount(*record.numbers))
            return None
        if record.kind == RecordKind.SAMPLED:
            return PrefillSample(*record.numbers[1:])
        self.version += 1
        if record.kind == RecordKind.SENT:
            at, seconds, computed = record.numbers
            self._others.append((at, seconds, computed))
            self.cached.use(record.keys, record.ends, computed)
            return None
        at, further, trust, found_age, missed_age, served = record.numbers
        if self._others:
            self._others.popleft()
        prefixes = self.cached
        prefixes.odometer += further
        prefixes.trust = trust
        prefixes.note(_read_age(found_age), _read_age(missed_age))
        prefixes.drop(record.keys)
        if served:
            self._answered_before, self._answered_at = self._answered_at, max(at, self._answered_at)
        return None

    def _apply_count(self, count: CacheCount) -> None:
        """Often, and nearly always nothing follows of which those who wait need to know."""
        before = self.cached.capacity
        computing = self.uncached_tokens + sum(computed for _, _, computed in self._others)
        if self.cached.follow(count, computing):
            self.version += 1
            self.cached.clear()
            for sent in self._sent:  # what is under way comes after that
                self.cached.use(sent.prompt.keys, sent.prompt.ends, 0.0)
        elif abs(self.cached.capacity - before) > _NOTICED * before:
            self.version += 1


def write_count(journal: JournalWriter, slot: int, count: CacheCount) -> None:
    """Let all workers hear what the engine in this slot tells of its cache."""
    journal.write(packed(Record(RecordKind.COUNTED, slot, (), (), count)))


def _written_age(age: float | None) -> float:
    """Return the age of a prefix as a number of a record."""
    return NO_AGE if age is None else age


def _read_age(number: float) -> float | None:
    return None if number < 0 else number


def _left(seconds: float, spent: float) -> float:
    """Of what takes so long and has so much behind it. What is overdue is expected to take as long again as it is late:
    it may never end.
    """
    return max(seconds - spent, spent - seconds, _LEAST_LEFT * seconds)


def read_journal(
    journal: JournalWriter, prefillers: Mapping[int, Prefiller]
) -> Iterator[tuple[Prefiller, PrefillSample, float]]:
    """Take in what other workers have sent there, and what has come of it. Yield what that teaches, with its time.

    `prefillers`: by slot; of others nothing is kept.
    """
    for data in journal.new_records():
        _, slot = kind_and_slot(data)
        prefiller = prefillers.get(slot)
        if prefiller is not None:
            record = unpacked(data)
            if (sample := prefiller._apply(record)) is not None:
                yield prefiller, sample, record.numbers[0]


class Prefillers:
    """It learns from what ends here, and hears of what other workers send and learn."""

    def __init__(self, context: PolicyContext) -> None:
        self.cost = PrefillCost()
        self.reader: SlotReader
        """Of the candidates that were prompt about last."""
        self._clock = context.clock
        self._facts = context.facts
        self._journal = context.journal
        self.by_key: dict[str, Prefiller] = {}
        """By `Backend.key`."""
        self._by_slot: dict[int, Prefiller] = {}
        self.candidates: Sequence[Candidate] = ()  # those that were prompt about last, and what is known of them
        self.prefillers: list[Prefiller] = []
        self._pending: PendingSamples[tuple[Prefiller, PrefillSample]] = PendingSamples(
            context, most_lag_seconds=_MOST_LAG_SECONDS, most_lag_share=_MOST_LAG_SHARE, capacity=_MAX_PENDING
        )
        self._next_lesson = 0.0
        self._is_taught = False

    @property
    def remembered(self) -> int:
        """Keys of prefixes."""
        return sum(len(prefiller.cached) for prefiller in self.by_key.values())

    def look_up(self, candidates: Sequence[Candidate]) -> list[Prefiller]:
        """Of each of them."""
        if candidates is not self.candidates:
            self._set_candidates(candidates)
        if self._journal is not None:
            self.listen()
        return self.prefillers

    @property
    def last_candidates(self) -> Sequence[Candidate]:
        """The candidates that were prompt about last."""
        return self.candidates

    @property
    def last_known(self) -> Sequence[Prefiller]:
        """Those that were prompt about last."""
        return self.prefillers

    def _set_candidates(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefillers = [self.of(candidate.backend) for candidate in candidates]
        for prefiller, candidate in zip(self.prefillers, candidates, strict=True):
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
            for prefiller, sample, at in read_journal(self._journal, self._by_slot):
                self.learn(prefiller, sample, at)

    def of(self, backend: Backend) -> Prefiller:
        """Of one of them."""
        known = self.by_key.get(backend.key)
        if known is None:
            journal = self._journal
            heard = journal if journal is not None and journal.has_readers else None
            known = Prefiller(backend, journal=heard)
            known.on_end = partial(self._end, known)
            self.by_key[backend.key] = self._by_slot[backend.slot] = known
        return known

    def _end(self, prefiller: Prefiller, sent: Sent, served: bool) -> None:
        """An answer teaches how long prompts take and what is cached."""
        if self._journal is not None:
            self.listen()  # since when it has computed this one, another worker may know
        now = self._clock()
        sample = prefiller.end(sent, served, now, now >= self._next_lesson or prefiller.step is not None)
        if sample is not None:
            self._pending.add((prefiller, sample), now - sample.whole, now)
            self._learn_known()

    def _learn_known(self) -> None:
        """Learn from samples once it is known whether the event loop was late meanwhile. Late ones teach nothing."""
        for (prefiller, sample), at, is_timely in self._pending.settled():
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
        concurrency.learn(sample, self.cost.shape, now)
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
            prefiller.note_completion(is_together)
        if step is not None and is_together and not prefiller.computes_one_at_a_time:
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
        prefiller.shared_seconds = 0.0 if prefiller.computes_one_at_a_time else self.cost.shape[0] * prefiller.slowness
        if had_shared != (prefiller.shared_seconds > 0):
            prefiller.concurrency.forget_limit()

    def _take_facts(self, prefiller: Prefiller) -> None:
        facts = self._facts(prefiller.backend)
        if facts is not None and facts.ranks != prefiller.concurrency.ranks:
            prefiller.concurrency = Concurrency(facts.ranks)

    def own(self, prefiller: Prefiller, prompt: PromptCosts) -> tuple[int, float]:
        """The pieces of a prompt that are probably cached there, and the seconds that the rest takes."""
        known = prompt.by_prefiller.get(prefiller)
        if known is None or known[0] != prefiller.version:
            if prompt.request.subject is None:  # what is only passed on
                hit, seconds = 0, prompt.request.prefill.compute * SECONDS_PER_LOAD
            else:
                prefixes = prefiller.cached
                hit = prefixes.hit(prompt.keys)
                cached = prefixes.trust * prefixes.found(prompt.ends, hit, prompt.tokens)
                seconds = self.cost.seconds(prompt.tokens - cached, cached) * prefiller.slowness
            known = prompt.by_prefiller[prefiller] = prefiller.version, hit, seconds
        return known[1], known[2]

    def work(self, prefillers: Sequence[Prefiller], prompt: PromptCosts) -> list[float]:
        """The seconds that a prompt takes each of these."""
        if prompt.keys or prompt.request.subject is None:
            own, among = self.own, repeat(prompt)
            return [seconds for _, seconds in map(own, prefillers, among)]
        work = [self.cost.seconds(prompt.tokens, 0.0)] * len(prefillers)
        for place, prefiller in enumerate(prefillers):
            work[place] *= prefiller.slowness
        return work
