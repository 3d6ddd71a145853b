"""State of prefillers in one worker: the prompts in flight, their progress, and the probable contents of caches.

`Prefiller` is the state of one backend. `Prefillers` has all of them and learns how long prompts take.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import PendingSamples
from proxy.balancer.policies.concurrency import ConcurrencyEstimate, soonest_free
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
from proxy.balancer.policies.prefixes import CacheCount, CachedPrefixes, PrefixHolders
from proxy.balancer.policies.session_records import SessionRecords
from proxy.balancer.policies.working_sets import WorkingSets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from proxy.balancer.pick import Candidate, PolicyContext
    from proxy.balancer.policies.prefill_cost import PromptCosts
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.balancer.shared.scoreboard import SlotReader
    from proxy.common.backend import Backend

logger = logging.getLogger("proxy.balancer.policies.prefillers")

# A backend is serial after this number of prompts computed alone that could have been batched.
_SERIAL_AFTER: Final = 3
# A serial backend is tested again after this number of answers.
_SERIAL_FOR: Final = 1000
# Shorter prompts are not evidence for or against batching.
_MIN_SECONDS: Final = 0.1

# Minimum remaining time of a prompt in flight, as a share of its prediction. It is not over before its answer arrives.
_MIN_LEFT_SHARE: Final = 0.1

# Prompts of the next step are gathered in the last part of a step: this time, or this share of the step if longer.
_ENDING_SECONDS: Final = 0.05
_ENDING_SHARE: Final = 0.2

# Assumed capacity of a step in tokens, until full steps show it.
_FIRST_STEP_TOKENS: Final = 16_384.0
# Weight of a new observation in the capacity of a step.
_STEP_TOKENS_STEP: Final = 0.1

# Relative change of a cache's capacity that invalidates computed costs.
_CAPACITY_CHANGE: Final = 0.02

# A prompt that takes less than this share of its prediction was computed in the same step as the one before.
_BATCHED_SHARE: Final = 0.25
# Prompts with up to this number of tokens in total fit into one step of every engine that batches.
_SURELY_FIT_TOKENS: Final = 8192
# A prompt that was sent at least this time before a step began, and is not in it, did not fit.
_SURELY_BEFORE_SECONDS: Final = 0.02
# Minimum interval between lessons, because more answers teach nothing new.
_LESSON_SECONDS: Final = 0.05
# Number of lessons after which the interval applies.
_ENOUGH_LESSONS: Final = 16


@dataclass(slots=True, eq=False)
class Prefiller:
    """State of one prefiller in one worker."""

    backend: Backend
    on_end: Callable[[Sent, bool], None] = field(init=False)
    """Called when a prompt has been computed (True) or has failed (False)."""
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)
    """Prefixes that are probably cached."""
    slowness: float = 1.0
    """Time of its prefills relative to the other prefillers."""
    journal: JournalWriter | None = None
    """Journal for the other workers. None: there are none."""
    version: int = 0
    """Changes with the cached prefixes and the speed, which invalidates costs that were computed."""
    charged_tokens: int = 0
    """Charged compute tokens of this worker's prompts in flight."""
    uncached_tokens: float = 0.0
    """Expected uncached tokens of this worker's prompts in flight."""
    concurrency: ConcurrencyEstimate = field(default_factory=ConcurrencyEstimate)
    step: Step | None = None
    """The last answered step, as long as more prompts may belong to it. None: it is complete."""
    shared_seconds: float = 0.0
    """Part of a predicted prefill time that prompts of one step share. 0: it computes one prompt at a time."""
    overhead_seconds: float = 0.0
    """Additional time of each prompt if the order of prompts is unknown; see `PrefillCost.overhead`."""
    behind: int = 0
    """Number of this worker's prompts behind the current step."""
    behind_tokens: float = 0.0
    """Sum of their expected uncached tokens."""
    step_tokens: float = _FIRST_STEP_TOKENS
    """Maximum uncached tokens of a step."""
    _sent: dict[Sent, None] = field(default_factory=dict)  # prompts in flight of this worker, oldest first
    _began: float = 0.0  # start of the current step
    _step_seconds: float = 0.0  # predicted duration of the current step
    _step_charged: float = 0.0  # sum of the prompts' times in it
    _answered_at: float = 0.0  # time of the last answer
    _answered_before: float = 0.0  # time of the answer before that
    _alone: int = 0  # see `note_completion`
    _others: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Prompts in flight of other workers, oldest first: time of sending, predicted seconds, expected uncached
    tokens."""

    @property
    def computes_one_at_a_time(self) -> bool:
        """Whether it was observed to compute one prompt at a time."""
        return self._alone > _SERIAL_AFTER

    def note_completion(self, batched: bool) -> None:
        """Note that a queued prompt has completed.

        `batched`: it was computed in the same step as the one before.
        """
        if batched:
            self._alone = 0
        elif self._alone <= _SERIAL_AFTER:
            self._alone += 1
            if self._alone == _SERIAL_AFTER:
                self._alone += _SERIAL_FOR

    def note_step(self, step: Step, *, left_out: float | None) -> None:
        """Learn the token capacity of a step.

        `left_out`: tokens of the next prompt, if it had arrived when the step began and did not fit. None: it had not.
        """
        if step.largest > self.step_tokens:
            return  # its largest prompt took several steps
        if step.uncached >= self.step_tokens:
            self.step_tokens = step.uncached + 1
        elif left_out is not None and step.uncached + left_out < self.step_tokens:
            self.step_tokens += _STEP_TOKENS_STEP * (step.uncached + left_out - self.step_tokens)

    def fits_in_step(self, tokens: float) -> bool:
        """Return whether the next step has room for the tokens of a prompt, or three steps during a test."""
        return self.behind_tokens + tokens <= self.step_tokens * self.concurrency.target_in_flight

    @property
    def _fill(self) -> float:
        if not self.shared_seconds or self.concurrency.lanes > 1:
            return self.in_flight / self.concurrency.lanes
        return (self.uncached_tokens + sum([computed for _, _, computed in self._others])) / self.step_tokens

    @property
    def in_flight(self) -> int:
        """Number of prompts in flight of all workers."""
        return len(self._sent) + len(self._others)

    def wait(self, now: float) -> float:
        """Return the time until it begins with a new prompt, by the known prompts in flight."""
        load = self.charged_tokens * SECONDS_PER_LOAD
        if self._others:
            load += sum([seconds for _, seconds, _ in self._others])
        wait = self.left(load, now)
        return max(0.0, wait - self.shared_seconds) if self.behind else wait

    @property
    def is_busy(self) -> bool:
        """Whether this worker has prompts in flight there."""
        return bool(self._sent)

    def send(self, prompt: PromptCosts, hit: int, seconds: float, compute: int, kv: int, now: float) -> Sent:
        """Add a prompt that is sent now. It counts as cached at once, or a burst of equal prompts would scatter.

        Args:
            prompt: The prompt.
            hit: Number of its pieces that are probably cached.
            seconds: Predicted prefill time.
            compute: Charged compute tokens.
            kv: Charged KV tokens.
            now: Current time of the clock.
        """
        prefixes, before = self.cached, self._sent
        ahead = len(before) + len(self._others)
        wait = self.wait(now) if ahead else 0.0
        cached = prefixes.found(prompt.ends, hit, prompt.tokens) if hit else 0.0
        computed = prompt.tokens - cached
        odometer = prefixes.odometer
        readings: Sequence[float | None] = ()
        if prompt.keys:
            readings = prefixes.use(prompt.keys, prompt.ends, computed)
        else:
            prefixes.odometer += computed
        if self.journal is not None:
            self._write(RecordKind.SENT, prompt.keys, prompt.ends, now, seconds, computed)
        self.version += 1
        self.charged_tokens += compute
        self.uncached_tokens += computed
        if before:
            self.behind += 1
            self.behind_tokens += computed
        else:
            self._began, self._step_seconds, self._step_charged = now, seconds, seconds
        sent = Sent(self.on_end, compute, kv, prompt, now, seconds, cached, readings, odometer, ahead, wait)
        before[sent] = None
        return sent

    def end(self, sent: Sent, served: bool, now: float, is_lesson: bool = True) -> PrefillSample | None:
        """Remove a prompt that has been computed or has failed, and return what it teaches about prefill times.

        None: it teaches nothing, or it was alone and `is_lesson` is False.
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
                reported_tokens, reported_cached = sent.answer
                if prompt.keys:
                    prefixes.tell(reported_cached)
                    there = tokens * reported_cached / max(1, reported_tokens)
                    further = cached - there
                    prefixes.odometer += further
                    found_age, missed_age = prefixes.learn(sent.readings, sent.odometer, prompt.ends, cached, there)
                tokens, cached = float(reported_tokens), float(reported_cached)
            # A prompt that was sent before the answer before the last one was queued behind another one.
            was_behind = sent.at < self._answered_before and sent.seconds > _MIN_SECONDS
            # Otherwise the prompt teaches nothing, or nothing new.
            if tokens > cached and (is_lesson or sent.ahead or was_behind):
                seconds = now - max(sent.at, self._answered_at)
                company = sent.ahead, float(was_behind), float(has_overtaken), fill
                sample = PrefillSample(tokens - cached, cached, seconds, now - sent.at, *company)
            self._answered_before, self._answered_at = self._answered_at, now
            if self._alone > _SERIAL_AFTER:
                self._alone -= 1
                if self._alone == _SERIAL_AFTER:
                    self._alone = 0
        else:  # a failed prompt is not cached
            dropped = [key for key, reading in zip(prompt.keys, sent.readings, strict=True) if reading is None]
            prefixes.drop(dropped)
        if self.journal is not None:
            ages = _written_age(found_age), _written_age(missed_age)
            self._write(RecordKind.ENDED, dropped, (), now, further, prefixes.trust, *ages, float(served))
        return sample

    def write_sample(self, sample: PrefillSample, at: float) -> None:
        """Send a sample to the other workers. `at`: time at which the prompt had been computed."""
        if self.journal is not None:
            self._write(RecordKind.SAMPLED, (), (), at, *sample)

    def forget_cache(self) -> None:
        """Reset what depends on the engine's prefix cache, after the engine has lost it. Each worker calls this."""
        self._alone = 0
        self.step_tokens = _FIRST_STEP_TOKENS
        self.concurrency = ConcurrencyEstimate(self.concurrency.ranks)
        if len(self.cached):
            self.cached.clear()
            self.version += 1

    def left(self, load: float, now: float) -> float:
        """Return the time until it begins with a new prompt. `load`: charged load of all workers, in seconds."""
        others = self._others
        if others and load <= (self.charged_tokens + 0.5) * SECONDS_PER_LOAD:
            others.clear()  # records of their ends were lost
        concurrency = self.concurrency
        if concurrency.is_orderly is False:
            return (load + self.in_flight * self.overhead_seconds) / concurrency.lanes
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
        """Return whether the current step is nearly complete, by its prediction."""
        seconds = self._step_seconds
        return self._began + seconds - now < max(_ENDING_SECONDS, _ENDING_SHARE * seconds)

    def _lane_left(self, now: float) -> float:
        """Return the time until it begins with a new prompt, if it computes several prompts side by side."""
        in_flight = [(sent.at, sent.seconds) for sent in self._sent]
        if self._others:
            in_flight = sorted([*in_flight, *[(at, seconds) for at, seconds, _ in self._others]])
        lanes = self.concurrency.lanes
        if len(in_flight) < lanes:
            return 0.0
        lefts = [_left(seconds, now - at) for at, seconds in in_flight[:lanes]]
        return soonest_free(lefts, [seconds for _, seconds in in_flight[lanes:]])

    def _begin(self, now: float) -> None:
        """Begin a step with the oldest prompt, and with all others that had arrived and fit, if it batches prompts."""
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
        self.behind, self.behind_tokens = len(self._sent) - count, all_tokens - tokens

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
        """Apply a cache count. Counts are frequent, so costs are only invalidated by a notable change."""
        before = self.cached.capacity
        computing = self.uncached_tokens + sum(computed for _, _, computed in self._others)
        if self.cached.follow(count, computing):
            self.version += 1
            self.cached.clear()
            for sent in self._sent:  # prompts in flight enter the cache later
                self.cached.use(sent.prompt.keys, sent.prompt.ends, 0.0)
        elif abs(self.cached.capacity - before) > _CAPACITY_CHANGE * before:
            self.version += 1


