"""What everything in a worker is built on: who it is, what all workers share, and the settings in force."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.process.monitor import LoopLag

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.observe.metrics import Metrics
    from proxy.observe.record import Traces
    from proxy.process.configuration import ConfigSnapshot
    from proxy.process.shared import Shared
    from proxy.settings import Settings


class LiveSettings:
    """The configuration in force, and the parts that are told when it is another.

    A part whose settings can change at run time is added where it is made, by its own `configure` or by a lambda that
    gives it the section it needs.
    """

    def __init__(self, current: ConfigSnapshot) -> None:
        self.current = current
        self._configure: list[Callable[[Settings], None]] = []

    def add(self, configure: Callable[[Settings], None]) -> None:
        """Call this with every further settings. It must neither wait nor fail."""
        self._configure.append(configure)

    def apply(self, current: ConfigSnapshot) -> None:
        """Let every part go on with this. Nothing waits here, so no request sees one half of it."""
        self.current = current
        for configure in self._configure:
            configure(current.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Every builder is given this."""

    shared: Shared
    index: int
    """Which of the workers it is, from 0."""
    live: LiveSettings
    metrics: Metrics
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """How late the worker's event loop was."""
    traces: Traces | None = None
    """Those of the sampled requests under way; None: nothing is traced."""

    @property
    def settings(self) -> Settings:
        """What is in force now."""
        return self.live.current.settings
