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


class SharedConfiguration:
    """The configuration that all processes share. Must be created before forking."""

    def __init__(self, loaded: LoadedSettings, load: Callable[[], LoadedSettings], roster: Roster) -> None:
        """Publish the first configuration to the workers.

        Raises SettingsError.

        Args:
            loaded: The first configuration, whose instances are in `roster`.
            roster: Takes the configured instances of each reload.
            load: Reads the configuration again.
        """
        self._load_settings = load
        self._roster = roster
        self._shared_value = SharedValue("configuration", _CAPACITY_BYTES)
        self._read_version = 0
        self._current_snapshot = _make_snapshot(loaded, {}, _file_stamps(loaded.settings), time.time())
        self._shared_value.write_value(snapshot_to_json(self._current_snapshot))

    def current_snapshot(self) -> ConfigSnapshot:
        """Return the newest configuration, as the same object until another one is published."""
        if self._shared_value.current_version != self._read_version:
            self._read_version, value = self._shared_value.read_version_and_value()
            self._current_snapshot = snapshot_from_json(value)
        return self._current_snapshot

    async def reload_all(self, *, is_dry_run: bool = False) -> ConfigChange:
        """Read everything again and publish it. Raises SettingsError, after which nothing has changed.

        `is_dry_run`: nothing is published, and the result or the error is that of a real reload.
        """
        while (change := await self._load_and_publish(self._load_settings, is_dry_run=is_dry_run)) is None:
            pass
        return change

    def changed_stamps(self) -> Stamps:
        """Return the stamps of the watched files that differ from the last reading. Missing files have none."""
        current = self.current_snapshot()
        return {
            option: stamp
            for option, stamp in _file_stamps(current.settings).items()
            if stamp != current.file_stamps.get(option)
        }

    async def reload_files(self) -> ConfigChange | None:
        """Read the client keys and the certificates again and publish them.

        Returns None if another worker did it. Raises SettingsError in one worker for each state of the files; the old
        keys and certificates stay.
        """
        before, version = self.current_snapshot(), self._read_version
        stamps = _file_stamps(before.settings)
        try:
            return await self._load_and_publish(partial(_with_files_read_again, before))
        except SettingsError:
            with self._shared_value.hold_writer_lock():
                if self._shared_value.current_version != version:
                    return None
                self._publish_configuration(before, replace(before, file_stamps=stamps))
            raise

    async def _load_and_publish(
        self, load: Callable[[], LoadedSettings], *, is_dry_run: bool = False
    ) -> ConfigChange | None:
        """Publish the result of `load`, or return None if another process has published in the meantime."""
        before, version, read_at = self.current_snapshot(), self._read_version, time.time()
        stamps = _file_stamps(before.settings)
        # In a thread, because parsing a long file and reading a slow disk would delay streams.
        loaded = await asyncio.to_thread(load)
        after = _make_snapshot(loaded, before.slots_by_key, stamps, read_at)
        with self._shared_value.hold_writer_lock():
            is_newest = self._shared_value.current_version == version
            return self._publish_configuration(before, after, is_dry_run=is_dry_run) if is_newest else None

    def _publish_configuration(
        self, old_settings: ConfigSnapshot, after: ConfigSnapshot, *, is_dry_run: bool = False
    ) -> ConfigChange:
        """Publish a configuration. The caller holds the lock. Raises SettingsError."""
        changed = [
            name for name in OPTIONS if read_option(old_settings.settings, name) != read_option(after.settings, name)
        ]
        fixed: list[str] = [name for name in FIXED if name in changed]
        if fixed:
            raise SettingsError(f"{' and '.join(fixed)} cannot change while the gateway runs: restart it")
        if old_settings.settings.has_encoders != after.settings.has_encoders:
            raise SettingsError("encode: adding the first or removing the last encode instance requires a restart")
        if old_settings.client_keys != after.client_keys and _KEYS not in changed:
            changed.append(_KEYS)  # the published configuration has it
        texts, texts_before = after.tls_files.texts, old_settings.tls_files.texts
        changed += [
            name for name in TLS_FILE_OPTIONS if name not in changed and texts.get(name) != texts_before.get(name)
        ]
        try:
            commit = self._shared_value.prepare_value(snapshot_to_json(after))
            # Only a full reload may bring back instances that an administrator has removed.
            is_same = after.settings is old_settings.settings
            seconds = after.settings.leaving.evacuate_after_seconds
            leaves_at = None if seconds is None else time.monotonic() + seconds
            wanted = configured_instances(after.settings)
            came, went = (
                ((), ())
                if is_same
                else self._roster.sync_origin(CONFIG, wanted, leaves_at, restores_removed=True, is_dry_run=is_dry_run)
            )
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if not is_dry_run:
            commit()
        return ConfigChange(tuple(changed), tuple(b.name for b in came), tuple(b.name for b in went))