def write_count(journal: JournalWriter, slot: int, count: CacheCount) -> None:
    """Send all workers the cache count of the engine in this slot."""
    journal.write(packed(Record(RecordKind.COUNTED, slot, (), (), count)))


def _written_age(age: float | None) -> float:
    """Return the age of a prefix as a journal record has it, in seconds; NO_AGE if it is None."""
    return NO_AGE if age is None else age


def _read_age(number: float) -> float | None:
    return None if number < 0 else number


def _left(seconds: float, spent: float) -> float:
    """Return the remaining time of a prompt.

    An overdue prompt is expected to take as long again as it is late, because it may never end.
    """
    return max(seconds - spent, spent - seconds, _MIN_LEFT_SHARE * seconds)


def read_journal(
    journal: JournalWriter, prefillers: Mapping[int, Prefiller], sets: WorkingSets
) -> Iterator[tuple[Prefiller, PrefillSample, float]]:
    """Apply the records of other workers. Yield the samples among them, each with its prefiller and time.

    `prefillers`: by slot. Records of other slots are dropped.
    """
    for data in journal.new_records():
        _, slot = kind_and_slot(data)
        prefiller = prefillers.get(slot)
        if prefiller is not None:
            record = unpacked(data)
            if record.kind >= RecordKind.SESSION:
                sets.take(record, prefiller.cached)
                continue
            if record.kind == RecordKind.SENT:
                at, seconds, _ = record.numbers
                sets.note_work(seconds, at)
            if (sample := prefiller._apply(record)) is not None:
                yield prefiller, sample, record.numbers[0]


