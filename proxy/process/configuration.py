"""The configuration of all workers, which is replaced as a whole or not at all.

Any process may reload it: it reads and checks everything and publishes the result, with the configured instances, in
shared memory. Every worker notices within a quarter of a second and applies it. A refused reload changes nothing. The
file of client keys and the certificates are watched and read again when they change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.roster import CONFIG, Roster
from proxy.balancer.shared.memory import SharedValue
from proxy.common.background import BackgroundOwner, BackgroundTasks
from proxy.fleet.discovery.sources import configured_instances
from proxy.gateway.api_keys import assign_slots
from proxy.settings import OPTIONS, SECRET_OPTIONS, ClientKey, LoadedSettings, Settings, SettingsError, load_client_keys
from proxy.settings.load import ConfigChange
from proxy.settings.sources import TLS_FILE_OPTIONS, read_option
from proxy.settings.tls import TlsFiles, load_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pydantic import SecretStr

    from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.configuration.watcher")

FIXED: Final = (
    *("connector", "workers", "worker_timeout_seconds", "passthrough"),
    *("listen.host", "listen.port", "listen.backlog"),
    *("admin.host", "admin.port", "admin.probe_port", "admin.receipts_bytes"),
    *("layerwise.host", "layerwise.port", "layerwise.advertised_host"),
    *("log.format", "tracing.endpoint", "tracing.sample_ratio"),
    *("replicas.url", "replicas.password", "replicas.group", "replicas.interval_seconds", "replicas.ttl_seconds"),
    *("replicas.news_seconds", "replicas.key_limits"),
    *("kv_events.endpoint", "kv_events.replay_endpoint", "kv_events.topic", "kv_events.ranks"),
)
"""Options that cannot change at run time.

