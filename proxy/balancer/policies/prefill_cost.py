"""Cost of prefills, learned from completed ones: S(u, c) = t0 + a·u + b·u·(c + u/2) seconds.

u tokens are computed behind c cached ones. Each costs the same except for its attention, which grows with the number of
tokens before it. The three coefficients apply to all backends of a role. They are a least-squares fit of relative
errors in which older samples count less. The relative speed of each backend is learned separately.

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

from proxy.balancer.pick import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from proxy.balancer.pick import PickRequest, Prediction

SECONDS_PER_LOAD: Final = 0.0345e-3
"""Seconds per token of `Load.compute_tokens`. vllm-ascend's example estimates a prefill as 0.0345 ms per token plus 120
ms, the time of 3,480 tokens."""
_PRIOR: Final[tuple[float, ...]] = (0.12, SECONDS_PER_LOAD, 0.0)
# The prior is scaled to the level of the samples and added at each of these lengths, with this weight of a sample.
# Otherwise samples of short prompts could imply that long prompts cost nothing.
_PRIOR_TOKENS: Final = (500, 5_000, 50_000)
_PRIOR_WEIGHT: Final = 0.3
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
# Lower bound of a sample's time in `misfit`, as a share of the mean. Relative errors of shorter times are too large.
_MIN_SHARE: Final = 0.05


class PrefillCost:
    """Prefill times of the backends of one role, as one worker has learned them."""

    def __init__(self) -> None:
        self.shape: tuple[float, ...] = _PRIOR
        """Coefficients t0, a and b, in seconds."""
        self.samples = 0
        """Number of samples that were learned."""
        self._slowness: dict[Hashable, float] = {}  # logarithms of `_factors`
        self._factors: dict[Hashable, float] = {}  # time relative to the other backends
        # Normal equations of samples, each weighted by the inverse of its square.
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._vector = [0.0] * 3
        self._weight = 1.0  # of the next sample; it grows instead of all older ones shrinking
        self._level = 0.0  # logarithm of the ratio of prefill times to the prior

    def seconds(self, uncached: float, cached: float) -> float:
        """Return the predicted time of a prefill on a backend of normal speed."""
        first, token, attention = self.shape
        return first + uncached * (token + attention * (cached + uncached / 2))

    @property
    def overhead(self) -> float:
        """Seconds that each prompt adds to the time of its tokens where loads are only counted, as in vllm-ascend.

        Several engines behind one address distribute prompts by their number and not by their cost.
        """
        return _PRIOR[0] * math.exp(self._level)

    def slowness(self, backend: Hashable) -> float:
        """Return the time that a backend takes relative to the others."""
        return self._factors.get(backend, 1.0)

    def learn(self, backend: Hashable, uncached: float, cached: float, seconds: float) -> None:
        """Learn the time of a prefill that did not wait for other prompts."""
        if seconds <= 0 or uncached <= 0:
            return
        slowness = self._slowness.get(backend, 0.0)
        error = math.log(seconds / self.seconds(uncached, cached)) - slowness
        if self.samples >= _TRUSTED_SAMPLES:
            clipped = max(-_MAX_ERROR, min(_MAX_ERROR, error))
            seconds *= math.exp(clipped - error)
            error = clipped
            slower = max(-_MAX_SPEED, min(_MAX_SPEED, slowness + _SPEED_STEP * error))
            self._slowness[backend], self._factors[backend] = slower, math.exp(slower)
        self.samples += 1
        self._weight /= _FORGETTING
        seconds /= math.exp(slowness)
        # Errors are relative, but a sample that seems to have taken no time must not outweigh all others.
        scale = max(seconds, _seconds(self.shape, uncached, cached))
        _add(self._matrix, self._vector, _terms(uncached, cached), seconds, self._weight / scale**2)
        above = math.log(seconds / _seconds(_PRIOR, uncached, cached))
        self._level += max(_LEVEL_STEP, 1 / self.samples) * (above - self._level)
        if self.samples < _TRUSTED_SAMPLES or self.samples % _SAMPLES_PER_FIT == 0:
            self._fit()

    def forget(self, backend: Hashable) -> None:
        """Forget the prefill speed of a backend that has left."""
        self._slowness.pop(backend, None)
        self._factors.pop(backend, None)

    def _fit(self) -> None:
        if self._weight > _MAX_WEIGHT:
            self._matrix = [[value / self._weight for value in row] for row in self._matrix]
            self._vector = [value / self._weight for value in self._vector]
            self._weight = 1.0
        matrix, vector = [list(row) for row in self._matrix], list(self._vector)
        for tokens in _PRIOR_TOKENS:
            seconds = _seconds(_PRIOR, tokens, 0) * math.exp(self._level)
            _add(matrix, vector, _terms(tokens, 0), seconds, self._weight * _PRIOR_WEIGHT / seconds**2)
        self.shape = _least_squares(matrix, vector) or self.shape


def misfit(samples: Sequence[tuple[float, float, float]]) -> float:
    """Return the mean absolute logarithmic error of the best fit of costs to samples.

    Each sample has its uncached tokens, the factor of its attention costs, and its time in seconds.
    """
    matrix, vector = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    least = _MIN_SHARE * sum(seconds for *_, seconds in samples) / len(samples)
    if least <= 0:  # all answers came at the same time
        return math.inf
    rows = [((1.0, uncached, attention), max(seconds, least)) for uncached, attention, seconds in samples]
    for terms, seconds in rows:
        _add(matrix, vector, terms, seconds, 1 / seconds**2)
    shape = _least_squares(matrix, vector)
    if shape is None:
        return math.inf
    errors = (abs(math.log(_product(shape, terms) / seconds)) for terms, seconds in rows)
    return sum(errors) / len(rows)


def _add(matrix: list[list[float]], vector: list[float], terms: Sequence[float], seconds: float, weight: float) -> None:
    """Add an equation with a weight."""
    for place, (row, term) in enumerate(zip(matrix, terms, strict=True)):
        for column, other in enumerate(terms):
            row[column] += weight * term * other
        vector[place] += weight * term * seconds


def _terms(uncached: float, cached: float) -> tuple[float, float, float]:
    return 1.0, uncached, uncached * (cached + uncached / 2)


def _seconds(shape: Sequence[float], uncached: float, cached: float) -> float:
    return _product(shape, _terms(uncached, cached))


def _product(shape: Sequence[float], terms: Sequence[float]) -> float:
    return sum(factor * term for factor, term in zip(shape, terms, strict=True))


def _least_squares(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> tuple[float, ...] | None:
    """Return the best solution without negative numbers, in which some may be 0. None: there is none."""
    best, least = None, math.inf
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            part = _solve_linear_system(
                [[matrix[row][column] for column in chosen] for row in chosen], [vector[row] for row in chosen]
            )
            if part is None or min(part) < 0:
                continue
            whole = [0.0] * 3
            for place, value in zip(chosen, part, strict=True):
                whole[place] = value
            # The sum of squares without the part that is equal for all solutions.
            squares = sum(
                whole[row] * (sum(matrix[row][column] * whole[column] for column in range(3)) - 2 * vector[row])
                for row in range(3)
            )
            if squares < least:
                best, least = tuple(whole), squares
        if best is not None and count == 3:
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

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Number of tokens up to the end of each piece."""
    tokens: int
    """Length of the prompt."""
    by_prefiller: dict[Hashable, tuple[int, int, float]] = field(default_factory=dict)
    """Costs by Prefiller: its version at that time, the number of cached pieces, and the prefill time in seconds."""


