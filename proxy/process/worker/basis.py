"""The basis of all parts of a worker: its number, the shared memory, and the current settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.process.loop_lag import LoopLag
from proxy.settings.live import LiveSettings

if TYPE_CHECKING:
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import Traces
    from proxy.process.configuration import ConfigSnapshot
    from proxy.process.shared import Shared
    from proxy.settings import Settings


class LiveConfiguration(LiveSettings):
    """The current configuration of a worker: its settings, and the client keys."""

    def __init__(self, current: ConfigSnapshot) -> None:
        super().__init__(current.settings)
        self.current = current

    def apply(self, current: ConfigSnapshot) -> None:
        """Replace the configuration."""
        self.current = current
        self.replace(current.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The argument of every builder."""

    shared: Shared
    index: int
    """Number of the worker, from 0."""
    live: LiveConfiguration
    metrics: Metrics
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """Delays of the worker's event loop."""
    traces: Traces | None = None
    """Traces of the running sampled requests; None without tracing."""

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self.live.settings