class Prefillers:
    """All prefillers of one worker. It learns from its answers and from those of other workers.

    A prefiller's place is its index among the candidates.
    """

    def __init__(self, context: PolicyContext, weights: tuple[int, int]) -> None:
        """Create it without prefillers.

        `weights`: see Policy.
        """
        self.cost = PrefillCost()
        self._by_cache: dict[CachedPrefixes, Prefiller] = {}
        records = None
        if context.journal is not None and context.journal.has_readers:
            records = SessionRecords(
                context.journal, lambda cache: self._by_cache[cache].backend.slot, lambda: self.read_records()
            )
        self.working_sets = WorkingSets(
            lambda: context.balance is None or context.balance().working_sets,
            lambda: [prefiller.cached for prefiller in self.prefillers],
            records,
        )
        self.reader: SlotReader
        """Reads the slots of `candidates`."""
        self._clock = context.clock
        self._facts = context.facts
        self._journal = context.journal
        self._weights = weights
        self.by_key: dict[str, Prefiller] = {}
        """Prefillers by `Backend.key`."""
        self._by_slot: dict[int, Prefiller] = {}
        self.candidates: Sequence[Candidate] = ()
        """Candidates of the last call of `look_up`."""
        self.prefillers: list[Prefiller] = []
        """Their prefillers, in the same order."""
        self.place_of: dict[str | CachedPrefixes, int] = {}
        """Places of the candidates, by `Backend.key` and by cache."""
        self._holders = PrefixHolders()
        self._by_speed: list[int] = []  # places, the fastest prefiller first
        self._is_sorted = False  # whether the speeds are those of `_by_speed`
        self._pending: PendingSamples[tuple[Prefiller, PrefillSample]] = PendingSamples(context)
        self._next_lesson = 0.0
        self._has_enough_lessons = False

    def look_up(self, candidates: Sequence[Candidate]) -> list[Prefiller]:
        """Return the prefillers of candidates, after applying the records of other workers."""
        if candidates is not self.candidates:
            self._set_candidates(candidates)
        if self._journal is not None:
            self.read_records()
        return self.prefillers

    def _set_candidates(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefillers = [self.of(candidate.backend) for candidate in candidates]
        self.place_of = {}
        for place, (prefiller, candidate) in enumerate(zip(self.prefillers, candidates, strict=True)):
            if prefiller.backend is not candidate.backend:  # it came back, perhaps in another slot
                prefiller.backend = candidate.backend
                self._by_slot[candidate.backend.slot] = prefiller
            self._take_facts(prefiller)
            self.place_of[candidate.backend.key] = self.place_of[prefiller.cached] = place
        self._is_sorted = False
        if candidates:
            slots = [candidate.backend.slot for candidate in candidates]
            self.reader = candidates[0].scoreboard.reader(slots, *self._weights)

    def read_records(self) -> None:
        """Apply new records of other workers."""
        if self._journal is not None and self._journal.has_new_records:
            for prefiller, sample, at in read_journal(self._journal, self._by_slot, self.working_sets):
                self.learn(prefiller, sample, at)

    def of(self, backend: Backend) -> Prefiller:
        """Return the prefiller of a backend."""
        known = self.by_key.get(backend.key)
        if known is None:
            journal = self._journal
            journal = journal if journal is not None and journal.has_readers else None
            known = Prefiller(backend, cached=CachedPrefixes(self._holders), journal=journal)
            known.on_end = partial(self._end, known)
            self.by_key[backend.key] = self._by_slot[backend.slot] = self._by_cache[known.cached] = known
        return known

    def _end(self, prefiller: Prefiller, sent: Sent, served: bool) -> None:
        """Learn from a prompt that has been computed or has failed."""
        if self._journal is not None:
            self.read_records()  # another worker's answer may show when this prompt began
        now = self._clock()
        if sent.prompt.keys:
            self.working_sets.note_end(prefiller.cached, sent, now)
        sample = prefiller.end(sent, served, now, now >= self._next_lesson or prefiller.step is not None)
        if sample is not None:
            self._pending.add((prefiller, sample), now - sample.whole, now)
            self._learn_settled()

    def _learn_settled(self) -> None:
        """Learn from the samples for which the lag of the event loop is known. Late samples teach nothing."""
        for (prefiller, sample), at, is_timely in self._pending.settled():
            if is_timely:
                prefiller.write_sample(sample, at)
                self.learn(prefiller, sample, at)
            else:
                self._close(prefiller, at)
                prefiller.concurrency.note_late()

    def learn(self, prefiller: Prefiller, sample: PrefillSample, now: float) -> None:
        """Learn the prefill time of a prompt that a prefiller has answered at the time `now`."""
        if now < self._next_lesson and prefiller.step is None and not sample.ahead and not sample.was_behind:
            return  # the sample would teach nothing new
        concurrency = prefiller.concurrency
        predicted = self.cost.seconds(sample.uncached, sample.cached) * prefiller.slowness
        doubted_until = concurrency.doubted_until
        concurrency.learn(sample, self.cost.shape, now)
        if concurrency.doubted_until > doubted_until:
            logger.warning(
                "prefill policy: learned order of prompts dropped: the instance computes more at once if it gets more",
                extra={"fields": {"backend": prefiller.backend.name}},
            )
        if not concurrency.is_orderly or concurrency.lanes > 1:
            self._close(prefiller, now)
            if sample.ahead < (concurrency.lanes if concurrency.is_orderly else 1):  # it was computed without waiting
                self._teach(prefiller, sample.uncached, sample.cached, sample.whole, now)
            return
        is_batched = sample.seconds < _BATCHED_SHARE * predicted
        step = prefiller.step
        if sample.was_behind and (is_batched or (step and step.uncached + sample.uncached <= _SURELY_FIT_TOKENS)):
            prefiller.note_completion(is_batched)
        if step is not None and is_batched and not prefiller.computes_one_at_a_time:
            prefiller.step = step.with_prompt(sample)
        else:
            if step is not None:
                was_there = now - sample.whole < step.began - _SURELY_BEFORE_SECONDS
                prefiller.note_step(step, left_out=sample.uncached if was_there else None)
            self._close(prefiller, now)
            prefiller.step = Step(
                sample.uncached, sample.attention, sample.seconds, began=now - sample.seconds, largest=sample.uncached
            )
        if not prefiller.in_flight:
            self._close(prefiller, now)

    def _close(self, prefiller: Prefiller, now: float) -> None:
        """Complete the last step of a prefiller, and learn from it as one prompt."""
        step, prefiller.step = prefiller.step, None
        if step is not None and step.uncached > 0:
            self._teach(prefiller, step.uncached, step.cached, step.seconds, now)

    def _teach(self, prefiller: Prefiller, uncached: float, cached: float, seconds: float, now: float) -> None:
        if now >= self._next_lesson or not self._has_enough_lessons:
            self.cost.learn(prefiller.backend.key, uncached, cached, seconds)
            self._has_enough_lessons = self.cost.samples >= _ENOUGH_LESSONS
            if self._has_enough_lessons:
                self._next_lesson = now + _LESSON_SECONDS
            prefiller.slowness = self.cost.slowness(prefiller.backend.key)
            self._is_sorted = False
        prefiller.overhead_seconds = self.cost.overhead
        had_shared = prefiller.shared_seconds > 0
        prefiller.shared_seconds = 0.0 if prefiller.computes_one_at_a_time else self.cost.shape[0] * prefiller.slowness
        if had_shared != (prefiller.shared_seconds > 0):
            prefiller.concurrency.forget_limit()

    def _take_facts(self, prefiller: Prefiller) -> None:
        facts = self._facts(prefiller.backend)
        if facts is not None and facts.ranks != prefiller.concurrency.ranks:
            prefiller.concurrency = ConcurrencyEstimate(facts.ranks)

    def own(self, prefiller: Prefiller, prompt: PromptCosts) -> tuple[int, float]:
        """Return the number of a prompt's pieces that are probably cached, and the prefill time of the rest."""
        known = prompt.by_prefiller.get(prefiller)
        if known is None or known[0] != prefiller.version:
            if prompt.request.subject is None:  # a passed-through request
                hit, seconds = 0, prompt.request.prefill.compute_tokens * SECONDS_PER_LOAD
            else:
                prefixes = prefiller.cached
                hit = prefixes.hit(prompt.keys)
                cached = prefixes.trust * prefixes.found(prompt.ends, hit, prompt.tokens)
                seconds = self.cost.seconds(prompt.tokens - cached, cached) * prefiller.slowness
            known = prompt.by_prefiller[prefiller] = prefiller.version, hit, seconds
        return known[1], known[2]

    def holders(self, prompt: PromptCosts) -> list[int]:
        """Return the places of the prefillers that may have the prefix of a prompt."""
        if not prompt.keys:
            return []
        place_of = self.place_of
        return [place_of[cache] for cache in self._holders.of(prompt.keys[0]) if cache in place_of]

    def idle(self, scored: Set[int], count: int) -> list[int]:
        """Return the places of the fastest prefillers that are not scored one by one, at most `count`."""
        found: list[int] = []
        if not self._is_sorted:
            prefillers = self.prefillers
            self._by_speed = sorted(range(len(prefillers)), key=lambda place: prefillers[place].slowness)
            self._is_sorted = True
        for place in self._by_speed:
            if place not in scored:
                found.append(place)
                if len(found) == count:
                    break
        return found