def prompt_costs(request: PickRequest) -> PromptCosts:
    """Return the prompt of a request, without costs. Short prompts have no keys."""
    subject = request.subject
    tokens = 0 if subject is None else subject.prompt_tokens
    if subject is None or tokens < MIN_CACHED_PROMPT_TOKENS or not (prefix := subject.prefix_keys).keys:
        return PromptCosts(request, (), (), tokens)
    per_byte = tokens / prefix.sizes[-1]
    return PromptCosts(request, prefix.keys, list(map(per_byte.__mul__, prefix.sizes)), tokens)


@dataclass(slots=True, eq=False)
class Sent(Tracker):
    """Prompt in flight. `readings` and `odometer` are the arguments that `CachedPrefixes.learn` needs at its end."""

    on_end: Callable[[Sent, bool], None]
    """Called when the prompt has been computed (True) or has failed (False)."""
    compute: int
    kv: int
    prompt: PromptCosts
    at: float
    seconds: float
    """Predicted prefill time."""
    cached: float
    """Expected cached tokens of the prompt."""
    readings: Sequence[float | None]
    odometer: float
    ahead: int
    """Number of prompts in flight when it was sent."""
    wait: float
    """Predicted wait for these, in seconds."""
    prediction: Prediction | None = None
    answer: tuple[int, int] | None = None
    """Tokens of the prompt and cached tokens among these, as reported. None: they are not reported."""
    resident_tokens: float = 0.0
    """Tokens that are in the cache if its session kept its prefix; see WorkingSets. 0: unknown."""

    def note_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        if cached_tokens is not None:
            self.answer = prompt_tokens, cached_tokens

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        self.on_end(self, served)


class PrefillSample(NamedTuple):
    """Observation of a prompt that has been computed."""

    uncached: float
    """Tokens that were not cached."""
    cached: float
    """Tokens that were cached."""
    seconds: float
    """Time since the previous answer, or since it was sent if that was later."""
    whole: float
    """Time since it was sent."""
    ahead: float
    """Number of prompts in flight when it was sent."""
    was_behind: float
    """Not 0: two or more prompts were in flight when it was sent, so it could be batched with the second one."""
    overtook: float
    """Not 0: a prompt that was sent earlier is still in flight."""
    fill: float = 0.0
    """Work in flight at its end, including this prompt, as a multiple of the prefiller's capacity. That is prompts per
    rank, or tokens per step."""

    @property
    def attention(self) -> float:
        """Factor of its attention costs."""
        return self.uncached * (self.cached + self.uncached / 2)


