"""Sequences in an engine's batch and the blocks of KV memory that they hold.

As in vLLM (v1/core/block_pool.py), the name of a full block identifies its tokens and all tokens before them. Blocks
with a name are shared. An unused block stays cached until its memory is needed. The least recently used block is
evicted first, and the end of a sequence before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(slots=True, eq=False)
class Held:
    """The blocks of one sequence: `named` blocks in the order of its tokens, and blocks without a name."""

    named: list[Hashable] = field(default_factory=list)
    unnamed: int = 0

    @property
    def blocks(self) -> int:
        return len(self.named) + self.unnamed


class Watcher(Protocol):
    """Receives changes of the cache, as KV events report them."""

    def stored(self, parent: Hashable | None, names: Sequence[Hashable]) -> None:
        """Record that these blocks of one sequence can be shared. They follow the block `parent`."""

    def removed(self, name: Hashable) -> None:
        """Record that a block was evicted."""

    def cleared(self) -> None:
        """Record that the whole cache was dropped."""


class KvBlocks:
    """The KV blocks of one engine. `used + cached <= count` always holds."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evicted = 0
        """The number of cached blocks that were evicted."""
        self.watcher: Watcher | None = None
        self._users: dict[Hashable, int] = {}
        self._cached: OrderedDict[Hashable, None] = OrderedDict()
        self._unnamed = 0

    @property
    def used(self) -> int:
        return len(self._users) + self._unnamed

    @property
    def cached(self) -> int:
        """Return the number of unused blocks with cached content."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Return the number of unused blocks, including cached ones, which can be evicted."""
        return self.count - self.used

    def hit(self, names: Sequence[Hashable]) -> int:
        """Return how many names, from the first one on, belong to cached blocks without a gap."""
        users, cached = self._users, self._cached
        for index, name in enumerate(names):
            if name not in users and name not in cached:
                return index
        return len(names)

    def take(self, names: Sequence[Hashable], blocks: int) -> tuple[Held, int] | None:
        """Take blocks for one sequence. Return them and the number of shared blocks; None if too few blocks are free.

        `names`: names of blocks that may be shared, from the first one on.
        """
        hits = self.hit(names[:blocks])
        revived = sum(name in self._cached for name in names[:hits])
        if blocks - hits > self.free - revived:
            return None
        for name in names[:hits]:
            self._cached.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1
        held = Held(list(names[:hits]))
        self.grow(held, blocks - hits)
        return held, hits

    def grow(self, held: Held, blocks: int) -> None:
        """Take more blocks for a sequence. Raises ValueError if too few blocks are free."""
        if blocks > self.free:
            raise ValueError(f"{blocks} blocks of KV memory are wanted and {self.free} are free")
        held.unnamed += blocks
        self._unnamed += blocks
        while self.used + len(self._cached) > self.count:
            name, _ = self._cached.popitem(last=False)
            self.evicted += 1
            if self.watcher is not None:
                self.watcher.removed(name)

    def name(self, held: Held, names: Sequence[Hashable]) -> None:
        """Make the first blocks of a sequence shareable, because they are computed.

        `names`: their names, of which only new ones count. A block that another sequence has named in the meantime
        stays an unnamed copy, and so do the blocks after it.
        """
        known = len(held.named)
        for name in names[known:]:
            if name in self._users or name in self._cached:
                break
            self._users[name] = 1
            self._unnamed -= 1
            held.named.append(name)
            held.unnamed -= 1
        if self.watcher is not None and len(held.named) > known:
            self.watcher.stored(held.named[known - 1] if known else None, held.named[known:])

    def give_back(self, held: Held) -> None:
        """Release the blocks of a sequence. May be called again."""
        self._unnamed -= held.unnamed
        held.unnamed = 0
        users = self._users
        while held.named:
            name = held.named.pop()
            users[name] -= 1
            if not users[name]:
                del users[name]
                self._cached[name] = None

    def forget(self) -> None:
        """Drop all cached blocks that no sequence uses."""
        self._cached.clear()
        if self.watcher is not None:
            self.watcher.cleared()


@dataclass(frozen=True, slots=True)
class Shape:
    """The options with which an engine was started."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    """Number of tokens that fit into KV memory, including host memory if it serves as a cache."""
    block_tokens: int = 512


@dataclass(slots=True, eq=False)
class Work:
    """One sequence. It belongs to the batch from `submit` until its last token or `drop`."""

    prompt_tokens: int
    answer_tokens: int
    names: Sequence[Hashable] = ()
    """Names of the prompt's full blocks."""
    keeps_kv: bool = False
    """Whether its blocks stay in use after its end until they are given back, because a decoder will fetch them."""
    awaits_kv: bool = False
    """Whether its KV comes from another engine. After its admission it then waits for `arrive`."""
    cached_tokens: int = 0
    """The number of prompt tokens that were cached at the first admission."""
    fetched_tokens: int = 0
    """The number of prompt tokens whose KV came from another engine, while the others were computed."""
    computed: int = 0
    """The number of tokens whose KV is computed or has arrived."""
    generated: int = 0
    is_decoding: bool = False
    """Whether only the KV of the last token is missing, which the next step computes."""
    preemptions: int = 0
    held: Held = field(default_factory=Held)
    began_behind: int = 0
    """The number of tokens that the same step computed before its first chunk."""

    @property
    def is_ended(self) -> bool:
        return self.generated >= self.answer_tokens

    @property
    def is_begun(self) -> bool:
        """Return whether a part of the sequence is computed."""
        return self.computed > self.began_behind

    @property
    def tokens(self) -> int:
        """Return the number of tokens of prompt and answer so far. The next token needs their KV."""
        return self.prompt_tokens + self.generated
