"""The parts of one simulated engine that its requests share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from proxy.sim.faults import Faults
    from proxy.sim.kv import PrefixCache
    from proxy.sim.metrics import EngineMetrics
    from proxy.sim.options import Options
    from proxy.sim.scheduler import Scheduler
    from proxy.sim.state import State


class Loaded(Enum):
    """How fetching a prompt's KV from elsewhere went."""

    YES = auto()
    FAILED = auto()
    FOREIGN = auto()
    """KV arrived, but that of another prompt: the model will talk nonsense."""


class KvProtocol(Protocol):
    """How KV travels between simulated engines; one file per protocol, named in `PROTOCOLS`."""

    def keep(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Keep the KV of a prefilled prompt; returns the params that let a decoder have it."""

    def announce(self, params: Mapping[str, Any]) -> None:
        """The params go out in an answer."""

    def is_complete(self, params: Mapping[str, Any]) -> bool:
        """Whether the params name KV to fetch; if not, the prompt is computed locally."""

    async def load(self, params: Mapping[str, Any], prompt: Sequence[int]) -> Loaded: ...

    async def release(self, params: Mapping[str, Any]) -> None:
        """Tell the prefiller that nobody will fetch this."""

    def routes(self) -> list[web.RouteDef]: ...

    def blocks_held(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Core:
    """Built once per engine start; a restart makes a new one with a new `engine_id`."""

    options: Options
    state: State
    faults: Faults
    scheduler: Scheduler
    cache: PrefixCache
    metrics: EngineMetrics
    protocol: KvProtocol

    def new_request_id(self, headers: Mapping[str, str], body: Any) -> str:
        """The id an answer is named by: the header's, the body's, or our own."""
        given = headers.get("x-request-id") or (body.get("request_id") if isinstance(body, dict) else None)
        return str(given) if given else uuid.uuid4().hex
