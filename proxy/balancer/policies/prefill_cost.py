"""How long prefills take, learned from those that have ended: S(u, c) = t0 + a·u + b·u·(c + u/2) seconds.

u tokens are computed behind c cached ones: each costs the same but for its attention, which grows with what is before
it. The three numbers are of all backends of a role, by least squares of relative errors in which what is older counts
less; how fast each backend is beside the others is learned by itself.
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
"""What one token of `Load.compute` stands for: vllm-ascend's example estimates a prefill as 0.0345 ms a token and
120 ms, which are 3,480 tokens."""
_PRIOR: Final[tuple[float, ...]] = (0.12, SECONDS_PER_LOAD, 0.0)
# The prior counts as such a part of a sample at each of these lengths, once it is brought to the level of the samples:
# what was only seen of short prompts must not say that long ones cost nothing.
_PRIOR_TOKENS: Final = (500, 5_000, 50_000)
_PRIOR_WEIGHT: Final = 0.3
_LEVEL_STEP: Final = 0.02
# Each new sample makes the older ones count so much less.
_FORGETTING: Final = 0.998
_MOST_WEIGHT: Final = 1e6
_SAMPLES_PER_FIT: Final = 16
_SPEED_STEP: Final = 0.05
_MOST_SPEED: Final = math.log(4)
# A sample this far off is held to be as far off as this: one that met a garbage collection must not teach anything.
_MOST_ERROR: Final = math.log(3)
_TRUSTED_SAMPLES: Final = 16
# Shorter ones than this part of their mean count as if they were so long: `misfit` goes by relative errors.
_LEAST_SHARE: Final = 0.05


class PrefillCost:
    """Of one role, as one worker knows it."""

    def __init__(self) -> None:
        self.shape: tuple[float, ...] = _PRIOR
        """t0, a and b, in seconds."""
        self.samples = 0
        self._slowness: dict[Hashable, float] = {}  # logarithms
        self._factors: dict[Hashable, float] = {}  # and what these are of
        # The normal equations, of samples that count by the inverse of their squares.
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._vector = [0.0] * 3
        self._weight = 1.0  # of the next sample: instead of all older ones' becoming less
        self._level = 0.0  # the logarithm of how much longer prefills take than by the prior

    def seconds(self, uncached: float, cached: float) -> float:
        """What such a prompt probably takes a backend that is as fast as most."""
        first, token, attention = self.shape
        return first + uncached * (token + attention * (cached + uncached / 2))

    @property
    def overhead(self) -> float:
        """Seconds that stand for a prompt beside those for its tokens where these are only counted, as vllm-ascend's
        example does: several engines share prompts out by their number, and not by what they take.
        """
        return _PRIOR[0] * math.exp(self._level)

    def slowness(self, backend: Hashable) -> float:
        """How many times as long as the most it takes a backend."""
        return self._factors.get(backend, 1.0)

    def learn(self, backend: Hashable, uncached: float, cached: float, seconds: float) -> None:
        """It has taken so long, and not waited for anything else."""
        if seconds <= 0 or uncached <= 0:
            return
        slowness = self._slowness.get(backend, 0.0)
        error = math.log(seconds / self.seconds(uncached, cached)) - slowness
        if self.samples >= _TRUSTED_SAMPLES:
            clipped = max(-_MOST_ERROR, min(_MOST_ERROR, error))
            seconds *= math.exp(clipped - error)
            error = clipped
            slower = max(-_MOST_SPEED, min(_MOST_SPEED, slowness + _SPEED_STEP * error))
            self._slowness[backend], self._factors[backend] = slower, math.exp(slower)
        self.samples += 1
        self._weight /= _FORGETTING
        seconds /= math.exp(slowness)
        # By relative errors, but one that seems to have taken no time does not count for all others.
        scale = max(seconds, _seconds(self.shape, uncached, cached))
        _add(self._matrix, self._vector, _terms(uncached, cached), seconds, self._weight / scale**2)
        above = math.log(seconds / _seconds(_PRIOR, uncached, cached))
        self._level += max(_LEVEL_STEP, 1 / self.samples) * (above - self._level)
        if self.samples < _TRUSTED_SAMPLES or self.samples % _SAMPLES_PER_FIT == 0:
            self._fit()

    def forget(self, backend: Hashable) -> None:
        """It has left."""
        self._slowness.pop(backend, None)
        self._factors.pop(backend, None)

    def _fit(self) -> None:
        if self._weight > _MOST_WEIGHT:
            self._matrix = [[value / self._weight for value in row] for row in self._matrix]
            self._vector = [value / self._weight for value in self._vector]
            self._weight = 1.0
        matrix, vector = [list(row) for row in self._matrix], list(self._vector)
        for tokens in _PRIOR_TOKENS:
            seconds = _seconds(_PRIOR, tokens, 0) * math.exp(self._level)
            _add(matrix, vector, _terms(tokens, 0), seconds, self._weight * _PRIOR_WEIGHT / seconds**2)
        self.shape = _least_squares(matrix, vector) or self.shape


def misfit(samples: Sequence[tuple[float, float, float]]) -> float:
    """By how much costs are off that explain samples best: the mean of the logarithms, each without its sign. Of each
    sample the tokens that were computed, what their attention grows with, and the seconds.
    """
    matrix, vector = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    least = _LEAST_SHARE * sum(seconds for *_, seconds in samples) / len(samples)
    if least <= 0:  # all were answered at the same time
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
    """One more equation, which counts so much."""
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
    """The solution with no negative number: the best one of those in which some are 0. None: there is none."""
    best, least = None, math.inf
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            part = _solved(
                [[matrix[row][column] for column in chosen] for row in chosen], [vector[row] for row in chosen]
            )
            if part is None or min(part) < 0:
                continue
            whole = [0.0] * 3
            for place, value in zip(chosen, part, strict=True):
                whole[place] = value
            # The sum of squares but for what is the same for all.
            squares = sum(
                whole[row] * (sum(matrix[row][column] * whole[column] for column in range(3)) - 2 * vector[row])
                for row in range(3)
            )
            if squares < least:
                best, least = tuple(whole), squares
        if best is not None and count == 3:
            return best
    return best


def _solved(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """By elimination, with the rows scaled: the terms differ by many orders of magnitude. None: it is singular."""
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


# Shorter prompts are not looked up: to compute them anew takes hardly longer.
LEAST_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class PromptCosts:
    """A request that is chosen for, or waits to be, and what it takes each backend."""

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Tokens up to the end of each piece."""
    tokens: int
    """Of the prompt."""
    by_prefiller: dict[Hashable, tuple[int, int, float]] = field(default_factory=dict)
    """By Prefiller: the version of what is known of it, the pieces that are cached there, and seconds."""


