"""Applies the shared configuration in one worker."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from proxy.common.background import Background, BackgroundOwner
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.observe.metrics import Metrics
    from proxy.process.configuration.configuration import ConfigSnapshot, Configuration, Stamp
    from proxy.settings.change import ConfigChange

logger = logging.getLogger("proxy.configuration.watcher")


class ConfigWatcher(BackgroundOwner):
    """Applies published configurations, inside `async with`.

    The worker calls `look` regularly. `applied`: the configuration that the worker was built with. `apply` is called
    with every later one, and must not fail.
    """

    def __init__(
        self,
        configuration: Configuration,
        applied: ConfigSnapshot,
        apply: Callable[[ConfigSnapshot], None],
        metrics: Metrics,
    ) -> None:
        self._configuration = configuration
        self._applied = applied
        self._apply = apply
        self._metrics = metrics
        self._stamp_seen: Stamp | None = None
        self._background = Background(logger, "a reload")

    def _begin(self) -> None:
        self._metrics.config_last_reload_successful.set(1)
        self._metrics.config_last_reload_success_timestamp_seconds.set(self._applied.read_at)

    async def reload(self, by: str, *, is_dry_run: bool = False) -> ConfigChange:
        """Read everything again and apply it in this worker; the other workers follow.

        Raises SettingsError, after which nothing has changed. `by`: origin of the reload, for the log. `is_dry_run`:
        only return or raise the result.
        """
        if is_dry_run:
            return await self._configuration.reload(is_dry_run=True)
        with self._telling_of_failure(by):
            change = await self._configuration.reload()
        self._succeeded(change, by)
        return change

    def begin_reload(self, by: str) -> None:
        """Start a reload in the background. The log and the metrics show its result."""

        async def reload() -> None:
            with suppress(SettingsError):
                await self.reload(by)

        self._background.start(reload())

    def look(self) -> None:
        """Apply a new configuration, if there is one.

        Otherwise it costs reading a number, and the state of the file of client keys.
        """
        self._catch_up()
        stamp = self._configuration.new_keys_stamp()
        # A changed file is read when two looks find the same, because it may be half written at the first.
        if stamp is not None and stamp == self._stamp_seen and not self._background:
            self._background.start(self._reload_keys())
        self._stamp_seen = stamp

    def _catch_up(self) -> None:
        current = self._configuration.current()
        if current is not self._applied:
            self._applied = current
            self._apply(current)
            self._metrics.config_last_reload_success_timestamp_seconds.set(current.read_at)

    async def _reload_keys(self) -> None:
        by = "a change of the client keys' file"
        with suppress(SettingsError), self._telling_of_failure(by):
            change = await self._configuration.reload_keys()
            if change is not None:
                self._succeeded(change, by)

    @contextmanager
    def _telling_of_failure(self, by: str) -> Iterator[None]:
        try:
            yield
        except SettingsError as error:
            self._metrics.config_reloads_total.labels("failed").inc()
            self._metrics.config_last_reload_successful.set(0)
            logger.error("reload: refused, and nothing has changed: by %s: %s", by, error)
            raise

    def _succeeded(self, change: ConfigChange, by: str) -> None:
        self._catch_up()
        self._metrics.config_reloads_total.labels("ok").inc()
        self._metrics.config_last_reload_successful.set(1)
        logger.info("reload: by %s: %s", by, change)
