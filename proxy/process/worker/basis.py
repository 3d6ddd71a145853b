"""The basis of all parts of a worker: its number, the shared memory, and the current settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.process.loop_lag import LoopLag

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.observe.metrics import Metrics
    from proxy.observe.record import Traces
    from proxy.process.configuration import ConfigSnapshot
    from proxy.process.shared import Shared
    from proxy.settings import Settings


class LiveSettings:
    """The current configuration, and the parts that must act when it changes.

    A part whose settings can change at run time is added where it is created, by its `configure` or by a lambda.
    """

    def __init__(self, current: ConfigSnapshot) -> None:
        self.current = current
        self._configure: list[Callable[[Settings], None]] = []

    def add(self, configure: Callable[[Settings], None]) -> None:
        """Call a function with each changed configuration. It must neither wait nor fail."""
        self._configure.append(configure)

    def apply(self, current: ConfigSnapshot) -> None:
        """Apply a configuration to all parts. Nothing waits in between, so no request sees a mixture."""
        self.current = current
        for configure in self._configure:
            configure(current.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The argument of every builder."""

    shared: Shared
    index: int
    """Number of the worker, from 0."""
    live: LiveSettings
    metrics: Metrics
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """Delays of the worker's event loop."""
    traces: Traces | None = None
    """Traces of the running sampled requests; None without tracing."""

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self.live.current.settings
