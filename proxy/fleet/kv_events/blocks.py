"""The blocks that one rank of an engine has cached, by its events, and what they say of how far back its cache reaches.

No IO and no clock. Of a block nothing is kept but when it was stored, and of a bounded number of blocks.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.prefixes import CacheCount
from proxy.wire.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.wire.kv_events import BlockHash, Event

# At some 120 bytes each. Of one rank, with blocks of 16 tokens, 4 million tokens; of all ranks together a quarter GB.
MAX_BLOCKS: Final = 262_144
MAX_BLOCKS_OF_ALL: Final = 2_097_152
# The evictions that are looked at, and how many there must have been.
_EVICTIONS: Final = 512
_ENOUGH_EVICTIONS: Final = 8
# What was stored so much longer ago than what is evicted now was evicted, too, and the event was lost.
_LOST: Final = 4
_DEVICE: Final = (None, "GPU")
_DEPTH_BITS: Final = 24


class Blocks:
    """What its events say, in their order. `missed`: some of them were lost."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        """No more are remembered from now on."""
        self.stored = 0
        """Tokens."""
        self.cleared = 0
        self._since = 0  # `stored`, when counting began, and when something was evicted for the first time since
        self._full_at: int | None = None
        # By the hash of a block's hash: `stored` when it was stored less its distance from the root, as if it had been
        # used so much earlier, because engines evict the tail of a sequence before the head; and how many blocks it is
        # from the root.
        self._blocks: dict[int, int] = {}
        self._refused_at: int | None = None  # `stored`, when there was no room, and nothing was evicted since
        self._search_from = 0  # `stored`, from when on it is worthwhile to look for blocks whose removal was missed
        self._ages: deque[int] = deque(maxlen=_EVICTIONS)
        self._group: int | None = None
        self._has_tiers = False

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._blocks)

    def take(self, events: Iterable[Event]) -> None:
        """Those of one batch."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)
                case AllCleared():
                    self._forget()
                    self.cleared += 1

    def missed(self) -> None:
        """Nothing that was there need still be there, and what is there is not known."""
        self._forget()

    def started_anew(self) -> None:
        """It is another process than before, or may be: its cache was emptied."""
        self._forget()
        self.cleared += 1

    @property
    def count(self) -> CacheCount:
        """What is known by now."""
        if self._has_tiers:
            return CacheCount(self.stored, 0, False, self.cleared)
        if len(self._ages) >= _ENOUGH_EVICTIONS:
            # Blocks that were used again since they were stored seem to be evicted later than they are, and those that
            # make room for a long prompt earlier.
            return CacheCount(self.stored, int(median(self._ages)), True, self.cleared)
        # Until then all that was stored is there.
        stored = self.stored if self._full_at is None else self._full_at
        return CacheCount(self.stored, stored - self._since, False, self.cleared)

    def _store(self, event: BlocksStored) -> None:
        if event.medium not in _DEVICE:
            # What is evicted from the device is found there, and what is evicted there may be of other sizes.
            self._has_tiers = True
            return
        if not event.is_whole or not event.hashes or event.block_tokens < 1:
            return
        if self._group is None:
            self._group = event.group
        if event.group != self._group:
            return  # the same tokens once more, for other layers
        size = event.block_tokens
        self.stored += size * len(event.hashes)
        depth = self._depth_behind(event.parent)
        if depth is None:
            return  # how far it is from its root is not known
        if len(self._blocks) + len(event.hashes) > self.max_blocks and not self._make_room(len(event.hashes), size):
            return
        for place, block_hash in enumerate(event.hashes, depth + 1):
            self._blocks[hash(block_hash)] = (self.stored - place * size) << _DEPTH_BITS | place

    def _depth_behind(self, parent: BlockHash | None) -> int | None:
        if parent is None:
            return 0
        packed = self._blocks.get(hash(parent))
        return None if packed is None else packed & ((1 << _DEPTH_BITS) - 1)

    def _remove(self, event: BlocksRemoved) -> None:
        if event.medium not in _DEVICE or event.group not in (None, self._group):
            return
        if self._full_at is None:
            self._full_at = self.stored
        for block_hash in event.hashes:
            packed = self._blocks.pop(hash(block_hash), None)
            if packed is not None:
                self._refused_at = None
                self._ages.append(self.stored - (packed >> _DEPTH_BITS))

    def _make_room(self, wanted: int, size: int) -> bool:
        """Forget blocks whose removal must have been missed. False: there is no room, which comes by and by."""
        if self.stored < self._search_from:
            return False
        count = self.count
        if count.evicts:
            # All of them are looked through: until the cache has turned over, hardly any more are found.
            self._search_from = self.stored + int(count.reach)
            oldest = self.stored - _LOST * count.reach
            self._blocks = {key: packed for key, packed in self._blocks.items() if packed >> _DEPTH_BITS >= oldest}
        elif self._refused_at is None:
            self._refused_at = self.stored
        elif self.stored - self._refused_at > _LOST * self.max_blocks * size:
            self._blocks = {}
            self._refused_at = None
        return len(self._blocks) + wanted <= self.max_blocks

    def _forget(self) -> None:
        self._blocks = {}
        self._ages.clear()
        self._since, self._full_at = self.stored, None
        self._refused_at, self._search_from = None, 0


def together(ranks: Iterable[Blocks]) -> CacheCount:
    """Of all ranks of one engine, among which prompts spread."""
    counts = [rank.count for rank in ranks]
    return CacheCount(
        stored=sum(count.stored for count in counts),
        reach=sum(count.reach for count in counts),
        evicts=all(count.evicts for count in counts),
        cleared=min((count.cleared for count in counts), default=0),
    )
