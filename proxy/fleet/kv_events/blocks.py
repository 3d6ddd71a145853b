"""The cached blocks of one rank of an engine, by its KV events, and the reach of its cache. Pure.

The reach is the number of tokens that are stored from the storing of a block until its eviction. For a bounded number
of blocks, only the position of their storing is kept. Blocks that are evicted from the device may be found in a tier
below it: in host memory, or on a disk. Then the tier that keeps blocks longest determines the reach.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.prefixes import CacheCount
from proxy.wire.kv_events import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, Event

if TYPE_CHECKING:
    from collections.abc import Iterable


# A block takes about 120 bytes. With blocks of 16 tokens, this is 4 million tokens of one rank, and all ranks together
# take a quarter GB.
MAX_BLOCKS: Final = 262_144
MAX_BLOCKS_OF_ALL: Final = 2_097_152
# The number of last evictions that determine the reach, and the minimum number.
_EVICTIONS: Final = 512
_ENOUGH_EVICTIONS: Final = 8
# A block that is older than this multiple of the reach was evicted, and the event was lost.
_MAX_AGE_IN_REACHES: Final = 4
_DEVICE: Final = (None, "GPU")
_DEPTH_BITS: Final = 24
# Names of media come from engines, so their number is bounded.
_MAX_TIERS: Final = 4


class _CacheTier:
    """The blocks in one tier below the device, such as `CPU`.

    Events of such a tier may name neither the size of a block nor the block before it (`offloading/events.py` in vLLM
    0.32). So positions are those of the device.
    """

    __slots__ = ("block_ages", "depth_by_block")

    def __init__(self) -> None:
        self.depth_by_block: dict[int, int] = {}
        """Positions of the device when the blocks were stored here, by the hash of a block's hash."""
        self.block_ages: deque[int] = deque(maxlen=_EVICTIONS)
        """Tokens that the device stored between the storing of a block here and its eviction, for the last blocks."""


