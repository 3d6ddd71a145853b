"""Prefixes of prompts that are probably in an engine's cache: those that were sent there and not evicted since.

Engines evict the least recently used blocks, and the tail of a prompt before its head. So each backend has an odometer,
which counts the tokens that it has computed, and each prefix has the reading of the odometer at its last use. The
difference is the prefix's age. A prefix is evicted when its age exceeds the capacity of the cache, which is learned
from answers; see CacheReach. A bounded number of keys is kept, and no text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from math import gcd, log, log2, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MIN_TOKENS: Final = 32_768
_BUCKETS_PER_DOUBLING: Final = 4
_BUCKETS: Final = 45
"""The last one begins at 64 million tokens."""
_BOUNDS: Final = tuple(_MIN_TOKENS * 2 ** (bucket / _BUCKETS_PER_DOUBLING) for bucket in range(_BUCKETS))
# Each observation makes the older ones count less by this factor: some 300 of them count.
_FORGETTING: Final = 1 / 300
_MAX_WEIGHT: Final = 1e6
# The reach is computed again after this number of observations.
_FIT_EVERY: Final = 8
# Logarithm of the odds by which a reach must explain the misses better than no reach.
_PROOF: Final = 6.0
# A proven reach is kept until its proof is weaker than this.
_DOUBT: Final = 3.0
# Minimum number of misses beyond a reach.
_MISSES: Final = 5.0
# Maximum hit rate beyond a reach, relative to the hit rate below it.
_MAX_FOUND_BEYOND: Final = 0.4
# A prefix that is found at an age of more than this number of reaches makes the misses below it count less.
_SURELY_BEYOND: Final = 1.5
_REFUTED: Final = 0.9


class CacheReach:
    """How far back one prefix cache reaches, learned from the ages at which answers found prefixes or missed them.

    A cache that evicts the least recently used blocks finds nearly everything up to some age and nearly nothing beyond
    it. Misses with another cause (coarse blocks, a chat template that renders history differently, two equal prompts at
    the same time) come at every age. So a reach is believed only while it explains the misses: many more prefixes must
    be found below it than beyond it. Otherwise there is none.
    """

    def __init__(self) -> None:
        self.reach_tokens: float | None = None
        """The age up to which prefixes are found. None: no reach explains the misses."""
        self._found_weights = [0.0] * _BUCKETS
        self._missed_weights = [0.0] * _BUCKETS
        self._sample_weight = 1.0  # of the next observation, which grows instead of all older ones shrinking
        self._unfitted_samples = 0

    def learn_from_ages(self, found_age: float | None, missed_age: float | None) -> None:
        """Learn from an answer: the greatest age of a found prefix, and the least age of a missing one.

        None: there was no such prefix.
        """
        if found_age is not None:
            bucket = _bucket_of_age(found_age)
            self._found_weights[bucket] += self._sample_weight
            if self.reach_tokens is not None and found_age > _SURELY_BEYOND * self.reach_tokens:
                for below in range(_bucket_of_age(self.reach_tokens), bucket):
                    self._missed_weights[below] *= _REFUTED
        if missed_age is not None:
            self._missed_weights[_bucket_of_age(missed_age)] += self._sample_weight
        self._sample_weight /= 1 - _FORGETTING
        self._unfitted_samples += 1
        if self._unfitted_samples >= _FIT_EVERY:
            self._fit_reach()

    @property
    def longest_found_age(self) -> float:
        """Greatest recent age of a found prefix, with the precision of the buckets. 0: none was found."""
        least = 0.5 * self._sample_weight
        for bucket in range(_BUCKETS - 1, -1, -1):
            if self._found_weights[bucket] >= least:
                return _BOUNDS[bucket]
        return 0.0

    def _fit_reach(self) -> None:
        self._unfitted_samples = 0
        if self._sample_weight > _MAX_WEIGHT:
            self._found_weights = [weight / self._sample_weight for weight in self._found_weights]
            self._missed_weights = [weight / self._sample_weight for weight in self._missed_weights]
            self._sample_weight = 1.0
        found_beyond, missed_beyond = sum(self._found_weights), sum(self._missed_weights)
        none = _log_likelihood(found_beyond, missed_beyond)
        best, gain = None, (_PROOF if self.reach_tokens is None else _DOUBT) * self._sample_weight
        found = missed = 0.0
        for bucket in range(_BUCKETS - 1):
            found += self._found_weights[bucket]
            missed += self._missed_weights[bucket]
            found_beyond -= self._found_weights[bucket]
            missed_beyond -= self._missed_weights[bucket]
            if missed_beyond < _MISSES * self._sample_weight:
                break
            if found_beyond * (found + missed) > _MAX_FOUND_BEYOND * found * (found_beyond + missed_beyond):
                continue
            gained = _log_likelihood(found, missed) + _log_likelihood(found_beyond, missed_beyond) - none
            if gained > gain:
                best, gain = bucket, gained
        self.reach_tokens = None if best is None else self._boundary_age(best)

    def _boundary_age(self, bucket: int) -> float:
        """Return the age between this bucket, with the last hits, and the first bucket with misses behind it."""
        beyond = bucket + 1
        while beyond < _BUCKETS - 1 and not self._missed_weights[beyond]:
            beyond += 1
        return sqrt(_BOUNDS[bucket + 1] * _BOUNDS[beyond])


def _bucket_of_age(age: float) -> int:
    if age < _MIN_TOKENS:
        return 0
    return min(_BUCKETS - 1, int(_BUCKETS_PER_DOUBLING * log2(age / _MIN_TOKENS)))


def _log_likelihood(found: float, missed: float) -> float:
    """Return the log-likelihood of these counts if their shares are the true probabilities."""
    total = found + missed
    likelihood = found * log(found / total) if found > 1e-9 else 0.0
    return likelihood + (missed * log(missed / total) if missed > 1e-9 else 0.0)


class CacheCount(NamedTuple):
    """State of one backend's cache according to its KV events. A later count replaces an earlier one.

    Events name blocks by hashes of token IDs, which a gateway without a tokenizer cannot compute. But engines evict the
    least recently used blocks, so the age of the blocks that are evicted now is enough.
    """

    stored_tokens: float
    """Tokens whose KV was stored in the cache. A decrease means that counting has begun again."""
    reach_tokens: float
    """Age of evicted blocks: the tokens stored between their last use and their eviction."""
    has_evicted: float
    """Not 0: `reach_tokens` was measured at evictions. 0: it is a lower bound."""
    cleared_at_tokens: float
    """Number of times that the cache was cleared."""
    device_reach_tokens: float = 0.0
    """The part of `reach_tokens` that is on the device. Older prefixes are loaded from a tier below it. 0: there is no
    such tier, or the part is not known."""


# Assumed capacity in tokens until it is learned. Too much is better than too little: the next answer corrects it.
_FIRST_CAPACITY: Final = 1_000_000
# A capacity without a known limit is at least this multiple of the greatest age at which a prefix was found.
_BEYOND_FOUND: Final = 2.0
# Maximum number of keys in each of a backend's two generations, at about 110 bytes each.
MAX_KEYS: Final = 16_384

# The trust in a backend that does not report cached tokens.
_UNREPORTED_TRUST: Final = 0.7
# Weight of a new answer in the trust.
_TRUST_STEP: Final = 0.2
# A common divisor of the reported cached tokens up to this value is the engine's block size.
_USUAL_BLOCK_TOKENS: Final = 512
# Up to this value it is, if this number of different reports share it. Fewer may share a large divisor by chance.
_MAX_BLOCK_TOKENS: Final = 16_384
_REPORTS: Final = 4
# Tolerated difference in cached tokens, because pieces do not end with blocks and tokens are estimated from bytes.
_TOLERATED_TOKENS: Final = 256
# Two pieces were last used by the same prompt if their ages differ by their distance in it, to this share and tokens.
_SAME_USE_SHARE: Final = 0.1
_SAME_USE_TOKENS: Final = 2.0


class PrefixHolders:
    """The caches that may have the first piece of a prompt, so that the other caches need not be asked.

    A cache that has lost a piece stays until the piece is examined again. Each addition examines the two pieces that
    were examined least recently. This bounds the pieces without a cache.
    """

    def __init__(self) -> None:
        self._caches_by_key: dict[int, dict[CachedPrefixes, None]] = {}

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._caches_by_key)

    def caches_with(self, key: int) -> Iterable[CachedPrefixes]:
        """Return the caches that may have a first piece."""
        return self._caches_by_key.get(key, ())

    def add_cache(self, key: int, cache: CachedPrefixes) -> None:
        """Note that a cache has a first piece."""
        by_key = self._caches_by_key
        known = by_key.get(key)
        if known is not None:
            known[cache] = None
            return
        by_key[key] = {cache: None}
        for _ in range(2):
            oldest = next(iter(by_key))
            holders = by_key.pop(oldest)
            if kept := {holder: None for holder in holders if holder.has_key(oldest)}:
                by_key[oldest] = kept


class CachedPrefixes:
    """Cached prefixes of one backend. Prompts are cut into pieces; `ends[i]` is the number of tokens up to piece i."""

    def __init__(self, holders: PrefixHolders | None = None) -> None:
        """Create an empty cache. `holders`: gets the first pieces of its prompts. None: nothing does."""
        self._prefix_holders = holders
        self.capacity_tokens = float(_FIRST_CAPACITY)
        """Capacity of the cache in tokens."""
        self.device_capacity_tokens = 0.0
        """The part of it that is on the device. 0: all of it, or unknown."""
        self.token_odometer = 0.0
        """Number of tokens that the backend has computed."""
        self.hit_trust = _UNREPORTED_TRUST
        """Share of the expected tokens that recent answers found."""
        self._cache_reach = CacheReach()
        self._cache_count: CacheCount | None = None  # the last one, of an engine with KV events
        self._uncounted_tokens = 0.0  # the odometer's reading when the engine's counting began
        self._learned_block_tokens = 0  # the greatest common divisor of the cached tokens that were reported
        self._reported_block_tokens: set[int] = set()  # the first different ones
        # The readings of keys in two generations. A key that was used since the odometer stood at `_turned` is young.
        # The old generation is kept as long again, or it could not be learned that the cache is larger.
        self._young_keys: dict[int, float] = {}
        self._old_keys: dict[int, float] = {}
        self._turned = 0.0

    def __len__(self) -> int:
        """Return the number of keys that are remembered; a key in both generations counts twice."""
        return len(self._young_keys) + len(self._old_keys)

    def has_key(self, key: int) -> bool:
        """Return whether a key is remembered."""
        return key in self._young_keys or key in self._old_keys

    def count_cached_pieces(self, prefix_keys: Sequence[int], reach_tokens: float | None = None) -> int:
        """Return the number of leading pieces of a prompt that are probably cached.

        `reach_tokens`: the reach of the tier in question. None: that of all tiers.
        """
        oldest = self.token_odometer - (self.capacity_tokens if reach_tokens is None else reach_tokens)
        if not prefix_keys or self._is_older(oldest, prefix_keys[0]):
            return 0
        if not self._is_older(oldest, prefix_keys[-1]):
            return len(prefix_keys)
        return bisect_left(prefix_keys, True, key=partial(self._is_older, oldest))

    def _is_older(self, oldest: float, key: int) -> bool:
        """Return whether a piece was last used before a reading of the odometer, or is not remembered."""
        reading = self._young_keys.get(key)
        if reading is None:
            reading = self._old_keys.get(key)
            if reading is None:
                return True
        return reading < oldest

    def predict_loaded_tokens(
        self, prefix_keys: Sequence[int], piece_ends: Sequence[float], found_tokens: float
    ) -> float:
        """Return how many of the first `found_tokens` tokens of a prompt the engine loads from a tier below the device.

        The device loses the tail of a prompt before its head, as the whole cache does.
        """
        if not self.device_capacity_tokens:
            return 0.0
        pieces = self.count_cached_pieces(prefix_keys, self.device_capacity_tokens)
        return max(0.0, found_tokens - piece_ends[pieces - 1]) if pieces else found_tokens

    def predict_found_tokens(self, piece_ends: Sequence[float], cached_pieces: int, tokens: int) -> float:
        """Return the tokens that the engine finds of a prompt of `tokens`, of which `cached_pieces` pieces are cached.

        Engines find whole blocks, and never a whole prompt: the last token is computed for the first one of the answer.
        """
        if not cached_pieces:
            return 0.0
        cached = min(piece_ends[cached_pieces - 1], tokens - 1.0)
        block = self._block_tokens
        if block:
            cached -= cached % block
        return cached

    @property
    def _block_tokens(self) -> int:
        """Block size of the engine in tokens, from its reports. 0: unknown."""
        most = _MAX_BLOCK_TOKENS if len(self._reported_block_tokens) >= _REPORTS else _USUAL_BLOCK_TOKENS
        return self._learned_block_tokens if self._learned_block_tokens <= most else 0

    def learn_block_size(self, cached_tokens: int) -> None:
        """Learn the block size from the cached tokens that an answer reports."""
        if self._learned_block_tokens != 1 and cached_tokens:
            self._learned_block_tokens = gcd(self._learned_block_tokens, cached_tokens)
            if len(self._reported_block_tokens) < _REPORTS:
                self._reported_block_tokens.add(cached_tokens)

    def record_prompt(
        self, keys: Sequence[int], piece_ends: Sequence[float], computed_tokens: float
    ) -> list[float | None]:
        """Note that a prompt was sent, of which `computed_tokens` tokens are not cached.

        Returns the previous readings of its pieces; None for new pieces.
        """
        readings: list[float | None] = list(map(self._young_keys.get, keys))
        if None in readings and self._old_keys:
            old = self._old_keys.get
            readings = [old(key) if reading is None else reading for key, reading in zip(keys, readings, strict=True)]
        odometer = self.token_odometer = self.token_odometer + computed_tokens
        self._young_keys.update(zip(keys, map(odometer.__sub__, piece_ends), strict=True))
        if keys and self._prefix_holders is not None:
            self._prefix_holders.add_cache(keys[0], self)
        if len(self._young_keys) > MAX_KEYS or odometer - self._turned > self.capacity_tokens:
            self._young_keys, self._old_keys, self._turned = {}, self._young_keys, odometer
        return readings

    def drop_keys(self, keys: Sequence[int]) -> None:
        """Forget the pieces of a failed request, which are not cached."""
        for key in keys:
            self._young_keys.pop(key, None)
            self._old_keys.pop(key, None)

    def forget_all(self) -> None:
        """Forget all prefixes: the cache is empty."""
        self._young_keys, self._old_keys = {}, {}

    def learn_from_report(
        self,
        readings: Sequence[float | None],
        odometer: float,
        piece_ends: Sequence[float],
        expected_tokens: float,
        reported_tokens: float,
    ) -> tuple[float | None, float | None]:
        """Learn from the cached tokens of an answer.

        Args:
            readings: Readings of the prompt's pieces when it was sent.
            odometer: Reading of the odometer at that time.
            piece_ends: Tokens up to the end of each piece.
            expected_tokens: Predicted cached tokens.
            reported_tokens: Reported cached tokens.

        Returns:
            The observation for `learn_from_ages`, which other workers also apply.
        """
        if expected_tokens:
            self.hit_trust += _TRUST_STEP * (min(1.0, reported_tokens / expected_tokens) - self.hit_trust)
        pieces = bisect_right(piece_ends, reported_tokens + 1.0) if reported_tokens else 0
        oldest = min((reading for reading in readings[:pieces] if reading is not None), default=None)
        found_age = None if oldest is None else odometer - oldest
        missed_age = self._find_evicted_age(readings, odometer, piece_ends, pieces, reported_tokens)
        self.learn_from_ages(found_age, missed_age)
        return found_age, missed_age

    def _find_evicted_age(
        self, readings: Sequence[float | None], odometer: float, ends: Sequence[float], pieces: int, reported: float
    ) -> float | None:
        """Return the age of the first evicted piece according to an answer, or None if no piece was evicted.

        The first `pieces` pieces were found. A piece whose predecessor was found, and last used by the same prompt, was
        not evicted before it. If such a piece is missing, the cause is the engine's block size, its chat template, or
        the estimate of tokens from bytes.
        """
        at, count = pieces, len(readings)
        if at:
            before = readings[at - 1]
            while at < count:
                reading = readings[at]
                if reading is None:
                    return None
                if before is not None:
                    distance = ends[at] - ends[at - 1]
                    if abs(before - reading - distance) > _SAME_USE_SHARE * distance + _SAME_USE_TOKENS:
                        break
                before, at = reading, at + 1
        if at >= count:
            return None
        reading = readings[at]
        if reading is None:
            return None
        last = next((place for place in range(count - 1, at, -1) if readings[place] is not None), at)
        tolerated = max(_TOLERATED_TOKENS, self._block_tokens)
        return odometer - reading if ends[last] - reported > tolerated else None

    def learn_from_ages(self, found_age: float | None, missed_age: float | None) -> None:
        """Learn the capacity from an observation of this worker or another one; see CacheReach.learn_from_ages."""
        if self.knows_capacity or (found_age is None and missed_age is None):
            return
        reach = self._cache_reach
        reach.learn_from_ages(found_age, missed_age)
        self.capacity_tokens = (
            max(_FIRST_CAPACITY, _BEYOND_FOUND * reach.longest_found_age)
            if reach.reach_tokens is None
            else reach.reach_tokens
        )

    @property
    def knows_capacity(self) -> bool:
        """Whether KV events of the engine have shown evictions and so the capacity."""
        return self._cache_count is not None and self._cache_count.has_evicted > 0

    @property
    def is_capacity_learned(self) -> bool:
        """Whether evictions have shown the capacity, by KV events or by answers."""
        return self.knows_capacity or self._cache_reach.reach_tokens is not None

    def apply_count(self, cache_count: CacheCount, computing_tokens: float) -> bool:
        """Apply a count of the engine's KV events, which include the tokens computed for other clients.

        `computing_tokens`: tokens on the odometer that are not computed yet. Returns whether the cache was cleared
        since the last count.
        """
        before, self._cache_count = self._cache_count, cache_count
        if before is None or cache_count.stored_tokens < before.stored_tokens:
            self._uncounted_tokens = self.token_odometer - computing_tokens - cache_count.stored_tokens
        self.token_odometer = self._uncounted_tokens + cache_count.stored_tokens + computing_tokens
        self.capacity_tokens = (
            cache_count.reach_tokens if cache_count.has_evicted else max(self.capacity_tokens, cache_count.reach_tokens)
        )
        self.device_capacity_tokens = cache_count.device_reach_tokens
        return before is not None and cache_count.cleared_at_tokens > before.cleared_at_tokens
