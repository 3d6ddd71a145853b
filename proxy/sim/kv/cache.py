"""Counts the KV cache blocks of one simulated engine: the pinned blocks, and the prefixes that are cached.

No IO and no clock: the owner passes the time. A pin ends exactly once, by a pull, a release or expiry, and is counted
accordingly.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

from proxy.sim.model.tokenizer import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.hardware.work import Watcher


def count_blocks(tokens: int, block_size: int) -> int:
    """Return the number of blocks for this number of tokens. The last block may be partly filled."""
    return -(-tokens // block_size)


@dataclass(slots=True)
class Pin:
    """KV that a prefiller keeps for a decoder after the prefiller has answered."""

    request_id: str
    blocks: list[int]
    prompt_tokens: int
    prompt_digest: int
    expires_at: float
    announced: bool = False
    """Whether a client has received the parameters.

    If not, no decoder can fetch the KV, and the pin can only expire.
    """


@dataclass(slots=True)
class PinTable:
    """The pins of one prefiller. `pinned == pulled + released + expired + len(pins)` always holds."""

    lease_seconds: float
    num_blocks: int
    pins: dict[str, Pin] = field(default_factory=dict)
    pinned: int = 0
    pulled: int = 0
    released: int = 0
    expired: int = 0
    blocks_held: int = 0
    _next_block: int = 1

    def pin(self, request_id: str, prompt_tokens: int, prompt_digest: int, block_size: int, now: float) -> Pin:
        count = count_blocks(prompt_tokens, block_size)
        blocks = [(self._next_block + offset) % self.num_blocks for offset in range(count)]
        self._next_block += count
        pin = Pin(request_id, blocks, prompt_tokens, prompt_digest, now + self.lease_seconds)
        self.pins[request_id] = pin
        self.pinned += 1
        self.blocks_held += count
        return pin

    def pull(self, request_id: str, now: float) -> Pin | None:
        """Return the pin whose blocks a decoder fetches, and remove it; None if there is no such pin."""
        pin = self._take_pin(request_id, now)
        self.pulled += pin is not None
        return pin

    def release(self, request_id: str, now: float) -> Pin | None:
        """Remove a pin, because the decoder does not want its blocks. Return it; None if there is no such pin."""
        pin = self._take_pin(request_id, now)
        self.released += pin is not None
        return pin

    def expire(self, now: float) -> list[Pin]:
        gone = [pin for pin in self.pins.values() if pin.expires_at <= now]
        for pin in gone:
            self._drop_pin(pin)
        self.expired += len(gone)
        return gone

    def next_expiry(self) -> float | None:
        """Return the time of the next expiry; None without pins. Leases are equally long, so the oldest pin is next."""
        return next((pin.expires_at for pin in self.pins.values()), None)

    @property
    def leaked(self) -> int:
        """The number of pins that no decoder can know about."""
        return sum(not pin.announced for pin in self.pins.values())

    def _take_pin(self, request_id: str, now: float) -> Pin | None:
        self.expire(now)
        pin = self.pins.get(request_id)
        if pin is not None:
            self._drop_pin(pin)
        return pin

    def _drop_pin(self, pin: Pin) -> None:
        del self.pins[pin.request_id]
        self.blocks_held -= len(pin.blocks)


def block_names(ids: Sequence[int], block_size: int, salt: str = "") -> list[tuple[int, int]]:
    """Return the names of a prompt's full blocks: the index, and a digest of the salt and all tokens until its end."""
    packed = memoryview(pack(ids))
    width = block_size * packed.nbytes // max(1, len(ids))
    names = []
    chain = crc32(salt.encode())
    for count in range(1, len(ids) // block_size + 1):
        chain = crc32(packed[(count - 1) * width : count * width], chain)
        names.append((count, chain))
    return names


class PrefixCache:
    """Remembers which full blocks of tokens were computed. It forgets the least recently used blocks first."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._watcher: Watcher | None = None
        self.queries = 0
        self.hits = 0

    def add(self, ids: Sequence[int], salt: str = "") -> int:
        """Cache a prompt. Return how many of its tokens were already cached; at least one token never is.

        Prompts with different `salt` are different.
        """
        cached = 0
        names = block_names(ids, self._block_size, salt)
        new: list[tuple[int, int]] = []
        for key in names:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                if cached == (key[0] - 1) * self._block_size:
                    cached += self._block_size
            else:
                self._blocks[key] = None
                new.append(key)
        if self._watcher is not None and new:
            first = new[0][0] - 1
            self._watcher.stored(names[first - 1] if first else None, new)
        while len(self._blocks) > self._num_blocks:
            gone, _ = self._blocks.popitem(last=False)
            if self._watcher is not None:
                self._watcher.removed(gone)
        if cached == len(ids):
            # The last token is always computed, for there must be something to sample from.
            cached -= self._block_size
        self.queries += len(ids)
        self.hits += cached
        return cached

    def clear(self) -> None:
        self._blocks.clear()
        if self._watcher is not None:
            self._watcher.cleared()

    def watch(self, watcher: Watcher) -> None:
        """Notify this watcher of changes of the cache from now on."""
        self._watcher = watcher