They define processes, sockets, routes, memory, the form of the log, and the receivers of traces or loads.
"""

_KEYS: Final = "auth.client_keys_file"
_WATCHED: Final = (_KEYS, *TLS_FILE_OPTIONS)
"""Options that name files which are read again when they change."""

_CAPACITY_BYTES: Final = 8 * 1024 * 1024  # 1,024 instances with the longest names take 300 KiB


class Configuration:
    """The configuration that all processes share. Must be created before forking."""

    def __init__(self, loaded: LoadedSettings, load: Callable[[], LoadedSettings], roster: Roster) -> None:
        """Publish the first configuration to the workers.

        Raises SettingsError.

        Args:
            loaded: The first configuration, whose instances are in `roster`.
            roster: Takes the configured instances of each reload.
            load: Reads the configuration again.
        """
        self._load = load
        self._roster = roster
        self._shared = SharedValue("configuration", _CAPACITY_BYTES)
        self._read_version = 0
        self._current = _current(loaded, {}, _stamps(loaded.settings), time.time())
        self._shared.write(to_json(self._current))

    def current(self) -> ConfigSnapshot:
        """Return the newest configuration, as the same object until another one is published."""
        if self._shared.version != self._read_version:
            self._read_version, value = self._shared.read()
            self._current = from_json(value)
        return self._current

    async def reload(self, *, is_dry_run: bool = False) -> ConfigChange:
        """Read everything again and publish it. Raises SettingsError, after which nothing has changed.

        `is_dry_run`: nothing is published, and the result or the error is that of a real reload.
        """
        while (change := await self._replace(self._load, is_dry_run=is_dry_run)) is None:
            pass
        return change

    def new_stamps(self) -> Stamps:
        """Return the stamps of the watched files that differ from the last reading. Missing files have none."""
        current = self.current()
        return {
            option: stamp for option, stamp in _stamps(current.settings).items() if stamp != current.stamps.get(option)
        }

    async def reload_files(self) -> ConfigChange | None:
        """Read the client keys and the certificates again and publish them.

        Returns None if another worker did it. Raises SettingsError in one worker for each state of the files; the old
        keys and certificates stay.
        """
        before, version = self.current(), self._read_version
        stamps = _stamps(before.settings)
        try:
            return await self._replace(partial(_with_files_read_again, before))
        except SettingsError:
            with self._shared.exclusive():
                if self._shared.version != version:
                    return None
                self._publish(before, replace(before, stamps=stamps))
            raise

    async def _replace(self, load: Callable[[], LoadedSettings], *, is_dry_run: bool = False) -> ConfigChange | None:
        """Publish the result of `load`, or return None if another process has published in the meantime."""
        before, version, read_at = self.current(), self._read_version, time.time()
        stamps = _stamps(before.settings)
        # In a thread, because parsing a long file and reading a slow disk would delay streams.
        loaded = await asyncio.to_thread(load)
        after = _current(loaded, before.slots, stamps, read_at)
        with self._shared.exclusive():
            is_newest = self._shared.version == version
            return self._publish(before, after, is_dry_run=is_dry_run) if is_newest else None

    def _publish(self, before: ConfigSnapshot, after: ConfigSnapshot, *, is_dry_run: bool = False) -> ConfigChange:
        """Publish a configuration. The caller holds the lock. Raises SettingsError."""
        changed = [name for name in OPTIONS if read_option(before.settings, name) != read_option(after.settings, name)]
        fixed: list[str] = [name for name in FIXED if name in changed]
        if fixed:
            raise SettingsError(f"{' and '.join(fixed)} cannot change while the gateway runs: restart it")
        if before.settings.has_encoders != after.settings.has_encoders:
            raise SettingsError("encode: adding the first or removing the last encode instance requires a restart")
        if before.client_keys != after.client_keys and _KEYS not in changed:
            changed.append(_KEYS)  # the published configuration has it
        texts, texts_before = after.tls.texts, before.tls.texts
        changed += [
            name for name in TLS_FILE_OPTIONS if name not in changed and texts.get(name) != texts_before.get(name)
        ]
        try:
            commit = self._shared.prepare(to_json(after))
            # Only a full reload may bring back instances that an administrator has removed.
            is_same = after.settings is before.settings
            seconds = after.settings.leaving.evacuate_after_seconds
            leaves_at = None if seconds is None else time.monotonic() + seconds
            wanted = configured_instances(after.settings)
            came, went = (
                ((), ())
                if is_same
                else self._roster.sync(CONFIG, wanted, leaves_at, restores=True, is_dry_run=is_dry_run)
            )
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if not is_dry_run:
            commit()
        return ConfigChange(tuple(changed), tuple(b.name for b in came), tuple(b.name for b in went))


def _current(loaded: LoadedSettings, slots_before: Mapping[str, int], stamps: Stamps, read_at: float) -> ConfigSnapshot:
    """Return the configuration with slots for its client keys. Raises SettingsError if there are too many keys."""
    try:
        slots = assign_slots((key.name for key in loaded.client_keys), slots_before)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return ConfigSnapshot(loaded.settings, read_at, loaded.client_keys, slots, stamps, loaded.origins, loaded.tls)


def _with_files_read_again(before: ConfigSnapshot) -> LoadedSettings:
    """Return the configuration with the present client keys and certificates. Raises SettingsError."""
    path = before.settings.auth.client_keys_file
    keys = () if path is None else load_client_keys(path)
    return LoadedSettings(before.settings, before.origins, keys, tls=load_tls(before.settings))


def _stamps(settings: Settings) -> Stamps:
    """Return the stamps of the client keys' file and of certificates, without those of files that cannot be read."""
    stamps: dict[str, Stamp] = {}
    for option in _WATCHED:
        path = read_option(settings, option)
        if path is not None:
            with suppress(OSError):
                found = path.stat()
                stamps[option] = found.st_mtime_ns, found.st_ino, found.st_size
    return stamps


# A configuration as a value, and its JSON in shared memory, which has secrets in clear.

Stamp = tuple[int, int, int]
"""Time of the last change, inode and size of a file. They differ after the file was written or replaced."""

Stamps = dict[str, Stamp]
"""Stamps of files, by the option that names the file."""


