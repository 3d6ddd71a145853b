"""Which prefixes of prompts each prefiller probably has in its cache: what was sent where, and what came after it.

Engines evict the least recently used blocks, of one prompt the tail before the head. So each backend has an odometer,
the tokens that it has had to compute, and each prefix the reading at which it was last used: it is gone when the
odometer has gone on by the capacity of the cache. The capacity is learned: what an answer says was cached, or was not,
tells how far back the cache goes. Only keys are kept, and a bounded number of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Until it is learned. Too much costs less than too little: what is wrongly expected is corrected by the next answer.
_FIRST_CAPACITY: Final = 1_000_000
_LEAST_CAPACITY, _MOST_CAPACITY = 32_768, 64_000_000
_CAPACITY_STEP: Final = 0.1
# Beyond the capacity prefixes are remembered for so much longer, or it could not be learned that it is larger.
_MEMORY: Final = 1.5
# Of one backend, about 10 MB.
MAX_KEYS: Final = 65_536

# A backend that does not say what was cached: its cache is believed in, but not as if it did.
_UNTOLD_TRUST: Final = 0.7
_TRUST_STEP: Final = 0.2
# Engines cache whole blocks, of so many tokens at most: of the last piece a part is always missing.
_BLOCK_TOKENS: Final = 256


class CachedPrefixes:
    """Those of one backend. Positions are of pieces of a prompt, in order; `ends` are tokens up to their ends."""

    def __init__(self) -> None:
        self.capacity = float(_FIRST_CAPACITY)
        """Tokens that fit into its cache."""
        self.odometer = 0.0
        """Tokens that it has computed."""
        self.trust = _UNTOLD_TRUST
        """How much of what was expected to be cached really was, lately."""
        self._readings: OrderedDict[int, float] = OrderedDict()  # those used last come last

    def __len__(self) -> int:
        return len(self._readings)

    def hit(self, keys: Sequence[int]) -> int:
        """How many pieces are probably cached, from the first one on."""
        readings = self._readings
        oldest = self.odometer - self.capacity
        get, gone = readings.get, oldest - 1
        if not keys or get(keys[0], gone) < oldest:
            return 0
        if get(keys[-1], gone) >= oldest:
            return len(keys)
        low, high = 0, len(keys) - 1  # the piece at `low` is there, that at `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            if get(keys[middle], gone) >= oldest:
                low = middle
            else:
                high = middle
        return high

    def use(self, keys: Sequence[int], ends: Sequence[float], computed: float) -> list[int]:
        """A prompt goes there, of which so many tokens will have to be computed. The keys that are new."""
        self.odometer += computed
        odometer, readings = self.odometer, self._readings
        new = []
        for position in range(len(keys) - 1, -1, -1):
            key = keys[position]
            if key in readings:
                readings.move_to_end(key)
            else:
                new.append(key)
            readings[key] = odometer - ends[position]
        self._forget_old()
        return new

    def drop(self, keys: Sequence[int]) -> None:
        """Nothing has come of these."""
        for key in keys:
            self._readings.pop(key, None)

    def clear(self) -> None:
        """Its cache is empty."""
        self._readings.clear()

    def ages(self, keys: Sequence[int]) -> list[float | None]:
        """How far back each piece was last used; None: it is not known to have been. For `learn`."""
        odometer, get = self.odometer, self._readings.get
        return [None if (reading := get(key)) is None else odometer - reading for key in keys]

    def learn(self, ages: Sequence[float | None], ends: Sequence[float], expected: float, told: float) -> None:
        """What an answer says was cached, `told` tokens where so many had been `expected`. `ages`: what was known of
        the prompt's pieces when it was sent, which end at the tokens of `ends`.
        """
        if expected:
            self.trust += _TRUST_STEP * (min(1.0, told / expected) - self.trust)
        pieces = bisect_right(ends, told + _BLOCK_TOKENS) if told else 0
        kept = max((age for age in ages[:pieces] if age is not None), default=0.0)
        if kept > self.capacity:
            self.capacity += _CAPACITY_STEP * (kept - self.capacity)
        gone = next((age for age in ages[pieces:] if age is not None), None)
        if told and gone is not None and gone < self.capacity:
            self.capacity -= _CAPACITY_STEP * (self.capacity - gone)
        self.capacity = min(max(self.capacity, _LEAST_CAPACITY), _MOST_CAPACITY)

    def _forget_old(self) -> None:
        readings = self._readings
        oldest = self.odometer - _MEMORY * self.capacity
        while readings:
            key, reading = next(iter(readings.items()))
            if reading >= oldest and len(readings) <= MAX_KEYS:
                return
            del readings[key]
