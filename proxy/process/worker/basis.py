"""The basis of all parts of a worker: its number, the shared memory, and the current settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.process.loop_lag import LoopLag
from proxy.settings.live import LiveSettings

if TYPE_CHECKING:
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import Traces
    from proxy.process.configuration import ConfigSnapshot
    from proxy.process.shared import SharedState
    from proxy.settings import Settings


class LiveConfiguration(LiveSettings):
    """The current configuration of a worker: its settings, and the client keys."""

    def __init__(self, current: ConfigSnapshot) -> None:
        super().__init__(current.settings)
        self.current_snapshot = current

    def apply_snapshot(self, current: ConfigSnapshot) -> None:
        """Replace the configuration of the worker."""
        self.current_snapshot = current
        self.replace_settings(current.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBasis:
    """The settings and shared parts of a worker, which all builders of other parts get."""

    shared: SharedState
    worker_number: int
    """Number of the worker, from 0."""
    live_configuration: LiveConfiguration
    metrics: Metrics
    loop_lag: LoopLag = field(default_factory=LoopLag)
    """Delays of the worker's event loop."""
    running_traces: Traces | None = None
    """Traces of the running sampled requests; None without tracing."""

    @property
    def settings(self) -> Settings:
        """The settings that the worker uses now."""
        return self.live_configuration.settings

    def watch_expiry(self, section: str, option: str) -> None:
        """Show the end of a certificate's validity, now and after each change of the configuration.

        Args:
            section: Label of the series.
            option: Option that names the certificate. There is no series before it is configured.
        """
        is_shown = False

        def show(_: Settings) -> None:
            nonlocal is_shown
            expiry = self.live_configuration.current_snapshot.tls_files.expiries.get(option)
            if is_shown or expiry is not None:
                is_shown = True
                series = self.metrics.tls_certificate_expiry_timestamp_seconds.labels(section)
                series.set(math.nan if expiry is None else expiry)

        show(self.settings)
        self.live_configuration.call_on_change(show)