@dataclass(frozen=True, slots=True)
class ConfigSnapshot:
    """One version of the configuration."""

    settings: Settings
    read_at: float
    """Time of reading, in seconds since the epoch."""
    client_keys: tuple[ClientKey, ...] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slots of the client keys' usage, by name."""
    stamps: Stamps = field(default_factory=dict)
    """Stamps of the watched files at the last reading."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Origin of each option: a flag, a variable, a file, or `default`."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """The certificates and keys of the settings."""


def to_json(current: ConfigSnapshot) -> dict[str, Any]:
    """Return the configuration as the JSON that `from_json` reads."""
    settings = current.settings.model_dump(mode="json")
    for option in SECRET_OPTIONS:
        section, _, name = option.partition(".")
        settings[section][name] = text_of(read_option(current.settings, option))
    return {
        "settings": settings,
        "read_at": current.read_at,
        "client_keys": [key.model_dump(mode="json") for key in current.client_keys],
        "slots": dict(current.slots),
        "stamps": current.stamps,
        "origins": dict(current.origins),
        "tls": [dict(current.tls.texts), dict(current.tls.expiries)],
    }


def from_json(value: dict[str, Any]) -> ConfigSnapshot:
    return ConfigSnapshot(
        Settings.model_validate(value["settings"]),
        value["read_at"],
        tuple(ClientKey.model_validate(key) for key in value["client_keys"]),
        value["slots"],
        {option: tuple(stamp) for option, stamp in value["stamps"].items()},
        value["origins"],
        TlsFiles(*value["tls"]),
    )


def shown(current: ConfigSnapshot) -> dict[str, Any]:
    """Return every option with its value and origin, with masked keys."""
    tree: Mapping[str, Any] = current.settings.model_dump(mode="json")
    return {
        "read_at": current.read_at,
        "options": [
            {"name": name, "value": reduce(getitem, name.split("."), tree), "origin": current.origins.get(name)}
            for name in OPTIONS
        ],
    }


def secrets_of(settings: Settings) -> list[str]:
    """Return all secrets of the settings, in clear."""
    return [text for option in SECRET_OPTIONS if (text := text_of(read_option(settings, option)))]


def text_of(secret: SecretStr | None) -> str | None:
    """Return the text of a secret, in clear."""
    return None if secret is None else secret.get_secret_value()


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
        self._stamps_seen: Stamps = {}
        self._warnings_before = applied.settings.access_warnings
        """Warnings of the configuration before the applied one."""
        self._background = BackgroundTasks(logger, "a reload")

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
        with self._logging_failure(by):
            change = await self._configuration.reload()
        self._succeeded(change, by)
        return change

    def begin_reload(self, by: str) -> None:
        """Start a reload in the background. The log and the metrics show its result."""

        async def reload() -> None:
            with suppress(SettingsError):
                await self.reload(by)

        self._background.start_task(reload())

    def look(self) -> None:
        """Apply a new configuration, if there is one.

        Otherwise it costs reading a number, and the states of the watched files.
        """
        self._catch_up()
        stamps = self._configuration.new_stamps()
        # Changed files are read when two looks find the same, because one may be half written at the first.
        if stamps and stamps == self._stamps_seen and not self._background:
            self._background.start_task(self._reload_files(stamps))
        self._stamps_seen = stamps

    def _catch_up(self) -> None:
        current = self._configuration.current()
        if current is not self._applied:
            self._warnings_before, self._applied = self._applied.settings.access_warnings, current
            self._apply(current)
            self._metrics.config_last_reload_success_timestamp_seconds.set(current.read_at)

    async def _reload_files(self, changed: Iterable[str]) -> None:
        names = ("the client keys' file" if option == _KEYS else option for option in changed)
        by = f"a change of {' and '.join(names)}"
        with suppress(SettingsError), self._logging_failure(by):
            change = await self._configuration.reload_files()
            if change is not None:
                self._succeeded(change, by)

    @contextmanager
    def _logging_failure(self, by: str) -> Iterator[None]:
        try:
            yield
        except SettingsError as error:
            self._metrics.config_reloads_total.labels("failed").inc()
            self._metrics.config_last_reload_successful.set(0)
            logger.error("reload: rejected, nothing has changed: requested by %s: %s", by, error)
            raise

    def _succeeded(self, change: ConfigChange, by: str) -> None:
        self._catch_up()
        for warning in set(self._applied.settings.access_warnings).difference(self._warnings_before):
            logger.warning("%s", warning)
        self._metrics.config_reloads_total.labels("ok").inc()
        self._metrics.config_last_reload_successful.set(1)
        logger.info("reload: applied: requested by %s: %s", by, change)