def _make_snapshot(
    loaded: LoadedSettings, slots_before: Mapping[str, int], stamps: Stamps, read_at: float
) -> ConfigSnapshot:
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
    return LoadedSettings(before.settings, before.option_origins, keys, tls=load_tls(before.settings))


def _file_stamps(current_settings: Settings) -> Stamps:
    """Return the stamps of the client keys' file and of certificates, without those of files that cannot be read."""
    stamps: dict[str, Stamp] = {}
    for option in _WATCHED:
        path = read_option(current_settings, option)
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
    slots_by_key: Mapping[str, int] = field(default_factory=dict)
    """Slots of the client keys' usage, by name."""
    file_stamps: Stamps = field(default_factory=dict)
    """Stamps of the watched files at the last reading."""
    option_origins: Mapping[str, str] = field(default_factory=dict)
    """Origin of each option: a flag, a variable, a file, or `default`."""
    tls_files: TlsFiles = field(default_factory=TlsFiles)
    """The certificates and keys of the settings."""


def snapshot_to_json(config_snapshot: ConfigSnapshot) -> dict[str, Any]:
    """Return the configuration as the JSON that `snapshot_from_json` reads."""
    settings = config_snapshot.settings.model_dump(mode="json")
    for option in SECRET_OPTIONS:
        section, _, name = option.partition(".")
        settings[section][name] = text_of_secret(read_option(config_snapshot.settings, option))
    return {
        "settings": settings,
        "read_at": config_snapshot.read_at,
        "client_keys": [key.model_dump(mode="json") for key in config_snapshot.client_keys],
        "slots": dict(config_snapshot.slots_by_key),
        "stamps": config_snapshot.file_stamps,
        "origins": dict(config_snapshot.option_origins),
        "tls": [dict(config_snapshot.tls_files.texts), dict(config_snapshot.tls_files.expiries)],
    }


def snapshot_from_json(json_value: dict[str, Any]) -> ConfigSnapshot:
    return ConfigSnapshot(
        Settings.model_validate(json_value["settings"]),
        json_value["read_at"],
        tuple(ClientKey.model_validate(key) for key in json_value["client_keys"]),
        json_value["slots"],
        {option: tuple(stamp) for option, stamp in json_value["stamps"].items()},
        json_value["origins"],
        TlsFiles(*json_value["tls"]),
    )


def masked_options(config_snapshot: ConfigSnapshot) -> dict[str, Any]:
    """Return every option with its value and origin, with masked keys."""
    tree: Mapping[str, Any] = config_snapshot.settings.model_dump(mode="json")
    return {
        "read_at": config_snapshot.read_at,
        "options": [
            {
                "name": name,
                "value": reduce(getitem, name.split("."), tree),
                "origin": config_snapshot.option_origins.get(name),
            }
            for name in OPTIONS
        ],
    }


def secrets_of(settings: Settings) -> list[str]:
    """Return all secrets of the settings, in clear."""
    return [text for option in SECRET_OPTIONS if (text := text_of_secret(read_option(settings, option)))]


