"""The configuration that all processes share, and the only way to another one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from proxy.balancer.roster import CONFIG
from proxy.balancer.shared.memory import SharedValue
from proxy.fleet.discovery.sources import configured_instances
from proxy.gateway.api_keys import assign_slots
from proxy.process.configuration.snapshot import ConfigSnapshot, from_json, option_of, to_json
from proxy.settings import OPTIONS, Loaded, Settings, SettingsError, load_client_keys
from proxy.settings.change import ConfigChange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.balancer.roster import Roster
    from proxy.process.configuration.snapshot import Stamp

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
"""Options that a running gateway is built on: its processes, sockets, routes and memory, the form of its log, and who
is told of traces or loads."""

_CAPACITY_BYTES: Final = 8 * 1024 * 1024  # 1,024 instances with the longest names take 300 KiB


class Configuration:
    """What all processes agree on. Make it before forking."""

    def __init__(self, loaded: Loaded, load: Callable[[], Loaded], roster: Roster) -> None:
        """`loaded` is what is in force at first, and `roster` has its instances. `load` reads it again.

        Raises SettingsError.
        """
        self._load = load
        self._roster = roster
        self._shared = SharedValue("configuration", _CAPACITY_BYTES)
        self._read_version = 0
        self._current = _current(loaded, {}, _stamp(loaded.settings), time.time())
        self._shared.write(to_json(self._current))

    def current(self) -> ConfigSnapshot:
        """The newest. It is the same object as long as nothing is published."""
        if self._shared.version != self._read_version:
            self._read_version, value = self._shared.read()
            self._current = from_json(value)
        return self._current

    async def reload(self, *, is_dry_run: bool = False) -> ConfigChange:
        """Read everything again and publish it. Raises SettingsError, and then nothing has changed. `is_dry_run`:
        nothing is published, and what is returned or raised is what would be.
        """
        while (change := await self._replace(self._load, is_dry_run=is_dry_run)) is None:
            pass
        return change

    def new_keys_stamp(self) -> Stamp | None:
        """The stamp of the file of client keys if that has changed since it was read last; None: it has not changed, or
        does not exist any more.
        """
        current = self.current()
        stamp = _stamp(current.settings)
        return stamp if stamp != current.keys_stamp else None

    async def reload_keys(self) -> ConfigChange | None:
        """Read the file of client keys again and publish them. None: another worker was faster.

        Raises SettingsError, in one worker for one state of the file, and then the keys are what they were.
        """
        before, version = self.current(), self._read_version
        stamp = _stamp(before.settings)
        try:
            return await self._replace(partial(_with_keys_anew, before))
        except SettingsError:
            with self._shared.exclusive():
                if self._shared.version != version:
                    return None
                self._publish(before, replace(before, keys_stamp=stamp))
            raise

    async def _replace(self, load: Callable[[], Loaded], *, is_dry_run: bool = False) -> ConfigChange | None:
        """Publish what `load` gives. None: somebody else published meanwhile, perhaps what is newer."""
        before, version, read_at = self.current(), self._read_version, time.time()
        stamp = _stamp(before.settings)
        # A long file takes a while to be parsed, and a slow disk to be read: streams go on meanwhile.
        loaded = await asyncio.to_thread(load)
        after = _current(loaded, before.slots, stamp, read_at)
        with self._shared.exclusive():
            is_newest = self._shared.version == version
            return self._publish(before, after, is_dry_run=is_dry_run) if is_newest else None

    def _publish(self, before: ConfigSnapshot, after: ConfigSnapshot, *, is_dry_run: bool = False) -> ConfigChange:
        """Raises SettingsError. The caller holds the lock."""
        changed = [name for name in OPTIONS if option_of(before.settings, name) != option_of(after.settings, name)]
        fixed: list[str] = [name for name in FIXED if name in changed]
        if fixed:
            raise SettingsError(f"{' and '.join(fixed)} cannot change while the gateway runs: restart it")
        if before.settings.has_encoders != after.settings.has_encoders:
            raise SettingsError("encode: adding the first or removing the last encode instance requires a restart")
        if before.client_keys != after.client_keys and "auth.client_keys_file" not in changed:
            changed.append("auth.client_keys_file")  # what is in it
        try:
            commit = self._shared.prepare(to_json(after))
            # Only what was read again may bring back what an administrator has removed.
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


def _current(loaded: Loaded, slots_before: Mapping[str, int], stamp: Stamp | None, read_at: float) -> ConfigSnapshot:
    """Raises SettingsError when there are more client keys than can be counted."""
    try:
        slots = assign_slots((key.name for key in loaded.client_keys), slots_before)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return ConfigSnapshot(loaded.settings, read_at, loaded.client_keys, slots, stamp, loaded.origins)


def _with_keys_anew(before: ConfigSnapshot) -> Loaded:
    """Raises SettingsError."""
    path = before.settings.auth.client_keys_file
    return Loaded(before.settings, before.origins, () if path is None else load_client_keys(path))


def _stamp(settings: Settings) -> Stamp | None:
    """Of the file of client keys; None when there is none, or it cannot be seen."""
    path = settings.auth.client_keys_file
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
