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


class _Tier:
    """The blocks in one tier below the device, such as `CPU`.

    Events of such a tier may name neither the size of a block nor the block before it (`offloading/events.py` in vLLM
    0.32). So positions are those of the device.
    """

    __slots__ = ("ages", "blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Positions of the device when the blocks were stored here, by the hash of a block's hash."""
        self.ages: deque[int] = deque(maxlen=_EVICTIONS)
        """Tokens that the device stored between the storing of a block here and its eviction, for the last blocks."""


class Blocks:
    """The blocks of one rank, updated by its events in their order."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        """Number of blocks that are remembered."""
        self.stored = 0
        """Tokens stored since the start."""
        self.cleared = 0
        """Number of times that the cache was emptied."""
        # Positions are values of `stored`.
        self._since = 0
        """Position at which counting began."""
        self._full_at: int | None = None
        """Position at the first eviction since then; None before it."""
        # By the hash of a block's hash. The upper bits are the position of its storing minus its distance from the root
        # in tokens, because engines evict the tail of a sequence first. The lower bits are that distance in blocks.
        self._blocks: dict[int, int] = {}
        self._refused_at: int | None = None
        """Position at which there was no room, if nothing was evicted since; None otherwise."""
        self._search_from = 0
        """Position from which a search for lost evictions is worthwhile."""
        self._ages: deque[int] = deque(maxlen=_EVICTIONS)
        self._group: int | None = None
        self._tiers: dict[str, _Tier] = {}

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._blocks)

    def take(self, events: Iterable[Event]) -> None:
        """Take the events of one batch."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._forget()
                    self.cleared += 1

    def note_lost_events(self) -> None:
        """Forget all blocks, because events were lost."""
        self._forget()

    def restarted(self) -> None:
        """Forget all blocks, because the engine was restarted, or may have been."""
        self._forget()
        self.cleared += 1

    @property
    def count(self) -> CacheCount:
        """The state of the cache, as far as known."""
        if self._tiers:
            ages = [tier.ages for tier in self._tiers.values() if len(tier.ages) >= _ENOUGH_EVICTIONS]
            if len(ages) < len(self._tiers):
                return CacheCount(self.stored, 0, False, self.cleared)
            return CacheCount(self.stored, int(max(median(of_tier) for of_tier in ages)), True, self.cleared)
        if len(self._ages) >= _ENOUGH_EVICTIONS:
            # The median, because blocks that were used again seem to be evicted late, and blocks that make room for a
            # long prompt early.
            return CacheCount(self.stored, int(median(self._ages)), True, self.cleared)
        # Before the first eviction, the cache has all stored tokens.
        stored = self.stored if self._full_at is None else self._full_at
        return CacheCount(self.stored, stored - self._since, False, self.cleared)

    def _store(self, event: BlocksStored) -> None:
        if event.medium not in _DEVICE:
            self._store_below(event)
            return
        if not event.has_full_attention or not event.hashes or event.block_tokens < 1:
            return
        if self._group is None:
            self._group = event.group
        if event.group != self._group:
            return  # the same tokens, for other layers
        size = event.block_tokens
        self.stored += size * len(event.hashes)
        depth = self._depth_after(event.parent)
        if depth is None:
            return  # its distance from the root is not known
        if len(self._blocks) + len(event.hashes) > self.max_blocks and not self._make_room(len(event.hashes), size):
            return
        for place, block_hash in enumerate(event.hashes, depth + 1):
            self._blocks[hash(block_hash)] = (self.stored - place * size) << _DEPTH_BITS | place

    def _store_below(self, event: BlocksStored) -> None:
        medium = str(event.medium)
        if medium not in self._tiers and len(self._tiers) == _MAX_TIERS:
            return
        tier = self._tiers.setdefault(medium, _Tier())
        if event.group not in (None, self._group):
            return
        for block_hash in event.hashes:
            if len(tier.blocks) < self.max_blocks:
                tier.blocks[hash(block_hash)] = self.stored

    def _remove_below(self, event: BlocksRemoved) -> None:
        tier = self._tiers.get(str(event.medium))
        if tier is None:
            return
        for block_hash in event.hashes:
            stored_at = tier.blocks.pop(hash(block_hash), None)
            if stored_at is not None:
                tier.ages.append(self.stored - stored_at)

    def _depth_after(self, parent: BlockHash | None) -> int | None:
        if parent is None:
            return 0
        packed = self._blocks.get(hash(parent))
        return None if packed is None else packed & ((1 << _DEPTH_BITS) - 1)

    def _remove(self, event: BlocksRemoved) -> None:
        if event.group not in (None, self._group):
            return
        if event.medium not in _DEVICE:
            self._remove_below(event)
            return
        if self._full_at is None:
            self._full_at = self.stored
        for block_hash in event.hashes:
            packed = self._blocks.pop(hash(block_hash), None)
            if packed is not None:
                self._refused_at = None
                self._ages.append(self.stored - (packed >> _DEPTH_BITS))

    def _make_room(self, wanted: int, size: int) -> bool:
        """Forget blocks whose removal was missed, and return whether there is room for `wanted` more."""
        if self.stored < self._search_from:
            return False
        count = self.count
        if count.evicts:
            # A search goes through all blocks. The next one finds little until the cache has turned over.
            self._search_from = self.stored + int(count.reach)
            oldest = self.stored - _MAX_AGE_IN_REACHES * count.reach
            self._blocks = {key: packed for key, packed in self._blocks.items() if packed >> _DEPTH_BITS >= oldest}
        elif self._refused_at is None:
            self._refused_at = self.stored
        elif self.stored - self._refused_at > _MAX_AGE_IN_REACHES * self.max_blocks * size:
            self._blocks = {}
            self._refused_at = None
        return len(self._blocks) + wanted <= self.max_blocks

    def _forget(self) -> None:
        self._blocks = {}
        self._ages.clear()
        for tier in self._tiers.values():
            tier.blocks.clear()
            tier.ages.clear()
        self._since, self._full_at = self.stored, None
        self._refused_at, self._search_from = None, 0


def sum_of_ranks(ranks: Iterable[Blocks]) -> CacheCount:
    """Return the summed state of all ranks of one engine, which share its prompts."""
    counts = [rank.count for rank in ranks]
    return CacheCount(
        stored=sum(count.stored for count in counts),
        reach=sum(count.reach for count in counts),
        evicts=all(count.evicts for count in counts),
        cleared=min((count.cleared for count in counts), default=0),
    )
