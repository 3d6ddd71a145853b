"""Which prefixes of prompts a prefiller probably has in its cache: what was sent there, and what came after it.

Engines evict the least recently used blocks, of one prompt the tail before the head. So each backend has an odometer,
the tokens that it has had to compute, and each prefix the reading at which it was last used: it is gone when the
odometer has gone on by the capacity of the cache. The capacity is learned: what an answer says was cached, or was not,
tells how far back the cache goes. Only keys are kept, and a bounded number of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import gcd
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.policies.cache_count import CacheCount

# Until it is learned. Too much costs less than too little: what is wrongly expected is corrected by the next answer.
_FIRST_CAPACITY: Final = 1_000_000
_LEAST_CAPACITY, _MOST_CAPACITY = 32_768, 64_000_000
_CAPACITY_STEP: Final = 0.1
# Of one backend: twice as many, at some 110 bytes each.
MAX_KEYS: Final = 16_384

# A backend that does not say what was cached: its cache is believed in, but not as if it did.
_UNTOLD_TRUST: Final = 0.7
_TRUST_STEP: Final = 0.2
# Engines cache whole blocks, of so many tokens at most: of the last piece a part is always missing.
_BLOCK_TOKENS: Final = 256
# No engine's blocks are larger: what told numbers have in common beyond that they have by chance.
_MOST_BLOCK_TOKENS: Final = 512


class CachedPrefixes:
    """Those of one backend. Positions are of pieces of a prompt, in order; `ends` are tokens up to their ends."""

    __slots__ = ("capacity", "odometer", "trust", "_block", "_count", "_uncounted", "_young", "_old", "_turned")

    def __init__(self) -> None:
        self.capacity = float(_FIRST_CAPACITY)
        """Tokens that fit into its cache."""
        self.odometer = 0.0
        """Tokens that it has computed."""
        self.trust = _UNTOLD_TRUST
        """How much of what was expected to be cached really was, lately."""
        self._count: CacheCount | None = None  # the last one, of an engine that tells
        self._uncounted = 0.0  # what was on the odometer before
        self._block = 0  # the greatest common divisor of the cached tokens that were told
        # The readings of keys in two generations. What was used since the odometer stood at `_turned` is young. What
        # is old is remembered for one more generation, or it could not be learned that the cache is larger.
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        self._turned = 0.0

    def __len__(self) -> int:
        """Keys that are remembered, of which some may count twice."""
        return len(self._young) + len(self._old)

    def hit(self, keys: Sequence[int]) -> int:
        """How many leading pieces of a prompt are probably cached. `keys`: of its pieces, in order."""
        if not keys or self._is_gone(keys[0]):
            return 0
        if not self._is_gone(keys[-1]):
            return len(keys)
        return bisect_left(keys, True, key=self._is_gone)

    def _is_gone(self, key: int) -> bool:
        reading = self._young.get(key)
        if reading is None:
            reading = self._old.get(key)
            if reading is None:
                return True
        return reading < self.odometer - self.capacity

    def found(self, ends: Sequence[float], hit: int, tokens: int) -> float:
        """Tokens that it finds of a prompt of so many, of which so many pieces are cached: whole blocks, and never all,
        as the last token has to be computed for the first one of the answer.
        """
        if not hit:
            return 0.0
        cached = min(ends[hit - 1], tokens - 1.0)
        return cached - cached % self._block if 0 < self._block <= _MOST_BLOCK_TOKENS else cached

    def tell(self, cached_tokens: int) -> None:
        """An answer says how many tokens were cached."""
        if self._block != 1 and cached_tokens:
            self._block = gcd(self._block, cached_tokens)

    def use(self, keys: Sequence[int], ends: Sequence[float], computed: float) -> list[float | None]:
        """A prompt goes there, of which so many tokens will have to be computed. The readings of its pieces until now;
        None: they are new.
        """
        known: list[float | None] = list(map(self._young.get, keys))
        if None in known and self._old:
            old = self._old.get
            known = [old(key) if reading is None else reading for key, reading in zip(keys, known, strict=True)]
        odometer = self.odometer = self.odometer + computed
        self._young.update(zip(keys, map(odometer.__sub__, ends), strict=True))
        if len(self._young) > MAX_KEYS or odometer - self._turned > self.capacity:
            self._young, self._old, self._turned = {}, self._young, odometer
        return known

    def drop(self, keys: Sequence[int]) -> None:
        """Forget these pieces: the request with which they were sent has failed, so they are not cached."""
        for key in keys:
            self._young.pop(key, None)
            self._old.pop(key, None)

    def clear(self) -> None:
        """Its cache is empty."""
        self._young, self._old = {}, {}

    def learn(
        self, known: Sequence[float | None], odometer: float, ends: Sequence[float], expected: float, told: float
    ) -> None:
        """What an answer says was cached, `told` tokens where so many had been `expected`. `known`: the readings of the
        prompt's pieces, which end at the tokens of `ends`, when it was sent, and then the odometer's.
        """
        if expected:
            self.trust += _TRUST_STEP * (min(1.0, told / expected) - self.trust)
        pieces = bisect_right(ends, told + _BLOCK_TOKENS) if told else 0
        kept = odometer - min((reading for reading in known[:pieces] if reading is not None), default=odometer)
        if self.knows_capacity:
            return
        if kept > self.capacity:
            self.capacity += _CAPACITY_STEP * (kept - self.capacity)
        if told:
            gone = next((odometer - reading for reading in known[pieces:] if reading is not None), None)
            if gone is not None and gone < self.capacity:
                self.capacity -= _CAPACITY_STEP * (self.capacity - gone)
        self.capacity = min(max(self.capacity, _LEAST_CAPACITY), _MOST_CAPACITY)

    @property
    def knows_capacity(self) -> bool:
        """The engine's own evictions tell it."""
        return self._count is not None and self._count.evicts > 0

    def follow(self, count: CacheCount, computing: float) -> bool:
        """What the engine's KV events tell: how far its cache reaches back, and what it has computed, for whomever.
        `computing`: tokens on the odometer that are not there yet. Returns whether the cache was emptied since the last
        time.
        """
        before, self._count = self._count, count
        if before is None or count.stored < before.stored:
            self._uncounted = self.odometer - computing - count.stored
        self.odometer = self._uncounted + count.stored + computing
        self.capacity = count.reach if count.evicts else max(self.capacity, count.reach)
        return before is not None and count.cleared > before.cleared
