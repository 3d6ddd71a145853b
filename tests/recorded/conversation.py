"""A conversation: how a gateway is set up, and what its clients do then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.sim.engine import SimulatedEngine
from tests.deployment import Deployment, Engine, engine_options
from tests.talking import Clients, raw

Talk = Callable[[Clients], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A way to talk to a gateway, with a name and a recording."""

    name: str
    """Name of the recording's file, without its ending."""
    talk: Talk
    prefillers: int = 1
    decoders: int = 1
    connector: str = "vllm_pull"
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of all simulated engines."""
    engines: Callable[[], tuple[Sequence[Engine], Sequence[Engine]]] | None = None
    """Makes prefillers and decoders. None: simulated engines with the options above."""
    prepare: Callable[[Deployment], Awaitable[None] | None] | None = None
    """Changes the gateway before the first client connects."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    loses_kv: bool = False
    """Failures may leave KV behind and reset connections."""
    is_unordered: bool = False
    """Requests run side by side: those to an engine, and events of different choices, come in any order."""

    def make_engines(self, store: Callable[[], Path]) -> tuple[list[Engine], list[Engine]]:
        """Make prefillers and decoders that speak the connector's protocol. `store` makes a directory for their KV."""
        if self.engines is not None:
            prefillers, decoders = self.engines()
            return [*prefillers], [*decoders]
        options = {**engine_options(self.connector, store), **self.engine}
        is_plain = self.connector == "plain"
        return (
            [SimulatedEngine(role="prefill", **options) for _ in range(0 if is_plain else self.prefillers)],
            [SimulatedEngine(role="both" if is_plain else "decode", **options) for _ in range(self.decoders)],
        )


def asking(*bodies: Mapping[str, Any], path: str = "", **headers: str) -> Talk:
    """Ask one after the other on one connection."""

    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for body in bodies:
            line.send(raw(dict(body), path, **headers))
            await line.answer()

    return talk


def sending(*requests: bytes) -> Talk:
    """Send these bytes one after the other on one connection, each when the answer before it is there."""

    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for request in requests:
            line.send(request)
            await line.answer()

    return talk
