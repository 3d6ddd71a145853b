"""A KV store that all engines share: nothing is exchanged but the prompt, whose KV the decoder finds in the store.

As with MooncakeStoreConnector of vLLM, and AscendStoreConnector and UCMConnector of vLLM-Ascend. The store is a
directory with one empty file for each prompt, so that it outlives engines and serves processes. What a decoder does not
find there it computes by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from proxy.sim.kv.protocol import Child, KvProtocol, Leg, Loaded
from proxy.sim.model.writer import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.options import Options
    from proxy.sim.state import State


class StoreProtocol(KvProtocol):
    """Both ends. A decoder is who is one by its role, for no request says what it is."""

    def __init__(self, options: Options, state: State, address: Callable[[], tuple[str, int]]) -> None:
        self._directory = None if options.store is None else Path(options.store)
        self._options = options
        self._state = state
        self._stored = 0

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return {"prefill": Leg.PREFILL, "decode": Leg.DECODE}.get(self._options.role, Leg.ALONE)

    async def keep(self, child: Child) -> dict[str, Any] | None:
        if self._directory is not None:
            self._place(self._directory, child).touch()
            self._stored += 1
        return None

    async def load(self, child: Child) -> Loaded:
        if self._directory is None or not self._place(self._directory, child).exists():
            return Loaded.ABSENT
        self._state.pulls += 1
        return Loaded.YES

    def describe(self) -> dict[str, Any]:
        return {"stored": self._stored}

    @staticmethod
    def _place(directory: Path, child: Child) -> Path:
        return directory / f"{digest(child.prompt):08x}-{crc32(child.cache_salt.encode()):08x}-{len(child.prompt)}"