def text_of_secret(secret_value: SecretStr | None) -> str | None:
    """Return the text of a secret, in clear."""
    return None if secret_value is None else secret_value.get_secret_value()


class ConfigWatcher(BackgroundOwner):
    """Applies published configurations, inside `async with`.

    The worker calls `apply_new_configuration` regularly. `applied`: the configuration that the worker was built with.
    `apply` is called with every later one, and must not fail.
    """

    def __init__(
        self,
        configuration: SharedConfiguration,
        applied: ConfigSnapshot,
        apply: Callable[[ConfigSnapshot], None],
        metrics: Metrics,
    ) -> None:
        self._configuration = configuration
        self._applied_snapshot = applied
        self._apply_snapshot = apply
        self._metrics = metrics
        self._seen_stamps: Stamps = {}
        self._logged_warnings = applied.settings.access_warnings
        """Warnings of the configuration before the applied one."""
        self._background = BackgroundTasks(logger, "a reload")

    def _begin(self) -> None:
        self._metrics.config_last_reload_successful.set(1)
        self._metrics.config_last_reload_success_timestamp_seconds.set(self._applied_snapshot.read_at)

    async def reload_and_apply(self, by: str, *, is_dry_run: bool = False) -> ConfigChange:
        """Read everything again and apply it in this worker; the other workers follow.

        Raises SettingsError, after which nothing has changed. `by`: origin of the reload, for the log. `is_dry_run`:
        only return or raise the result.
        """
        if is_dry_run:
            return await self._configuration.reload_all(is_dry_run=True)
        with self._logging_failure(by):
            change = await self._configuration.reload_all()
        self._record_success(change, by)
        return change

    def begin_reload(self, by: str) -> None:
        """Start a reload in the background. The log and the metrics show its result."""

        async def reload() -> None:
            with suppress(SettingsError):
                await self.reload_and_apply(by)

        self._background.start_task(reload())

    def apply_new_configuration(self) -> None:
        """Apply a new configuration, if there is one.

        Otherwise it costs reading a number, and the states of the watched files.
        """
        self._apply_latest()
        stamps = self._configuration.changed_stamps()
        # Changed files are read when two looks find the same, because one may be half written at the first.
        if stamps and stamps == self._seen_stamps and not self._background:
            self._background.start_task(self._reload_files(stamps))
        self._seen_stamps = stamps

    def _apply_latest(self) -> None:
        current = self._configuration.current_snapshot()
        if current is not self._applied_snapshot:
            self._logged_warnings, self._applied_snapshot = self._applied_snapshot.settings.access_warnings, current
            self._apply_snapshot(current)
            self._metrics.config_last_reload_success_timestamp_seconds.set(current.read_at)

    async def _reload_files(self, changed: Iterable[str]) -> None:
        names = ("the client keys' file" if option == _KEYS else option for option in changed)
        by = f"a change of {' and '.join(names)}"
        with suppress(SettingsError), self._logging_failure(by):
            change = await self._configuration.reload_files()
            if change is not None:
                self._record_success(change, by)

    @contextmanager
    def _logging_failure(self, by: str) -> Iterator[None]:
        try:
            yield
        except SettingsError as error:
            self._metrics.config_reloads_total.labels("failed").inc()
            self._metrics.config_last_reload_successful.set(0)
            logger.error("reload: rejected, nothing has changed: requested by %s: %s", by, error)
            raise

    def _record_success(self, change: ConfigChange, by: str) -> None:
        self._apply_latest()
        for warning in set(self._applied_snapshot.settings.access_warnings).difference(self._logged_warnings):
            logger.warning("%s", warning)
        self._metrics.config_reloads_total.labels("ok").inc()
        self._metrics.config_last_reload_successful.set(1)
        logger.info("reload: applied: requested by %s: %s", by, change)
