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
from proxy.balancer.policies.concurrency import ConcurrencyEstimate, seconds_until_lane_free
from proxy.balancer.policies.prefill_cost import (
    NO_AGE,
    SECONDS_PER_LOAD,
    JournalRecord,
    PrefillCost,
    PrefillSample,
    PrefillStep,
    RecordKind,
    SentPrompt,
    kind_and_slot,
    pack_record,
    unpack_record,
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
    on_end: Callable[[SentPrompt, bool], None] = field(init=False)
    """Called when a prompt has been computed (True) or has failed (False)."""
    cached_prefixes: CachedPrefixes = field(default_factory=CachedPrefixes)
    """Prefixes that are probably cached."""
    slowness: float = 1.0
    """Time of its prefills relative to the other prefillers."""
    journal: JournalWriter | None = None
    """Journal for the other workers. None: there are none."""
    cost_version: int = 0
    """Changes with the cached prefixes and the speed, which invalidates costs that were computed."""
    charged_tokens: int = 0
    """Charged compute tokens of this worker's prompts in flight."""
    uncached_tokens: float = 0.0
    """Expected uncached tokens of this worker's prompts in flight."""
    concurrency_estimate: ConcurrencyEstimate = field(default_factory=ConcurrencyEstimate)
    current_step: PrefillStep | None = None
    """The last answered step, as long as more prompts may belong to it. None: it is complete."""
    shared_step_seconds: float = 0.0
    """Part of a predicted prefill time that prompts of one step share. 0: it computes one prompt at a time."""
    overhead_seconds: float = 0.0
    """Additional time of each prompt if the order of prompts is unknown; see `PrefillCost.overhead_seconds`."""
    prompts_behind_step: int = 0
    """Number of this worker's prompts behind the current step."""
    tokens_behind_step: float = 0.0
    """Sum of their expected uncached tokens."""
    step_capacity_tokens: float = _FIRST_STEP_TOKENS
    """Maximum uncached tokens of a step."""
    _prompts_in_flight: dict[SentPrompt, None] = field(default_factory=dict)
    """Prompts in flight of this worker, oldest first."""
    _step_began_at: float = 0.0  # start of the current step
    _step_seconds: float = 0.0  # predicted duration of the current step
    _step_charged: float = 0.0  # sum of the prompts' times in it
    _last_answer_at: float = 0.0  # time of the last answer
    _previous_answer_at: float = 0.0  # time of the answer before that
    _prompts_computed_alone: int = 0  # see `record_completion`
    _prompts_of_other_workers: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Prompts in flight of other workers, oldest first: time of sending, predicted seconds, expected uncached
    tokens."""

    @property
    def computes_one_at_a_time(self) -> bool:
        """Whether it was observed to compute one prompt at a time."""
        return self._prompts_computed_alone > _SERIAL_AFTER

    def record_completion(self, is_batched: bool) -> None:
        """Note that a queued prompt has completed.

        `is_batched`: it was computed in the same step as the one before.
        """
        if is_batched:
            self._prompts_computed_alone = 0
        elif self._prompts_computed_alone <= _SERIAL_AFTER:
            self._prompts_computed_alone += 1
            if self._prompts_computed_alone == _SERIAL_AFTER:
                self._prompts_computed_alone += _SERIAL_FOR

    def learn_step_capacity(self, step: PrefillStep, *, left_out_tokens: float | None) -> None:
        """Learn the token capacity of a step.

        `left_out_tokens`: tokens of the next prompt, if it had arrived when the step began and did not fit. None: it
        had not.
        """
        if step.largest_prompt_tokens > self.step_capacity_tokens:
            return  # its largest prompt took several steps
        if step.uncached_tokens >= self.step_capacity_tokens:
            self.step_capacity_tokens = step.uncached_tokens + 1
        elif left_out_tokens is not None and step.uncached_tokens + left_out_tokens < self.step_capacity_tokens:
            self.step_capacity_tokens += _STEP_TOKENS_STEP * (
                step.uncached_tokens + left_out_tokens - self.step_capacity_tokens
            )

    def fits_in_step(self, prompt_tokens: float) -> bool:
        """Return whether the next step has room for the tokens of a prompt, or three steps during a test."""
        return (
            self.tokens_behind_step + prompt_tokens
            <= self.step_capacity_tokens * self.concurrency_estimate.target_in_flight
        )

    @property
    def _step_fill(self) -> float:
        if not self.shared_step_seconds or self.concurrency_estimate.lane_count > 1:
            return self.in_flight_count / self.concurrency_estimate.lane_count
        return (
            self.uncached_tokens + sum([computed for _, _, computed in self._prompts_of_other_workers])
        ) / self.step_capacity_tokens

    @property
    def in_flight_count(self) -> int:
        """Number of prompts in flight of all workers."""
        return len(self._prompts_in_flight) + len(self._prompts_of_other_workers)

    def wait_seconds(self, now: float) -> float:
        """Return the time until it begins with a new prompt, by the known prompts in flight."""
        load = self.charged_tokens * SECONDS_PER_LOAD
        if self._prompts_of_other_workers:
            load += sum([seconds for _, seconds, _ in self._prompts_of_other_workers])
        wait = self.remaining_seconds(load, now)
        return max(0.0, wait - self.shared_step_seconds) if self.prompts_behind_step else wait

    @property
    def has_prompts_in_flight(self) -> bool:
        """Whether this worker has prompts in flight there."""
        return bool(self._prompts_in_flight)

    def add_prompt(
        self,
        prompt: PromptCosts,
        cached_pieces: int,
        predicted_seconds: float,
        compute_charge: int,
        kv_charge: int,
        now: float,
    ) -> SentPrompt:
        """Add a prompt that is sent now. It counts as cached at once, or a burst of equal prompts would scatter.

        Args:
            prompt: The prompt.
            cached_pieces: Number of its pieces that are probably cached.
            predicted_seconds: Predicted prefill time.
            compute_charge: Charged compute tokens.
            kv_charge: Charged KV tokens.
            now: Current time of the clock.
        """
        prefixes, before = self.cached_prefixes, self._prompts_in_flight
        ahead = len(before) + len(self._prompts_of_other_workers)
        wait = self.wait_seconds(now) if ahead else 0.0
        cached = loaded = 0.0
        if cached_pieces:
            cached = prefixes.predict_found_tokens(prompt.piece_ends, cached_pieces, prompt.prompt_tokens)
            loaded = prefixes.predict_loaded_tokens(prompt.prefix_keys, prompt.piece_ends, cached)
        computed = prompt.prompt_tokens - cached
        odometer = prefixes.token_odometer
        readings: Sequence[float | None] = ()
        if prompt.prefix_keys:
            readings = prefixes.record_prompt(prompt.prefix_keys, prompt.piece_ends, computed)
        else:
            prefixes.token_odometer += computed
        if self.journal is not None:
            self._write_record(RecordKind.SENT, prompt.prefix_keys, prompt.piece_ends, now, predicted_seconds, computed)
        self.cost_version += 1
        self.charged_tokens += compute_charge
        self.uncached_tokens += computed
        if before:
            self.prompts_behind_step += 1
            self.tokens_behind_step += computed
        else:
            self._step_began_at, self._step_seconds, self._step_charged = now, predicted_seconds, predicted_seconds
        sent = SentPrompt(
            self.on_end,
            compute_charge,
            kv_charge,
            prompt,
            now,
            predicted_seconds,
            cached,
            loaded,
            readings,
            odometer,
            ahead,
            wait,
        )
        before[sent] = None
        return sent

    def remove_prompt(
        self, sent_prompt: SentPrompt, is_served: bool, now: float, is_lesson: bool = True
    ) -> PrefillSample | None:
        """Remove a prompt that has been computed or has failed, and return what it teaches about prefill times.

        None: it teaches nothing, or it was alone and `is_lesson` is False.
        """
        prompt, cached = sent_prompt.prompt_costs, sent_prompt.predicted_cached_tokens
        on_device = cached - sent_prompt.predicted_loaded_tokens
        fill = self._step_fill
        has_overtaken = next(iter(self._prompts_in_flight)) is not sent_prompt or (
            bool(self._prompts_of_other_workers) and self._prompts_of_other_workers[0][0] < sent_prompt.sent_at
        )
        del self._prompts_in_flight[sent_prompt]
        self.cost_version += 1
        self.charged_tokens -= sent_prompt.compute_charge
        if self._prompts_in_flight:
            self.uncached_tokens -= prompt.prompt_tokens - cached
            self._begin_step(now if is_served else self._step_began_at)
        else:
            self.uncached_tokens = 0.0
        prefixes = self.cached_prefixes
        dropped: Sequence[int] = ()
        further, sample = 0.0, None
        found_age: float | None = None
        missed_age: float | None = None
        if is_served:
            tokens = float(prompt.prompt_tokens)
            if sent_prompt.reported_usage is not None:
                reported_tokens, reported_cached = sent_prompt.reported_usage
                if prompt.prefix_keys:
                    prefixes.learn_block_size(reported_cached)
                    there = tokens * reported_cached / max(1, reported_tokens)
                    further = cached - there
                    prefixes.token_odometer += further
                    found_age, missed_age = prefixes.learn_from_report(
                        sent_prompt.odometer_readings, sent_prompt.odometer_at_send, prompt.piece_ends, cached, there
                    )
                tokens, cached = float(reported_tokens), float(reported_cached)
            # A prompt that was sent before the answer before the last one was queued behind another one.
            was_behind = sent_prompt.sent_at < self._previous_answer_at and sent_prompt.predicted_seconds > _MIN_SECONDS
            # Otherwise the prompt teaches nothing, or nothing new.
            if tokens > cached and (is_lesson or sent_prompt.prompts_ahead or was_behind):
                seconds = now - max(sent_prompt.sent_at, self._last_answer_at)
                company = sent_prompt.prompts_ahead, float(was_behind), float(has_overtaken), fill
                loaded = max(0.0, cached - on_device) if sent_prompt.predicted_loaded_tokens else 0.0
                sample = PrefillSample(tokens - cached, cached, seconds, now - sent_prompt.sent_at, *company, loaded)
            self._previous_answer_at, self._last_answer_at = self._last_answer_at, now
            if self._prompts_computed_alone > _SERIAL_AFTER:
                self._prompts_computed_alone -= 1
                if self._prompts_computed_alone == _SERIAL_AFTER:
                    self._prompts_computed_alone = 0
        else:  # a failed prompt is not cached
            dropped = [
                key
                for key, reading in zip(prompt.prefix_keys, sent_prompt.odometer_readings, strict=True)
                if reading is None
            ]
            prefixes.drop_keys(dropped)
        if self.journal is not None:
            ages = _encode_age(found_age), _encode_age(missed_age)
            self._write_record(RecordKind.ENDED, dropped, (), now, further, prefixes.hit_trust, *ages, float(is_served))
        return sample

    def write_sample(self, sample: PrefillSample, completed_at: float) -> None:
        """Send a sample to the other workers. `completed_at`: time at which the prompt had been computed."""
        if self.journal is not None:
            self._write_record(RecordKind.SAMPLED, (), (), completed_at, *sample)

    def forget_cache(self) -> None:
        """Reset what depends on the engine's prefix cache, after the engine has lost it. Each worker calls this."""
        self._prompts_computed_alone = 0
        self.step_capacity_tokens = _FIRST_STEP_TOKENS
        self.concurrency_estimate = ConcurrencyEstimate(self.concurrency_estimate.rank_count)
        if len(self.cached_prefixes):
            self.cached_prefixes.forget_all()
            self.cost_version += 1

    def remaining_seconds(self, charged_load: float, now: float) -> float:
        """Return the time until it begins with a new prompt.

        `charged_load`: charged load of all workers, in seconds.
        """
        others = self._prompts_of_other_workers
        if others and charged_load <= (self.charged_tokens + 0.5) * SECONDS_PER_LOAD:
            others.clear()  # records of their ends were lost
        concurrency = self.concurrency_estimate
        if concurrency.computes_in_order is False:
            return (charged_load + self.in_flight_count * self.overhead_seconds) / concurrency.lane_count
        if concurrency.lane_count > 1:
            return self._lane_remaining_seconds(now)
        sent = self._prompts_in_flight
        if not sent and not others:
            return charged_load
        at, seconds, charged = self._step_began_at, self._step_seconds, self._step_charged
        if others and (not sent or others[0][0] < next(iter(sent)).sent_at):
            at, charged, _ = others[0]
            seconds = charged
        left = _remaining_time(seconds, now - max(at, self._last_answer_at))
        if self.prompts_behind_step > 1:
            charged += (self.prompts_behind_step - 1) * self.shared_step_seconds
        return max(0.0, charged_load - charged + left)

    def is_step_ending(self, now: float) -> bool:
        """Return whether the current step is nearly complete, by its prediction."""
        seconds = self._step_seconds
        return self._step_began_at + seconds - now < max(_ENDING_SECONDS, _ENDING_SHARE * seconds)

    def _lane_remaining_seconds(self, now: float) -> float:
        """Return the time until it begins with a new prompt, if it computes several prompts side by side."""
        in_flight = [(sent.sent_at, sent.predicted_seconds) for sent in self._prompts_in_flight]
        if self._prompts_of_other_workers:
            in_flight = sorted([*in_flight, *[(at, seconds) for at, seconds, _ in self._prompts_of_other_workers]])
        lanes = self.concurrency_estimate.lane_count
        if len(in_flight) < lanes:
            return 0.0
        lefts = [_remaining_time(seconds, now - at) for at, seconds in in_flight[:lanes]]
        return seconds_until_lane_free(lefts, [seconds for _, seconds in in_flight[lanes:]])

    def _begin_step(self, now: float) -> None:
        """Begin a step with the oldest prompt, and with all others that had arrived and fit, if it batches prompts."""
        count, step, total = 0, 0.0, 0.0
        tokens, all_tokens = 0.0, 0.0
        for sent in self._prompts_in_flight:
            total += sent.predicted_seconds
            all_tokens += sent.prompt_costs.prompt_tokens - sent.predicted_cached_tokens
            if not count or (
                self.shared_step_seconds and sent.sent_at <= now and all_tokens < self.step_capacity_tokens
            ):
                count += 1
                step, tokens = total, all_tokens
        self._step_began_at = now
        self._step_charged, self._step_seconds = step, step - (count - 1) * self.shared_step_seconds
        self.prompts_behind_step, self.tokens_behind_step = len(self._prompts_in_flight) - count, all_tokens - tokens

    def _write_record(self, kind: RecordKind, keys: Sequence[int], ends: Sequence[float], *numbers: float) -> None:
        assert self.journal is not None
        self.journal.write_record(pack_record(JournalRecord(kind, self.backend.slot, keys, ends, numbers)))

    def _apply_record(self, record: JournalRecord) -> PrefillSample | None:
        if record.record_kind == RecordKind.COUNTED:
            self._apply_count(CacheCount(*record.record_numbers))
            return None
        if record.record_kind == RecordKind.SAMPLED:
            return PrefillSample(*record.record_numbers[1:])
        self.cost_version += 1
        if record.record_kind == RecordKind.SENT:
            at, seconds, computed = record.record_numbers
            self._prompts_of_other_workers.append((at, seconds, computed))
            self.cached_prefixes.record_prompt(record.prefix_keys, record.piece_ends, computed)
            return None
        at, further, trust, found_age, missed_age, served = record.record_numbers
        if self._prompts_of_other_workers:
            self._prompts_of_other_workers.popleft()
        prefixes = self.cached_prefixes
        prefixes.token_odometer += further
        prefixes.hit_trust = trust
        prefixes.learn_from_ages(_decode_age(found_age), _decode_age(missed_age))
        prefixes.drop_keys(record.prefix_keys)
        if served:
            self._previous_answer_at, self._last_answer_at = self._last_answer_at, max(at, self._last_answer_at)
        return None

    def _apply_count(self, count: CacheCount) -> None:
        """Apply a cache count. Counts are frequent, so costs are only invalidated by a notable change."""
        before = self.cached_prefixes.capacity_tokens
        computing = self.uncached_tokens + sum(computed for _, _, computed in self._prompts_of_other_workers)
        if self.cached_prefixes.apply_count(count, computing):
            self.cost_version += 1
            self.cached_prefixes.forget_all()
            for sent in self._prompts_in_flight:  # prompts in flight enter the cache later
                self.cached_prefixes.record_prompt(sent.prompt_costs.prefix_keys, sent.prompt_costs.piece_ends, 0.0)
        elif abs(self.cached_prefixes.capacity_tokens - before) > _CAPACITY_CHANGE * before:
            self.cost_version += 1


def write_cache_count(journal: JournalWriter, slot: int, cache_count: CacheCount) -> None:
    """Send all workers the cache count of the engine in this slot."""
    journal.write_record(pack_record(JournalRecord(RecordKind.COUNTED, slot, (), (), cache_count)))


def _encode_age(prefix_age: float | None) -> float:
    """Return the age of a prefix as a journal record has it, in seconds; NO_AGE if it is None."""
    return NO_AGE if prefix_age is None else prefix_age


def _decode_age(number: float) -> float | None:
    return None if number < 0 else number


def _remaining_time(seconds: float, spent_seconds: float) -> float:
    """Return the remaining time of a prompt.

    An overdue prompt is expected to take as long again as it is late, because it may never end.
    """
    return max(seconds - spent_seconds, spent_seconds - seconds, _MIN_LEFT_SHARE * seconds)


def apply_journal_records(
    journal: JournalWriter, prefillers: Mapping[int, Prefiller], working_sets: WorkingSets
) -> Iterator[tuple[Prefiller, PrefillSample, float]]:
    """Apply the records of other workers. Yield the samples among them, each with its prefiller and time.

    `prefillers`: by slot. Records of other slots are dropped.
    """
    for data in journal.new_records():
        _, slot = kind_and_slot(data)
        prefiller = prefillers.get(slot)
        if prefiller is not None:
            record = unpack_record(data)
            if record.record_kind >= RecordKind.SESSION:
                working_sets.apply_record(record, prefiller.cached_prefixes)
                continue
            if record.record_kind == RecordKind.SENT:
                at, seconds, _ = record.record_numbers
                working_sets.record_prefill_work(seconds, at)
            if (sample := prefiller._apply_record(record)) is not None:
                yield prefiller, sample, record.record_numbers[0]


class Prefillers:
    """All prefillers of one worker. It learns from its answers and from those of other workers.

    A prefiller's place is its index among the candidates.
    """

    def __init__(self, context: PolicyContext, weights: tuple[int, int]) -> None:
        """Create it without prefillers.

        `weights`: see Policy.
        """
        self.prefill_cost = PrefillCost()
        self._prefillers_by_cache: dict[CachedPrefixes, Prefiller] = {}
        records = None
        if context.journal_writer is not None and context.journal_writer.has_readers:
            records = SessionRecords(
                context.journal_writer,
                lambda cache: self._prefillers_by_cache[cache].backend.slot,
                lambda: self.read_records(),
            )
        self.working_sets = WorkingSets(
            lambda: context.get_balance_options is None or context.get_balance_options().working_sets,
            lambda: [prefiller.cached_prefixes for prefiller in self.prefillers],
            records,
        )
        self.slot_reader: SlotReader
        """Reads the slots of `candidates`."""
        self._clock = context.clock
        self._facts_of_engine = context.facts_of_engine
        self._journal = context.journal_writer
        self._load_weights = weights
        self.prefillers_by_key: dict[str, Prefiller] = {}
        """Prefillers by `Backend.key`."""
        self._by_slot: dict[int, Prefiller] = {}
        self.candidates: Sequence[Candidate] = ()
        """Candidates of the last call of `prefillers_of`."""
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

    def prefillers_of(self, candidates: Sequence[Candidate]) -> list[Prefiller]:
        """Return the prefillers of candidates, after applying the records of other workers."""
        if candidates is not self.candidates:
            self._set_candidates(candidates)
        if self._journal is not None:
            self.read_records()
        return self.prefillers

    def _set_candidates(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefillers = [self.prefiller_of(candidate.backend) for candidate in candidates]
        self.place_of = {}
        for place, (prefiller, candidate) in enumerate(zip(self.prefillers, candidates, strict=True)):
            if prefiller.backend is not candidate.backend:  # it came back, perhaps in another slot
                prefiller.backend = candidate.backend
                self._by_slot[candidate.backend.slot] = prefiller
            self._apply_engine_facts(prefiller)
            self.place_of[candidate.backend.key] = self.place_of[prefiller.cached_prefixes] = place
        self._is_sorted = False
        if candidates:
            slots = [candidate.backend.slot for candidate in candidates]
            self.slot_reader = candidates[0].scoreboard.reader_of(slots, *self._load_weights)

    def read_records(self) -> None:
        """Apply new records of other workers."""
        if self._journal is not None and self._journal.has_new_records:
            for prefiller, sample, at in apply_journal_records(self._journal, self._by_slot, self.working_sets):
                self.learn_prefill(prefiller, sample, at)

    def prefiller_of(self, backend: Backend) -> Prefiller:
        """Return the prefiller of a backend."""
        known = self.prefillers_by_key.get(backend.key)
        if known is None:
            journal = self._journal
            journal = journal if journal is not None and journal.has_readers else None
            known = Prefiller(backend, cached_prefixes=CachedPrefixes(self._holders), journal=journal)
            known.on_end = partial(self._end_prompt, known)
            self.prefillers_by_key[backend.key] = self._by_slot[backend.slot] = self._prefillers_by_cache[
                known.cached_prefixes
            ] = known
        return known

    def _end_prompt(self, prefiller: Prefiller, sent_prompt: SentPrompt, is_served: bool) -> None:
        """Learn from a prompt that has been computed or has failed."""
        if self._journal is not None:
            self.read_records()  # another worker's answer may show when this prompt began
        now = self._clock()
        if sent_prompt.prompt_costs.prefix_keys:
            self.working_sets.record_prompt_end(prefiller.cached_prefixes, sent_prompt, now)
        sample = prefiller.remove_prompt(
            sent_prompt, is_served, now, now >= self._next_lesson or prefiller.current_step is not None
        )
        if sample is not None:
            self._pending.add_sample((prefiller, sample), now - sample.seconds_since_send, now)
            self._learn_settled()

    def _learn_settled(self) -> None:
        """Learn from the samples for which the lag of the event loop is known. Late samples teach nothing."""
        for (prefiller, sample), at, is_timely in self._pending.take_settled():
            if is_timely:
                prefiller.write_sample(sample, at)
                self.learn_prefill(prefiller, sample, at)
            else:
                self._complete_step(prefiller, at)
                prefiller.concurrency_estimate.record_late_answer()

    def learn_prefill(self, prefiller: Prefiller, sample: PrefillSample, now: float) -> None:
        """Learn the prefill time of a prompt that a prefiller has answered at the time `now`."""
        if (
            now < self._next_lesson
            and prefiller.current_step is None
            and not sample.prompts_ahead
            and not sample.seconds_behind_previous
        ):
            return  # the sample would teach nothing new
        concurrency = prefiller.concurrency_estimate
        predicted = (
            self.prefill_cost.predict_seconds(sample.uncached_tokens, sample.cached_tokens, sample.loaded_tokens)
            * prefiller.slowness
        )
        doubted_until = concurrency.doubted_until
        concurrency.learn_from_sample(sample, self.prefill_cost.cost_shape, now)
        if concurrency.doubted_until > doubted_until:
            logger.warning(
                "prefill policy: learned order of prompts dropped: the instance computes more at once if it gets more",
                extra={"fields": {"backend": prefiller.backend.name}},
            )
        if not concurrency.computes_in_order or concurrency.lane_count > 1:
            self._complete_step(prefiller, now)
            lane_count = concurrency.lane_count if concurrency.computes_in_order else 1
            if sample.prompts_ahead < lane_count:  # it was computed without waiting
                self._learn_step(prefiller, PrefillStep.of_sample(sample, sample.seconds_since_send, now), now)
            return
        is_batched = sample.prefill_seconds < _BATCHED_SHARE * predicted
        step = prefiller.current_step
        if sample.seconds_behind_previous and (
            is_batched or (step and step.uncached_tokens + sample.uncached_tokens <= _SURELY_FIT_TOKENS)
        ):
            prefiller.record_completion(is_batched)
        if step is not None and is_batched and not prefiller.computes_one_at_a_time:
            prefiller.current_step = step.copy_with_prompt(sample)
        else:
            if step is not None:
                was_there = now - sample.seconds_since_send < step.began_at - _SURELY_BEFORE_SECONDS
                prefiller.learn_step_capacity(step, left_out_tokens=sample.uncached_tokens if was_there else None)
            self._complete_step(prefiller, now)
            prefiller.current_step = PrefillStep.of_sample(sample, sample.prefill_seconds, now)
        if not prefiller.in_flight_count:
            self._complete_step(prefiller, now)

    def _complete_step(self, prefiller: Prefiller, now: float) -> None:
        """Complete the last step of a prefiller, and learn from it as one prompt."""
        step, prefiller.current_step = prefiller.current_step, None
        if step is not None and step.uncached_tokens > 0:
            self._learn_step(prefiller, step, now)

    def _learn_step(self, prefiller: Prefiller, step: PrefillStep, now: float) -> None:
        if now >= self._next_lesson or not self._has_enough_lessons:
            self.prefill_cost.learn_prefill(
                prefiller.backend.key,
                step.uncached_tokens,
                step.equivalent_cached_tokens,
                step.step_seconds,
                step.loaded_tokens,
            )
            self._has_enough_lessons = self.prefill_cost.sample_count >= _ENOUGH_LESSONS
            if self._has_enough_lessons:
                self._next_lesson = now + _LESSON_SECONDS
            prefiller.slowness = self.prefill_cost.slowness_of(prefiller.backend.key)
            self._is_sorted = False
        prefiller.overhead_seconds = self.prefill_cost.overhead_seconds
        had_shared = prefiller.shared_step_seconds > 0
        prefiller.shared_step_seconds = (
            0.0 if prefiller.computes_one_at_a_time else self.prefill_cost.cost_shape[0] * prefiller.slowness
        )
        if had_shared != (prefiller.shared_step_seconds > 0):
            prefiller.concurrency_estimate.forget_limit()

    def _apply_engine_facts(self, prefiller: Prefiller) -> None:
        facts = self._facts_of_engine(prefiller.backend)
        if facts is not None and facts.data_parallel_ranks != prefiller.concurrency_estimate.rank_count:
            prefiller.concurrency_estimate = ConcurrencyEstimate(facts.data_parallel_ranks)

    def predict_cost_on(self, prefiller: Prefiller, prompt: PromptCosts) -> tuple[int, float]:
        """Return the number of a prompt's pieces that are probably cached, and the prefill time of the rest."""
        known = prompt.costs_by_prefiller.get(prefiller)
        if known is None or known[0] != prefiller.cost_version:
            if prompt.pick_request.request_subject is None:  # a passed-through request
                hit, seconds = 0, prompt.pick_request.prefill_load.compute_tokens * SECONDS_PER_LOAD
            else:
                prefixes = prefiller.cached_prefixes
                hit = prefixes.count_cached_pieces(prompt.prefix_keys)
                found = prefixes.predict_found_tokens(prompt.piece_ends, hit, prompt.prompt_tokens)
                loaded = prefixes.predict_loaded_tokens(prompt.prefix_keys, prompt.piece_ends, found) if hit else 0.0
                cached = prefixes.hit_trust * found
                seconds = (
                    self.prefill_cost.predict_seconds(
                        prompt.prompt_tokens - cached, cached, prefixes.hit_trust * loaded
                    )
                    * prefiller.slowness
                )
            known = prompt.costs_by_prefiller[prefiller] = prefiller.cost_version, hit, seconds
        return known[1], known[2]

    def places_with_prefix(self, prompt: PromptCosts) -> list[int]:
        """Return the places of the prefillers that may have the prefix of a prompt."""
        if not prompt.prefix_keys:
            return []
        place_of = self.place_of
        return [place_of[cache] for cache in self._holders.caches_with(prompt.prefix_keys[0]) if cache in place_of]

    def fastest_idle_places(self, scored: Set[int], count: int) -> list[int]:
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
