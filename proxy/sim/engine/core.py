"""The parts of one simulated engine that its requests share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.sim.kv.cache import block_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.sim.engine.faults import Faults
    from proxy.sim.engine.kv_events import KvEventPublisher
    from proxy.sim.engine.machine_scheduler import MachineCache, MachineScheduler
    from proxy.sim.engine.metrics import EngineMetrics
    from proxy.sim.engine.scheduler import Scheduler
    from proxy.sim.kv.cache import PrefixCache
    from proxy.sim.kv.protocol import KvProtocol
    from proxy.sim.options import Options
    from proxy.sim.state import State


@dataclass(frozen=True, slots=True)
class Core:
    """Built once per engine start; a restart makes a new one with a new `engine_id`."""

    options: Options
    state: State
    faults: Faults
    scheduler: Scheduler | MachineScheduler
    cache: PrefixCache | MachineCache
    metrics: EngineMetrics
    protocol: KvProtocol
    kv_events: KvEventPublisher | None = None

    @property
    def used_blocks(self) -> int:
        """Of KV memory, by sequences that run and for decoders."""
        return self.scheduler.used_blocks + self.protocol.blocks_held()

    def cache_prompt(self, prompt: Sequence[int], salt: str) -> int:
        """How many of a prompt's tokens are cached. Then, or when it is computed, all of them are."""
        if self.kv_events is not None:
            self.kv_events.expect(block_names(prompt, self.options.block_size, salt), prompt)
        return self.cache.add(prompt, salt)

    def new_request_id(self, headers: Mapping[str, str], body: Any) -> str:
        """The id an answer is named by: the header's, the body's, or our own."""
        named = body if isinstance(body, dict) else {}
        if self.options.profile.is_sglang:
            given = named.get("rid")
        else:
            given = headers.get("x-request-id") or named.get("request_id")
        return given if isinstance(given, str) and given else uuid.uuid4().hex