class RankBlocks:
    """The blocks of one rank, updated by its events in their order."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        """Number of blocks that are remembered."""
        self.stored_tokens = 0
        """Tokens stored since the start."""
        self.cleared_at_tokens = 0
        """Number of times that the cache was emptied."""
        # Positions are values of `stored_tokens`.
        self._counted_since = 0
        """Position at which counting began."""
        self._full_at_tokens: int | None = None
        """Position at the first eviction since then; None before it."""
        # By the hash of a block's hash. The upper bits are the position of its storing minus its distance from the root
        # in tokens, because engines evict the tail of a sequence first. The lower bits are that distance in blocks.
        self._depth_by_block: dict[int, int] = {}
        self._refused_at_tokens: int | None = None
        """Position at which there was no room, if nothing was evicted since; None otherwise."""
        self._search_from = 0
        """Position from which a search for lost evictions is worthwhile."""
        self._eviction_ages: deque[int] = deque(maxlen=_EVICTIONS)
        self._cache_group: int | None = None
        self._tiers_by_name: dict[str, _CacheTier] = {}

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._depth_by_block)

    def apply_events(self, events: Iterable[Event]) -> None:
        """Take the events of one batch."""
        for event in events:
            match event:
                case BlocksStored():
                    self._apply_stored(event)
                case BlocksRemoved():
                    self._apply_removed(event)
                case AllBlocksCleared():
                    self._forget_blocks()
                    self.cleared_at_tokens += 1

    def forget_after_lost_events(self) -> None:
        """Forget all blocks, because events were lost."""
        self._forget_blocks()

    def forget_after_restart(self) -> None:
        """Forget all blocks, because the engine was restarted, or may have been."""
        self._forget_blocks()
        self.cleared_at_tokens += 1

    @property
    def cache_count(self) -> CacheCount:
        """The state of the cache, as far as known."""
        if self._tiers_by_name:
            ages = [
                tier.block_ages for tier in self._tiers_by_name.values() if len(tier.block_ages) >= _ENOUGH_EVICTIONS
            ]
            device = self._device_reach_tokens or 0
            if len(ages) < len(self._tiers_by_name):
                return CacheCount(self.stored_tokens, 0, False, self.cleared_at_tokens, device)
            reach = int(max(median(of_tier) for of_tier in ages))
            return CacheCount(self.stored_tokens, reach, True, self.cleared_at_tokens, device)
        if (on_device := self._device_reach_tokens) is not None:
            return CacheCount(self.stored_tokens, on_device, True, self.cleared_at_tokens)
        # Before the first eviction, the cache has all stored tokens.
        stored = self.stored_tokens if self._full_at_tokens is None else self._full_at_tokens
        return CacheCount(self.stored_tokens, stored - self._counted_since, False, self.cleared_at_tokens)

    @property
    def _device_reach_tokens(self) -> int | None:
        """Age in tokens of the blocks that the device evicts now. None: it has evicted too few.

        It is the median, because blocks that were used again seem to be evicted late, and blocks that make room for a
        long prompt early.
        """
        return int(median(self._eviction_ages)) if len(self._eviction_ages) >= _ENOUGH_EVICTIONS else None

    def _apply_stored(self, event: BlocksStored) -> None:
        if event.medium not in _DEVICE:
            self._apply_stored_below(event)
            return
        if not event.has_full_attention or not event.hashes or event.block_tokens < 1:
            return
        if self._cache_group is None:
            self._cache_group = event.group
        if event.group != self._cache_group:
            return  # the same tokens, for other layers
        size = event.block_tokens
        self.stored_tokens += size * len(event.hashes)
        depth = self._depth_after(event.parent)
        if depth is None:
            return  # its distance from the root is not known
        if len(self._depth_by_block) + len(event.hashes) > self.max_blocks and not self._make_room(
            len(event.hashes), size
        ):
            return
        for place, block_hash in enumerate(event.hashes, depth + 1):
            self._depth_by_block[hash(block_hash)] = (self.stored_tokens - place * size) << _DEPTH_BITS | place

    def _apply_stored_below(self, event: BlocksStored) -> None:
        medium = str(event.medium)
        if medium not in self._tiers_by_name and len(self._tiers_by_name) == _MAX_TIERS:
            return
        tier = self._tiers_by_name.setdefault(medium, _CacheTier())
        if event.group not in (None, self._cache_group):
            return
        for block_hash in event.hashes:
            if len(tier.depth_by_block) < self.max_blocks:
                tier.depth_by_block[hash(block_hash)] = self.stored_tokens

    def _apply_removed_below(self, event: BlocksRemoved) -> None:
        tier = self._tiers_by_name.get(str(event.medium))
        if tier is None:
            return
        for block_hash in event.hashes:
            stored_at = tier.depth_by_block.pop(hash(block_hash), None)
            if stored_at is not None:
                tier.block_ages.append(self.stored_tokens - stored_at)

    def _depth_after(self, parent: BlockHash | None) -> int | None:
        if parent is None:
            return 0
        packed = self._depth_by_block.get(hash(parent))
        return None if packed is None else packed & ((1 << _DEPTH_BITS) - 1)

    def _apply_removed(self, event: BlocksRemoved) -> None:
        if event.group not in (None, self._cache_group):
            return
        if event.medium not in _DEVICE:
            self._apply_removed_below(event)
            return
        if self._full_at_tokens is None:
            self._full_at_tokens = self.stored_tokens
        for block_hash in event.hashes:
            packed = self._depth_by_block.pop(hash(block_hash), None)
            if packed is not None:
                self._refused_at_tokens = None
                self._eviction_ages.append(self.stored_tokens - (packed >> _DEPTH_BITS))

    def _make_room(self, wanted: int, size: int) -> bool:
        """Forget blocks whose removal was missed, and return whether there is room for `wanted` more."""
        if self.stored_tokens < self._search_from:
            return False
        count = self.cache_count
        if count.has_evicted:
            # A search goes through all blocks. The next one finds little until the cache has turned over.
            self._search_from = self.stored_tokens + int(count.reach_tokens)
            oldest = self.stored_tokens - _MAX_AGE_IN_REACHES * count.reach_tokens
            self._depth_by_block = {
                key: packed for key, packed in self._depth_by_block.items() if packed >> _DEPTH_BITS >= oldest
            }
        elif self._refused_at_tokens is None:
            self._refused_at_tokens = self.stored_tokens
        elif self.stored_tokens - self._refused_at_tokens > _MAX_AGE_IN_REACHES * self.max_blocks * size:
            self._depth_by_block = {}
            self._refused_at_tokens = None
        return len(self._depth_by_block) + wanted <= self.max_blocks

    def _forget_blocks(self) -> None:
        self._depth_by_block = {}
        self._eviction_ages.clear()
        for tier in self._tiers_by_name.values():
            tier.depth_by_block.clear()
            tier.block_ages.clear()
        self._counted_since, self._full_at_tokens = self.stored_tokens, None
        self._refused_at_tokens, self._search_from = None, 0


def sum_of_ranks(rank_blocks: Iterable[RankBlocks]) -> CacheCount:
    """Return the summed state of all ranks of one engine, which share its prompts."""
    counts = [rank.cache_count for rank in rank_blocks]
    on_device = [count.device_reach_tokens for count in counts]
    return CacheCount(
        stored_tokens=sum(count.stored_tokens for count in counts),
        reach_tokens=sum(count.reach_tokens for count in counts),
        has_evicted=all(count.has_evicted for count in counts),
        cleared_at_tokens=min((count.cleared_at_tokens for count in counts), default=0),
        device_reach_tokens=sum(on_device) if all(on_device) else 0,
    )