def prompt_costs(request: PickRequest) -> PromptCosts:
    """What is to be known of a request."""
    subject = request.subject
    tokens = 0 if subject is None else subject.prompt_tokens
    if subject is None or tokens < LEAST_TOKENS or not (prefix := subject.prefix_keys).keys:
        return PromptCosts(request, (), (), tokens)
    per_byte = tokens / prefix.sizes[-1]
    return PromptCosts(request, prefix.keys, list(map(per_byte.__mul__, prefix.sizes)), tokens)


@dataclass(slots=True, eq=False)
class Sent(Tracker):
    """A prompt under way. `known` and `odometer` are what CachedPrefixes wants to know of it again."""

    on_end: Callable[[Sent, bool], None]
    """Called when it has been computed, or will not be."""
    compute: int
    kv: int
    prompt: PromptCosts
    at: float
    seconds: float
    """Predicted."""
    cached: float
    """Of the prompt's tokens, those that are expected to be cached."""
    known: Sequence[float | None]
    odometer: float
    ahead: int
    """Prompts that were there before it."""
    wait: float
    """Predicted, for these."""
    prediction: Prediction | None = None
    answer: tuple[int, int] | None = None
    """Tokens of the prompt, and those of them that were cached, as the backend told."""

    def note_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """See Tracker."""
        if cached_tokens is not None:
            self.answer = prompt_tokens, cached_tokens

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        """An answer teaches how long prompts take and what is cached."""
        self.on_end(self, served)


class PrefillSample(NamedTuple):
    """A prompt that has been computed: tokens that were not cached and that were, and how long it took."""

    uncached: float
    cached: float
    seconds: float
    """Since the answer before it, or since it was sent if that was later."""
    whole: float
    """Since it was sent."""
    ahead: float
    """Prompts that were there when it was sent."""
    was_behind: float
    """Not 0: it came while there were two others at least, so that it could be computed together with the second."""
    overtook: float
    """Not 0: one that was sent before it is still under way."""
    fill: float = 0.0
    """How many times what the prefiller computes at a time was there when it ended, with this one: prompts for each
    rank, or tokens of a step."""

    @property
    def attention(self) -> float:
        """What its attention costs grow with."""
        return self.uncached * (self.cached + self.uncached / 2)