class Step(NamedTuple):
    """Prompts that were answered at the same time, because they were computed in one step."""

    uncached: float
    """Sum of the uncached tokens."""
    attention: float
    """Sum of the factors of attention costs."""
    seconds: float
    """Duration of the step."""
    began: float
    """Start of the step on the clock."""
    largest: float
    """Uncached tokens of its largest prompt."""

    def with_prompt(self, sample: PrefillSample) -> Step:
        """Return the step with another prompt, which was answered directly after the others."""
        uncached, attention = self.uncached + sample.uncached, self.attention + sample.attention
        largest = max(self.largest, sample.uncached)
        return Step(uncached, attention, self.seconds + sample.seconds, self.began, largest)

    @property
    def cached(self) -> float:
        """Number of cached tokens before one prompt with the same cost. It may be negative."""
        return self.attention / self.uncached - self.uncached / 2


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


class Record(NamedTuple):
    """Record of the journal.

    `numbers[0]` is a time of the reader's clock, except in a COUNTED record. `ends` are tokens; a SENT record has one
    for each key, and the others have none.
    """

    kind: int
    slot: int
    keys: Sequence[int]
    ends: Sequence[float]
    numbers: Sequence[float]


NO_AGE: Final = -1.0

# Kind, slot of the prefiller, and the counts of keys, ends and numbers.
_HEAD: Final = struct.Struct("<IIIII")
_KIND_AND_SLOT: Final = struct.Struct("<II")
_NUMBERS: Final = {
    RecordKind.SENT: 3,
    RecordKind.ENDED: 6,
    RecordKind.COUNTED: 4,
    RecordKind.SAMPLED: 9,
    RecordKind.SESSION: 11,
    RecordKind.LIMIT: 5,
    RecordKind.WAITING: 3,
}
_KEY_BYTES: Final = 8
_END_BYTES: Final = 4


@lru_cache(maxsize=16)
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"={count}d")


def packed(record: Record) -> bytes:
    """Return a record as bytes. Ends are rounded to single precision."""
    kind, slot, keys, ends, numbers = record
    data = _HEAD.pack(kind, slot, len(keys), len(ends), len(numbers))
    if keys:  # short prompts have none
        data += array("Q", keys).tobytes() + array("f", ends).tobytes()
    return data + _doubles(len(numbers)).pack(*numbers)


def unpacked(data: bytes) -> Record:
    """Return the record in packed data. Raises InvalidRecord."""
    try:
        kind, slot, key_count, end_count, number_count = _HEAD.unpack_from(data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    ends_at = _HEAD.size + _KEY_BYTES * key_count
    numbers_at = ends_at + _END_BYTES * end_count
    if number_count != _NUMBERS.get(kind) or end_count != (kind == RecordKind.SENT) * key_count:
        raise InvalidRecord("counts of keys, ends and numbers do not match the kind of the record")
    written = _doubles(number_count)
    if len(data) != numbers_at + written.size:
        raise InvalidRecord("length of the data does not match its counts")
    keys: Sequence[int] = ()
    ends: Sequence[float] = ()
    if key_count:
        keys, ends = array("Q", data[_HEAD.size : ends_at]), array("f", data[ends_at:numbers_at])
    return Record(kind, slot, keys, ends, written.unpack_from(data, numbers_at))


def kind_and_slot(data: bytes) -> tuple[int, int]:
    """Return the kind and the slot of a packed record without unpacking the rest. Raises InvalidRecord."""
    try:
        kind, slot = _KIND_AND_SLOT.unpack_from(data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    return kind, slot


def translated(record: Record, slot: int, seconds: float) -> Record:
    """Return another gateway's record with this gateway's slot and clock.

    Args:
        record: The record.
        slot: Slot of the prefiller in this gateway.
        seconds: Added to the time.

    Raises:
        InvalidRecord: It has numbers that are not finite, or is not meant for other gateways.
    """
    if record.kind == RecordKind.COUNTED:
        raise InvalidRecord("cache counts are not accepted from other gateways")
    if not all(map(isfinite, record.numbers)) or not all(map(isfinite, record.ends)):
        raise InvalidRecord("numbers are not finite")
    at, *others = record.numbers
    return record._replace(slot=slot, numbers=[at + seconds, *others])


def without_keys(record: Record) -> Record:
    """Return the record without its keys and ends, which are most of its bytes.

    It still teaches prefill times, but not the contents of caches.
    """
    return record._replace(keys=(), ends=())
