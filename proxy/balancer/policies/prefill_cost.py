"""Cost of prefills, learned from completed ones: S(u, c, h) = t0 + a·u + b·u·(c + u/2) + d·h seconds.

u tokens are computed behind c cached ones. Each costs the same except for its attention, which grows with the number of
tokens before it. h of the cached tokens are loaded from a tier below the device: host memory or a disk. The four
coefficients apply to all backends of a role. They are a least-squares fit of relative errors in which older samples
count less. The relative speed of each backend is learned separately.

The module also has the prompts in flight, the samples that they become, and the records by which workers share both.
Other gateways receive the same records, see `fleet.replicas`: theirs have other slots and another clock, and their
contents are not trusted.
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.pick import LeaseTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from proxy.balancer.pick import PickPrediction, PickRequest

SECONDS_PER_LOAD: Final = 0.0345e-3
"""Seconds per token of `Load.compute_tokens`. vllm-ascend's example estimates a prefill as 0.0345 ms per token plus 120
ms, the time of 3,480 tokens."""
_PRIOR: Final[tuple[float, ...]] = (0.12, SECONDS_PER_LOAD, 0.0, 0.0)
# The prior is scaled to the level of the samples and added at each of these lengths, with this weight of a sample.
# Otherwise samples of short prompts could imply that long prompts cost nothing.
_PRIOR_TOKENS: Final = (500, 5_000, 50_000)
_PRIOR_WEIGHT: Final = 0.3
_COEFFICIENTS: Final = 4
_LEVEL_STEP: Final = 0.02
# Each new sample multiplies the weight of the older ones by this factor.
_FORGETTING: Final = 0.998
_MAX_WEIGHT: Final = 1e6
_SAMPLES_PER_FIT: Final = 16
_SPEED_STEP: Final = 0.05
_MAX_SPEED: Final = math.log(4)
# Upper bound of a sample's error. It limits outliers, such as a prefill during a garbage collection.
_MAX_ERROR: Final = math.log(3)
_TRUSTED_SAMPLES: Final = 16
# Lower bound of a sample's time in `mean_fit_error`, as a share of the mean. Relative errors of shorter times are too
# large.
_MIN_SHARE: Final = 0.05


class PrefillCost:
    """Prefill times of the backends of one role, as one worker has learned them."""

    def __init__(self) -> None:
        self.cost_shape: tuple[float, ...] = _PRIOR
        """Coefficients t0, a, b and d, in seconds."""
        self.sample_count = 0
        """Number of samples that were learned."""
        self._slowness_by_backend: dict[Hashable, float] = {}  # logarithms of `_speed_factors`
        self._speed_factors: dict[Hashable, float] = {}  # time relative to the other backends
        # Normal equations of samples, each weighted by the inverse of its square.
        self._equation_matrix = [[0.0] * _COEFFICIENTS for _ in range(_COEFFICIENTS)]
        self._equation_vector = [0.0] * _COEFFICIENTS
        self._sample_weight = 1.0  # of the next sample; it grows instead of all older ones shrinking
        self._mean_log_error = 0.0  # logarithm of the ratio of prefill times to the prior

    def predict_seconds(self, uncached_tokens: float, cached_tokens: float, loaded_tokens: float = 0.0) -> float:
        """Return the predicted time of a prefill on a backend of normal speed.

        `loaded_tokens`: those of the cached tokens that are loaded from a tier below the device.
        """
        first, token, attention, load = self.cost_shape
        seconds = first + uncached_tokens * (token + attention * (cached_tokens + uncached_tokens / 2))
        return seconds + load * loaded_tokens if loaded_tokens else seconds

    @property
    def overhead_seconds(self) -> float:
        """Seconds that each prompt adds to the time of its tokens where loads are only counted, as in vllm-ascend.

        Several engines behind one address distribute prompts by their number and not by their cost.
        """
        return _PRIOR[0] * math.exp(self._mean_log_error)

    def slowness_of(self, backend: Hashable) -> float:
        """Return the time that a backend takes relative to the others."""
        return self._speed_factors.get(backend, 1.0)

    def learn_prefill(
        self,
        backend: Hashable,
        uncached_tokens: float,
        cached_tokens: float,
        prefill_seconds: float,
        loaded_tokens: float = 0.0,
    ) -> None:
        """Learn the time of a prefill that did not wait for other prompts. `loaded_tokens`: see `predict_seconds`."""
        if prefill_seconds <= 0 or uncached_tokens <= 0:
            return
        slowness = self._slowness_by_backend.get(backend, 0.0)
        predicted = self.predict_seconds(uncached_tokens, cached_tokens, loaded_tokens)
        error = math.log(prefill_seconds / predicted) - slowness
        if self.sample_count >= _TRUSTED_SAMPLES:
            clipped = max(-_MAX_ERROR, min(_MAX_ERROR, error))
            prefill_seconds *= math.exp(clipped - error)
            error = clipped
            slower = max(-_MAX_SPEED, min(_MAX_SPEED, slowness + _SPEED_STEP * error))
            self._slowness_by_backend[backend], self._speed_factors[backend] = slower, math.exp(slower)
        self.sample_count += 1
        self._sample_weight /= _FORGETTING
        prefill_seconds /= math.exp(slowness)
        # Errors are relative, but a sample that seems to have taken no time must not outweigh all others.
        scale = max(prefill_seconds, self.predict_seconds(uncached_tokens, cached_tokens, loaded_tokens))
        _add_equation(
            self._equation_matrix,
            self._equation_vector,
            _cost_terms(uncached_tokens, cached_tokens, loaded_tokens),
            prefill_seconds,
            self._sample_weight / scale**2,
        )
        above = math.log(prefill_seconds / _seconds_of_shape(_PRIOR, uncached_tokens, cached_tokens))
        self._mean_log_error += max(_LEVEL_STEP, 1 / self.sample_count) * (above - self._mean_log_error)
        if self.sample_count < _TRUSTED_SAMPLES or self.sample_count % _SAMPLES_PER_FIT == 0:
            self._fit_costs()

    def forget_backend(self, backend: Hashable) -> None:
        """Forget the prefill speed of a backend that has left."""
        self._slowness_by_backend.pop(backend, None)
        self._speed_factors.pop(backend, None)

    def _fit_costs(self) -> None:
        if self._sample_weight > _MAX_WEIGHT:
            self._equation_matrix = [[value / self._sample_weight for value in row] for row in self._equation_matrix]
            self._equation_vector = [value / self._sample_weight for value in self._equation_vector]
            self._sample_weight = 1.0
        matrix, vector = [list(row) for row in self._equation_matrix], list(self._equation_vector)
        for tokens in _PRIOR_TOKENS:
            seconds = _seconds_of_shape(_PRIOR, tokens, 0) * math.exp(self._mean_log_error)
            _add_equation(
                matrix, vector, _cost_terms(tokens, 0, 0), seconds, self._sample_weight * _PRIOR_WEIGHT / seconds**2
            )
        self.cost_shape = _least_squares(matrix, vector) or self.cost_shape


def mean_fit_error(prefill_samples: Sequence[tuple[float, float, float]]) -> float:
    """Return the mean absolute logarithmic error of the best fit of costs to samples.

    Each sample has its uncached tokens, the factor of its attention costs, and its time in seconds.
    """
    matrix, vector = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    least = _MIN_SHARE * sum(seconds for *_, seconds in prefill_samples) / len(prefill_samples)
    if least <= 0:  # all answers came at the same time
        return math.inf
    rows = [((1.0, uncached, attention), max(seconds, least)) for uncached, attention, seconds in prefill_samples]
    for terms, seconds in rows:
        _add_equation(matrix, vector, terms, seconds, 1 / seconds**2)
    shape = _least_squares(matrix, vector)
    if shape is None:
        return math.inf
    errors = (abs(math.log(_dot_product(shape, terms) / seconds)) for terms, seconds in rows)
    return sum(errors) / len(rows)


def _add_equation(
    matrix: list[list[float]], vector: list[float], cost_terms: Sequence[float], seconds: float, equation_weight: float
) -> None:
    """Add an equation with a weight."""
    for place, (row, term) in enumerate(zip(matrix, cost_terms, strict=True)):
        for column, other in enumerate(cost_terms):
            row[column] += equation_weight * term * other
        vector[place] += equation_weight * term * seconds


def _cost_terms(
    uncached_tokens: float, cached_tokens: float, loaded_tokens: float
) -> tuple[float, float, float, float]:
    return 1.0, uncached_tokens, uncached_tokens * (cached_tokens + uncached_tokens / 2), loaded_tokens


def _seconds_of_shape(cost_shape: Sequence[float], uncached_tokens: float, cached_tokens: float) -> float:
    return _dot_product(cost_shape, _cost_terms(uncached_tokens, cached_tokens, 0.0))


def _dot_product(cost_shape: Sequence[float], cost_terms: Sequence[float]) -> float:
    return sum(factor * term for factor, term in zip(cost_shape, cost_terms, strict=True))


def _least_squares(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> tuple[float, ...] | None:
    """Return the best solution without negative numbers, in which some may be 0. None: there is none."""
    size = len(vector)
    # A term that is 0 in all samples has no coefficient.
    known = [place for place in range(size) if matrix[place][place] > 0]
    best, least = None, math.inf
    for count in range(len(known), 0, -1):
        for chosen in combinations(known, count):
            part = _solve_linear_system(
                [[matrix[row][column] for column in chosen] for row in chosen], [vector[row] for row in chosen]
            )
            if part is None or min(part) < 0:
                continue
            whole = [0.0] * size
            for place, value in zip(chosen, part, strict=True):
                whole[place] = value
            # The sum of squares without the part that is equal for all solutions.
            squares = sum(
                whole[row] * (sum(matrix[row][column] * whole[column] for column in range(size)) - 2 * vector[row])
                for row in range(size)
            )
            if squares < least:
                best, least = tuple(whole), squares
        if best is not None and count == len(known):
            return best
    return best


def _solve_linear_system(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve by elimination. Rows are scaled, since terms differ by orders of magnitude. None: it is singular."""
    size = len(vector)
    scales = [math.sqrt(matrix[place][place]) or 1.0 for place in range(size)]
    rows = [
        [matrix[row][column] / scales[row] / scales[column] for column in range(size)] + [vector[row] / scales[row]]
        for row in range(size)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        if abs(rows[pivot][place]) < 1e-9:
            return None
        rows[place], rows[pivot] = rows[pivot], rows[place]
        for row in range(size):
            if row != place:
                factor = rows[row][place] / rows[place][place]
                rows[row] = [value - factor * other for value, other in zip(rows[row], rows[place], strict=True)]
    return [rows[place][size] / rows[place][place] / scales[place] for place in range(size)]


# Minimum length of prompts that are looked up in caches. Shorter ones take hardly longer without a cache.
MIN_CACHED_PROMPT_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class PromptCosts:
    """Prompt of a request that waits or is being placed, with its costs on the prefillers."""

    pick_request: PickRequest
    prefix_keys: Sequence[int]
    piece_ends: Sequence[float]
    """Number of tokens up to the end of each piece."""
    prompt_tokens: int
    """Length of the prompt."""
    costs_by_prefiller: dict[Hashable, tuple[int, int, float]] = field(default_factory=dict)
    """Costs by Prefiller: its version at that time, the number of cached pieces, and the prefill time in seconds."""


def make_prompt_costs(request: PickRequest) -> PromptCosts:
    """Return the prompt of a request, without costs. Short prompts have no keys."""
    subject = request.request_subject
    tokens = 0 if subject is None else subject.prompt_tokens
    if subject is None or tokens < MIN_CACHED_PROMPT_TOKENS or not (prefix := subject.prefix_keys).keys:
        return PromptCosts(request, (), (), tokens)
    per_byte = tokens / prefix.sizes[-1]
    return PromptCosts(request, prefix.keys, list(map(per_byte.__mul__, prefix.sizes)), tokens)


@dataclass(slots=True, eq=False)
class SentPrompt(LeaseTracker):
    """Prompt in flight.

    `odometer_readings` and `odometer_at_send` are the arguments that `CachedPrefixes.learn_from_report` needs at its
    end.
    """

    on_end: Callable[[SentPrompt, bool], None]
    """Called when the prompt has been computed (True) or has failed (False)."""
    compute_charge: int
    kv_charge: int
    prompt_costs: PromptCosts
    sent_at: float
    predicted_seconds: float
    """Predicted prefill time."""
    predicted_cached_tokens: float
    """Expected cached tokens of the prompt."""
    predicted_loaded_tokens: float
    """Expected cached tokens that the engine loads from a tier below the device."""
    odometer_readings: Sequence[float | None]
    odometer_at_send: float
    prompts_ahead: int
    """Number of prompts in flight when it was sent."""
    predicted_wait_seconds: float
    """Predicted wait for these, in seconds."""
    policy_prediction: PickPrediction | None = None
    reported_usage: tuple[int, int] | None = None
    """Tokens of the prompt and cached tokens among these, as reported. None: they are not reported."""
    resident_tokens: float = 0.0
    """Tokens that are in the cache if its session kept its prefix; see WorkingSets. 0: unknown."""

    def record_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        if cached_tokens is not None:
            self.reported_usage = prompt_tokens, cached_tokens

    def record_end(self, is_served: bool, answer_tokens: int | None) -> None:
        self.on_end(self, is_served)


class PrefillSample(NamedTuple):
    """Observation of a prompt that has been computed."""

    uncached_tokens: float
    """Tokens that were not cached."""
    cached_tokens: float
    """Tokens that were cached."""
    prefill_seconds: float
    """Time since the previous answer, or since it was sent if that was later."""
    seconds_since_send: float
    """Time since it was sent."""
    prompts_ahead: float
    """Number of prompts in flight when it was sent."""
    seconds_behind_previous: float
    """Not 0: two or more prompts were in flight when it was sent, so it could be batched with the second one."""
    overtaken_prompts: float
    """Not 0: a prompt that was sent earlier is still in flight."""
    fill_share: float = 0.0
    """Work in flight at its end, including this prompt, as a multiple of the prefiller's capacity. That is prompts per
    rank, or tokens per step."""
    loaded_tokens: float = 0.0
    """Cached tokens that were loaded from a tier below the device."""

    @property
    def attention_factor(self) -> float:
        """Factor of its attention costs."""
        return self.uncached_tokens * (self.cached_tokens + self.uncached_tokens / 2)


class PrefillStep(NamedTuple):
    """Prompts that were answered at the same time, because they were computed in one step."""

    uncached_tokens: float
    """Sum of the uncached tokens."""
    attention_factor: float
    """Sum of the factors of attention costs."""
    step_seconds: float
    """Duration of the step."""
    began_at: float
    """Start of the step on the clock."""
    largest_prompt_tokens: float
    """Uncached tokens of its largest prompt."""
    loaded_tokens: float = 0.0
    """Sum of the cached tokens that were loaded from a tier below the device."""

    @classmethod
    def of_sample(cls, sample: PrefillSample, step_seconds: float, ended_at: float) -> PrefillStep:
        """Return a step with one prompt, which took this time and ended at this time."""
        return cls(
            sample.uncached_tokens,
            sample.attention_factor,
            step_seconds,
            began_at=ended_at - step_seconds,
            largest_prompt_tokens=sample.uncached_tokens,
            loaded_tokens=sample.loaded_tokens,
        )

    def copy_with_prompt(self, sample: PrefillSample) -> PrefillStep:
        """Return the step with another prompt, which was answered directly after the others."""
        uncached, attention = (
            self.uncached_tokens + sample.uncached_tokens,
            self.attention_factor + sample.attention_factor,
        )
        largest = max(self.largest_prompt_tokens, sample.uncached_tokens)
        seconds, loaded = self.step_seconds + sample.prefill_seconds, self.loaded_tokens + sample.loaded_tokens
        return PrefillStep(uncached, attention, seconds, self.began_at, largest, loaded)

    @property
    def equivalent_cached_tokens(self) -> float:
        """Number of cached tokens before one prompt with the same cost. It may be negative."""
        return self.attention_factor / self.uncached_tokens - self.uncached_tokens / 2


class RecordKind(IntEnum):
    """Kind of a record."""

    SENT = 0
    """A prompt was sent. Keys and ends: those of its pieces. Numbers: the time, the predicted seconds, and the expected
    uncached tokens."""
    ENDED = 1
    """A prompt has ended. Keys: those that are not cached. Numbers: the time, the correction of the odometer, the
    current trust, the greatest age of a found prefix, the least age of an evicted one (NO_AGE: none), and whether the
    prompt was computed."""
    COUNTED = 2
    """The engine has reported its cache. Numbers: those of a CacheCount. It is not sent to other gateways, which
    subscribe to the engine themselves."""
    SAMPLED = 3
    """A sample of prefill times. It is written once the event loop is known to have been on time. Numbers: the time of
    the end, and a PrefillSample."""
    SESSION = 4
    """A session has changed. Keys and numbers: see SessionChange."""
    LIMIT = 5
    """The limit of a working set has changed. Numbers: those of a LimitChange."""
    WAITING = 6
    """Turns of sessions wait. Numbers: those of WaitingTurns."""


class InvalidRecord(ValueError):
    """The data is not a record of this version."""


class JournalRecord(NamedTuple):
    """Record of the journal.

    `numbers[0]` is a time of the reader's clock, except in a COUNTED record. `piece_ends` are tokens; a SENT record has
    one for each key, and the others have none.
    """

    record_kind: int
    slot: int
    prefix_keys: Sequence[int]
    piece_ends: Sequence[float]
    record_numbers: Sequence[float]


NO_AGE: Final = -1.0

# Kind, slot of the prefiller, and the counts of keys, ends and numbers.
_HEAD: Final = struct.Struct("<IIIII")
_KIND_AND_SLOT: Final = struct.Struct("<II")
_NUMBERS: Final = {
    RecordKind.SENT: 3,
    RecordKind.ENDED: 6,
    RecordKind.COUNTED: 5,
    RecordKind.SAMPLED: 10,
    RecordKind.SESSION: 11,
    RecordKind.LIMIT: 5,
    RecordKind.WAITING: 3,
}
_KEY_BYTES: Final = 8
_END_BYTES: Final = 4


@lru_cache(maxsize=16)
def _doubles_struct(count: int) -> struct.Struct:
    return struct.Struct(f"={count}d")


def pack_record(journal_record: JournalRecord) -> bytes:
    """Return a record as bytes. Ends are rounded to single precision."""
    kind, slot, keys, ends, numbers = journal_record
    data = _HEAD.pack(kind, slot, len(keys), len(ends), len(numbers))
    if keys:  # short prompts have none
        data += array("Q", keys).tobytes() + array("f", ends).tobytes()
    return data + _doubles_struct(len(numbers)).pack(*numbers)


def unpack_record(packed_data: bytes) -> JournalRecord:
    """Return the record in packed data. Raises InvalidRecord."""
    try:
        kind, slot, key_count, end_count, number_count = _HEAD.unpack_from(packed_data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    ends_at = _HEAD.size + _KEY_BYTES * key_count
    numbers_at = ends_at + _END_BYTES * end_count
    if number_count != _NUMBERS.get(kind) or end_count != (kind == RecordKind.SENT) * key_count:
        raise InvalidRecord("counts of keys, ends and numbers do not match the kind of the record")
    written = _doubles_struct(number_count)
    if len(packed_data) != numbers_at + written.size:
        raise InvalidRecord("length of the data does not match its counts")
    keys: Sequence[int] = ()
    ends: Sequence[float] = ()
    if key_count:
        keys, ends = array("Q", packed_data[_HEAD.size : ends_at]), array("f", packed_data[ends_at:numbers_at])
    return JournalRecord(kind, slot, keys, ends, written.unpack_from(packed_data, numbers_at))


def kind_and_slot(packed_data: bytes) -> tuple[int, int]:
    """Return the kind and the slot of a packed record without unpacking the rest. Raises InvalidRecord."""
    try:
        kind, slot = _KIND_AND_SLOT.unpack_from(packed_data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    return kind, slot


def translate_record(journal_record: JournalRecord, own_slot: int, clock_offset_seconds: float) -> JournalRecord:
    """Return another gateway's record with this gateway's slot and clock.

    Args:
        journal_record: The record.
        own_slot: Slot of the prefiller in this gateway.
        clock_offset_seconds: Added to the time.

    Raises:
        InvalidRecord: It has numbers that are not finite, or is not meant for other gateways.
    """
    if journal_record.record_kind == RecordKind.COUNTED:
        raise InvalidRecord("cache counts are not accepted from other gateways")
    if not all(map(isfinite, journal_record.record_numbers)) or not all(map(isfinite, journal_record.piece_ends)):
        raise InvalidRecord("numbers are not finite")
    at, *others = journal_record.record_numbers
    return journal_record._replace(slot=own_slot, record_numbers=[at + clock_offset_seconds, *others])


def drop_record_keys(journal_record: JournalRecord) -> JournalRecord:
    """Return the record without its keys and ends, which are most of its bytes.

    It still teaches prefill times, but not the contents of caches.
    """
    return journal_record._replace(prefix_keys=(), piece_ends=())