class Step(NamedTuple):
    """Prompts that were answered at once: they were computed together, in the time that passed before the first."""

    uncached: float
    attention: float
    seconds: float
    began: float
    """By the clock."""
    largest: float
    """The uncached tokens of its largest prompt."""

    def and_another(self, sample: PrefillSample) -> Step:
        """Return the step with a further prompt, which was answered right behind the others."""
        uncached, attention = self.uncached + sample.uncached, self.attention + sample.attention
        largest = max(self.largest, sample.uncached)
        return Step(uncached, attention, self.seconds + sample.seconds, self.began, largest)

    @property
    def cached(self) -> float:
        """Behind so many cached tokens one prompt would take as long; less than 0, as several attend to less."""
        return self.attention / self.uncached - self.uncached / 2


class RecordKind(IntEnum):
    """Of a record."""

    SENT = 0
    """A prompt with these keys goes there. Numbers: when, the predicted seconds, and the tokens that are not expected
    to be cached. The pieces that the keys name have these ends."""
    ENDED = 1
    """A prompt has ended, and these keys are not cached. Numbers: the time, how far the odometer has to be moved, the
    trust by now, the greatest age of a prefix that was found, the least age of one that was evicted (NO_AGE: none), and
    whether it was computed."""
    COUNTED = 2
    """The engine has told of its cache. Numbers: those of a CacheCount. Not for other gateways, which ask it, too."""
    SAMPLED = 3
    """A prompt that has ended teaches what prompts take. It is written once it is known that the event loop was not
    late meanwhile. Numbers: when it ended, and a Sample."""


class InvalidRecord(ValueError):
    """It is no record of this version."""


class Record(NamedTuple):
    """`numbers[0]` is seconds of the reader's clock, but in a record COUNTED. `ends` are tokens, in a record SENT one
    for each key.
    """

    kind: int
    slot: int
    keys: Sequence[int]
    ends: Sequence[float]
    numbers: Sequence[float]


NO_AGE: Final = -1.0

# Its kind, the prefiller's slot, and how many keys, ends and other numbers follow.
_HEAD: Final = struct.Struct("<IIIII")
_KIND_AND_SLOT: Final = struct.Struct("<II")
_NUMBERS: Final = {RecordKind.SENT: 3, RecordKind.ENDED: 6, RecordKind.COUNTED: 4, RecordKind.SAMPLED: 9}
_KEY_BYTES: Final = 8
_END_BYTES: Final = 4


@lru_cache(maxsize=16)
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"={count}d")


def packed(record: Record) -> bytes:
    """As bytes. Ends are rounded to single precision."""
    kind, slot, keys, ends, numbers = record
    data = _HEAD.pack(kind, slot, len(keys), len(ends), len(numbers))
    if keys:  # short prompts have none
        data += array("Q", keys).tobytes() + array("f", ends).tobytes()
    return data + _doubles(len(numbers)).pack(*numbers)


def unpacked(data: bytes) -> Record:
    """What was packed. Raises InvalidRecord."""
    try:
        kind, slot, key_count, end_count, number_count = _HEAD.unpack_from(data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    ends_at = _HEAD.size + _KEY_BYTES * key_count
    numbers_at = ends_at + _END_BYTES * end_count
    if number_count != _NUMBERS.get(kind) or end_count != (kind == RecordKind.SENT) * key_count:
        raise InvalidRecord("it has not the parts of a record")
    written = _doubles(number_count)
    if len(data) != numbers_at + written.size:
        raise InvalidRecord("it has not the length of a record")
    keys: Sequence[int] = ()
    ends: Sequence[float] = ()
    if key_count:
        keys, ends = array("Q", data[_HEAD.size : ends_at]), array("f", data[ends_at:numbers_at])
    return Record(kind, slot, keys, ends, written.unpack_from(data, numbers_at))


def kind_and_slot(data: bytes) -> tuple[int, int]:
    """The kind of a packed record and the prefiller's slot, read without unpacking the rest, as most records are for
    others. Raises InvalidRecord if the data is too short.
    """
    try:
        kind, slot = _KIND_AND_SLOT.unpack_from(data)
    except struct.error as problem:
        raise InvalidRecord(str(problem)) from None
    return kind, slot


def translated(record: Record, slot: int, seconds: float) -> Record:
    """The same of another gateway, for whom the prefiller has this slot, and whose clock is so much ahead. Raises
    InvalidRecord for numbers that are none.
    """
    if record.kind == RecordKind.COUNTED:
        raise InvalidRecord("it is not for other gateways")
    if not all(map(isfinite, record.numbers)) or not all(map(isfinite, record.ends)):
        raise InvalidRecord("it has numbers that are none")
    at, *others = record.numbers
    return record._replace(slot=slot, numbers=[at + seconds, *others])


def without_keys(record: Record) -> Record:
    """The record without its prefix keys and ends, which are most of its bytes: it still teaches how long prompts take,
    but not what is cached.
    """
    return record._replace(keys=(), ends=())
