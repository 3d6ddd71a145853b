"""What engines have told, for the checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.engines.engine_facts import EngineFacts
from proxy.common.backend import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines.engine_keys import EngineKeys
    from proxy.common.backend import Backend
    from proxy.settings import Settings

IDLE_SECONDS: Final = 2.2
"""A little longer than the gateway keeps an idle connection to an engine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examined:
    """What one engine has told. A text in place of something else is why that is not known."""

    backend: Backend
    addresses: tuple[str, ...] = ()
    name_problem: str = ""
    connects: dict[str, float | str] = field(default_factory=dict)
    """By address: seconds to connect, or the problem."""
    health: int | str = ""
    """The status of its health route, or the problem; empty: not asked."""
    version: str | None = None
    """As it writes it."""
    models: int | str = ""
    """The status of /v1/models, or the problem; empty: not asked."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    ahead_seconds: float | None = None
    """How far its clock is ahead of ours; None: it tells no time."""
    keeps_alive: bool | None = None
    """Whether a connection can be used again after IDLE_SECONDS; None: not known."""
    has_metrics: bool = False
    counts_prompts: bool = False
    """Its /metrics tell where its prompts' KV came from."""
    bootstrap: str = ""
    """Why its bootstrap server, if decoders need one, is not there; empty: there is one, or none is needed."""

    @property
    def subject(self) -> str:
        """As findings call it."""
        return f"{self.backend.role} {self.backend.name}"

    @property
    def serves(self) -> frozenset[str]:
        """Its models without adapters, as whoever named it says, or else as it tells; empty: it does not."""
        return frozenset(self.backend.models) or self.facts.identity.models

    @property
    def is_reached(self) -> bool:
        """Whether it accepts connections."""
        return any(isinstance(told, float) for told in self.connects.values())

    @property
    def is_well(self) -> bool:
        """Whether it passes its health check."""
        return self.health == 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All engines, and the settings that they are to suit. `settings.connector` may still be `auto`."""

    settings: Settings
    keys: EngineKeys
    engines: Sequence[Examined]

    def of(self, role: Role) -> list[Examined]:
        """Those of one role."""
        return [engine for engine in self.engines if engine.backend.role is role]

    @property
    def told(self) -> list[Examined]:
        """Those that say what they are, encoders aside, which serve other models' parts."""
        return [engine for engine in self.engines if engine.models == 200 and engine.backend.role is not Role.ENCODE]
