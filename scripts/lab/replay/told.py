"""The KV events of a simulated engine in virtual time, as the gateway's subscriber tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Final, cast

from proxy.backend import Backend
from proxy.balancer.policies.prefiller import write_count
from proxy.balancer.shared.journal import Seat
from proxy.kv_events.blocks import Blocks
from proxy.wire.kv_events import AllCleared, BlocksRemoved, BlocksStored, Event

# As the subscriber does.
_TELL_SECONDS: Final = 0.1


class Told:
    """Watches one engine's blocks, and lets all gateways hear of them."""

    def __init__(
        self, backend: Backend, block_tokens: int, hearers: Sequence[Seat], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._backend = backend
        self._block_tokens = block_tokens
        self._hearers = hearers
        self._loop = loop
        self._blocks = Blocks()
        self._is_due = False

    def stored(self, parent: Hashable | None, names: Sequence[Hashable]) -> None:
        hashes = [cast("int", name) for name in names]
        self._take(BlocksStored(hashes, cast("int | None", parent), self._block_tokens, None, None, True))

    def removed(self, name: Hashable) -> None:
        self._take(BlocksRemoved([cast("int", name)], None, None))

    def cleared(self) -> None:
        self._take(AllCleared())

    def _take(self, event: Event) -> None:
        self._blocks.take((event,))
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(_TELL_SECONDS, self._tell)

    def _tell(self) -> None:
        self._is_due = False
        for hearer in self._hearers:
            write_count(hearer, self._backend.slot, self._blocks.count)
