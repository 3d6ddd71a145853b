"""The configuration that all workers share: replaced as a whole or not at all, and followed by each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.balancer.roster import CONFIG, Roster
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Role
from proxy.observe.metrics import Metrics
from proxy.process.configuration import FIXED, ConfigSnapshot, ConfigWatcher, SharedConfiguration, masked_options
from proxy.settings import OPTIONS, LoadedSettings, Settings, SettingsError, load_settings
from proxy.settings.load import ConfigChange
from proxy.settings.sources import read_option
from tests.asking import until
from tests.forking import in_child


class Files:
    """The files that an operator edits, and the configuration that reads them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "my.yaml"
        self.keys_path = directory / "keys.yaml"
        self.before_load: Callable[[], None] = lambda: None
        self.loads = 0
        self.write("prefill: [p:1, p:2]\ndecode: [d:1, d:2]")
        settings = self.load().settings
        prefill, decode = ([(e.host, e.port) for e in role] for role in (settings.prefill, settings.decode))
        self.scoreboard = Scoreboard(slots=8)
        self.roster = Roster(prefill, decode, self.scoreboard)
        self.configuration = SharedConfiguration(self.load(), self.load, self.roster)
        self.loads = 0

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def write_keys(self, text: str, path: Path | None = None) -> None:
        (path or self.keys_path).write_text(text)

    def load(self) -> LoadedSettings:
        self.loads += 1
        self.before_load()
        return load_settings(["--config", str(self.path)], {})

    @property
    def settings(self) -> Settings:
        return self.configuration.current_snapshot().settings

    def members(self) -> list[str]:
        """All instances with their state; `!` those that are not given the engine key."""
        return [
            f"{member.backend.name}{'' if member.backend.is_trusted else '!'}{' draining' * member.is_draining}"
            for role in Role
            for member in self.roster.members_of_role(role)
        ]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


INSTANCES = "prefill: [p:1, p:2]\ndecode: [d:1, d:2]\n"


# Values


async def test_shown_configuration_has_all_options_with_origins_and_no_key(files: Files) -> None:
    files.write(INSTANCES + "auth: {admin_key: canary-1, engine_api_key: canary-2}\nretry: {max_delay_seconds: 7.5}")
    await files.configuration.reload_all()
    files.write_keys("keys: [{name: a, key: canary-3}]")
    files.configuration._read_version = 0  # as another process reads it
    told = masked_options(files.configuration.current_snapshot())
    options = {option["name"]: (option["value"], option["origin"]) for option in told["options"]}
    assert options.keys() == OPTIONS.keys()
    assert options["retry.max_delay_seconds"] == (7.5, str(files.path))
    assert options["listen.host"] == ("127.0.0.1", "default")
    assert options["auth.admin_key"] == ("**********", str(files.path))
    assert "canary-" not in str(told)
    assert told["read_at"] == files.configuration.current_snapshot().read_at


def test_every_option_arrives_in_another_process_as_it_is(files: Files, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary-2")
    files.write_keys("keys: [{name: a, key: sk-1, max_concurrent: 3}, {name: b, key: sk-2, requests_per_minute: 60}]")
    files.write(
        INSTANCES
        + f"""
workers: 3
admin: {{port: 7, networks: [10.0.0.0/8]}}
listen: {{host: "::1", max_connections: 5}}
retry: {{max_delay_seconds: 7.5}}
kv: {{pin_seconds: 3}}
auth: {{engine_api_key: canary-1, admin_key_file: {secret}, client_keys_file: {files.keys_path}}}
"""
    )
    loaded = files.load()
    configuration = SharedConfiguration(loaded, files.load, files.roster)

    def look() -> None:
        configuration._read_version = 0
        found = configuration.current_snapshot()
        assert {name: read_option(found.settings, name) for name in OPTIONS} == {
            name: read_option(loaded.settings, name) for name in OPTIONS
        }
        assert found.settings.auth.engine_api_key is not None
        assert found.settings.auth.engine_api_key.get_secret_value() == "canary-1"
        assert found.client_keys == loaded.client_keys
        assert found.slots_by_key == {"a": 0, "b": 1}

    in_child(look)


def test_current_configuration_is_one_object_until_the_next_reload(files: Files) -> None:
    assert files.configuration.current_snapshot() is files.configuration.current_snapshot()


def test_more_client_keys_than_can_be_counted_are_refused(files: Files) -> None:
    entries = ", ".join(f"{{name: n{number}, key: k{number}}}" for number in range(1025))
    files.write_keys(f"keys: [{entries}]")
    files.write(INSTANCES + f"auth: {{client_keys_file: {files.keys_path}}}")
    with pytest.raises(SettingsError, match="there are 1025 client keys"):
        SharedConfiguration(files.load(), files.load, files.roster)


# Reloading


async def test_reload_returns_the_changes(files: Files) -> None:
    assert await files.configuration.reload_all() == ConfigChange()
    files.write("prefill: [p:1, p:3]\ndecode: [d:1, d:2]\ntimeouts: {idle_seconds: 7}\nauth: {admin_key: canary}")
    change = await files.configuration.reload_all()
    assert change == ConfigChange(("prefill", "timeouts.idle_seconds", "auth.admin_key"), ("p:3",), ("p:2",))
    assert str(change) == "changed prefill, timeouts.idle_seconds, auth.admin_key; added p:3; removed p:2"
    assert files.settings.timeouts.idle_seconds == 7
    assert files.members() == ["p:1", "p:2 draining", "p:3", "d:1", "d:2"]


async def test_dry_run_returns_the_changes_and_applies_none(files: Files) -> None:
    before, roster = files.configuration.current_snapshot(), files.roster.version_cells[0]
    files.write("prefill: [p:1, p:3]\ndecode: [d:1, d:2]\ntimeouts: {idle_seconds: 7}")
    change = await files.configuration.reload_all(is_dry_run=True)
    assert change == ConfigChange(("prefill", "timeouts.idle_seconds"), ("p:3",), ("p:2",))
    assert files.configuration.current_snapshot() is before
    assert files.roster.version_cells[0] == roster
    assert await files.configuration.reload_all() == change
    files.write("decode: [p:1]\nconnector: plain")
    with pytest.raises(SettingsError, match="connector cannot change"):
        await files.configuration.reload_all(is_dry_run=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("timeouts: {idle_seconds: 7}\nworkers: many", "my.yaml: workers must be a valid integer, not 'many'"),
        ("timeouts: {idle_seconds: 7}\nfrobnicate: 1", "my.yaml: unknown option frobnicate"),
        ("timeouts: {idle_seconds: 7", "my.yaml, line "),
        ("timeouts: {idle_seconds: 7}\ndecode: [d:1, d:1]", "d:1 is given twice as a decoder"),
        ("timeouts: {idle_seconds: 7}\nauth: {admin_key_file: /nowhere}", "/nowhere cannot be read"),
        ("timeouts: {idle_seconds: 7}\nauth: {client_keys_file: /nowhere}", "/nowhere cannot be read"),
    ],
)
async def test_mistake_changes_nothing_and_is_one_sentence(files: Files, text: str, sentence: str) -> None:
    before = files.configuration.current_snapshot()
    members = files.members()
    files.write(f"prefill: [p:1, p:3]\n{'' if 'decode' in text else 'decode: [d:1]'}\n{text}")
    with pytest.raises(SettingsError) as refused:
        await files.configuration.reload_all()
    assert sentence in str(refused.value)
    assert files.configuration.current_snapshot() is before
    assert files.members() == members


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("connector: plain", "connector"),
        ("workers: 2", "workers"),
        ("passthrough: [pooling]", "passthrough"),
        ("listen: {host: 127.0.0.2, port: 7, backlog: 1}", "listen.host and listen.port and listen.backlog"),
        ("admin: {host: 127.0.0.2, port: 7, probe_port: 8}", "admin.host and admin.port and admin.probe_port"),
        ("log: {format: text}", "log.format"),
    ],
)
async def test_reload_cannot_change_fixed_options(files: Files, text: str, names: str) -> None:
    before = files.configuration.current_snapshot()
    instances = "decode: [d:1, d:2]" if "plain" in text else INSTANCES
    files.write(f"{instances}\n{text}\ntimeouts: {{idle_seconds: 7}}")
    with pytest.raises(SettingsError, match=rf"^{names} cannot change while the gateway runs: restart it$"):
        await files.configuration.reload_all()
    assert files.configuration.current_snapshot() is before
    assert files.members() == ["p:1", "p:2", "d:1", "d:2"]


async def test_encoders_come_and_go_but_not_from_or_to_none(files: Files) -> None:
    files.write(INSTANCES + "encode: [e:1]")
    with pytest.raises(
        SettingsError, match=r"^encode: adding the first or removing the last encode instance requires a restart$"
    ):
        await files.configuration.reload_all()
    assert files.members() == ["p:1", "p:2", "d:1", "d:2"]
    configuration = SharedConfiguration(files.load(), files.load, files.roster)
    members = [member.backend for role in Role for member in files.roster.members_of_role(role)]
    files.roster.sync_origin(CONFIG, [*members, Backend(Role.ENCODE, "e", 1, is_trusted=True)])
    files.write(INSTANCES + "encode: [e:2]")
    change = await configuration.reload_all()
    assert (change.options, change.added, change.removed) == (("encode",), ("e:2",), ("e:1",))
    files.write(INSTANCES)
    with pytest.raises(SettingsError, match=r"^encode: adding the first"):
        await configuration.reload_all()


def test_only_options_are_fixed() -> None:
    assert set(FIXED) <= set(OPTIONS)


async def test_reload_reads_its_file_again_when_another_worker_was_faster(files: Files) -> None:
    """A file that was read before another worker published may be the older one."""

    def interfere() -> None:
        files.before_load = lambda: None
        files.write(INSTANCES + "timeouts: {idle_seconds: 2}")
        in_child(lambda: asyncio.run(files.configuration.reload_all()))
        files.write(INSTANCES + "timeouts: {idle_seconds: 3}")

    files.before_load = interfere
    assert await files.configuration.reload_all() == ConfigChange(("timeouts.idle_seconds",))
    assert files.loads == 2
    assert files.settings.timeouts.idle_seconds == 3


# Instances


async def test_instances_added_at_run_time_stay(files: Files) -> None:
    files.roster.add_for_administrator(Backend(Role.DECODE, "d", 9))
    files.write("prefill: [p:1]\ndecode: [d:1]")
    assert (await files.configuration.reload_all()).removed == ("p:2", "d:2")
    assert files.members() == ["p:1", "p:2 draining", "d:1", "d:2 draining", "d:9!"]


async def test_instances_of_the_configuration_are_there_whatever_was_done_to_them(files: Files) -> None:
    files.roster.remove_backend(Role.PREFILL, "p", 1)
    files.roster.drop_drained_backends()
    files.roster.remove_backend(Role.PREFILL, "p", 2)
    files.roster.add_for_administrator(Backend(Role.DECODE, "d", 3))
    files.write("prefill: [p:1, p:2]\ndecode: [d:1, d:2, d:3]")
    assert (await files.configuration.reload_all()).added == ("p:1", "p:2")
    assert sorted(files.members()) == ["d:1", "d:2", "d:3", "p:1", "p:2"]


async def test_prefillers_bootstrap_port_is_read_again(files: Files) -> None:
    files.write("prefill: ['p:1 8998', p:2, 'p:3 8999']\ndecode: [d:1, d:2]")
    assert (await files.configuration.reload_all()).options == ("prefill",)
    ports = {
        member.backend.name: member.backend.bootstrap_port for member in files.roster.members_of_role(Role.PREFILL)
    }
    assert ports == {"p:1": 8998, "p:2": None, "p:3": 8999}


async def test_instance_cannot_take_the_other_role_in_one_step(files: Files) -> None:
    before = files.configuration.current_snapshot()
    files.write("prefill: [p:1]\ndecode: [d:1, d:2, p:2]\ntimeouts: {idle_seconds: 7}")
    with pytest.raises(SettingsError, match=r"^p:2 is already a prefill instance$"):
        await files.configuration.reload_all()
    assert files.configuration.current_snapshot() is before
    assert files.members() == ["p:1", "p:2", "d:1", "d:2"]


async def test_more_instances_than_there_is_room_for_change_nothing(files: Files) -> None:
    before = files.configuration.current_snapshot()
    files.write("prefill: [p:1]\ndecode: [d:1-9]")
    with pytest.raises(SettingsError, match="no room for another instance"):
        await files.configuration.reload_all()
    assert files.configuration.current_snapshot() is before
    assert files.members() == ["p:1", "p:2", "d:1", "d:2"]


# The keys of clients


@pytest.fixture
async def keyed(files: Files) -> Files:
    """Files with two client keys."""
    files.write_keys("keys: [{name: a, key: sk-1}, {name: b, key: sk-2}]")
    files.write(INSTANCES + f"auth: {{client_keys_file: {files.keys_path}}}")
    await files.configuration.reload_all()
    await files.configuration.reload_files()  # their file was not known when it was read
    assert files.configuration.changed_stamps() == {}
    return files


async def test_keys_come_with_the_settings(keyed: Files) -> None:
    keyed.write_keys("keys: [{name: b, key: sk-2}, {name: c, key: sk-3}]")
    assert await keyed.configuration.reload_all() == ConfigChange(("auth.client_keys_file",))
    current = keyed.configuration.current_snapshot()
    assert [key.name for key in current.client_keys] == ["b", "c"]
    assert current.slots_by_key["b"] == 1


async def test_keys_are_read_again_alone_and_each_keeps_its_slot(keyed: Files) -> None:
    keyed.write_keys("keys: [{name: b, key: sk-2}]")
    keyed.write(INSTANCES + "timeouts: {idle_seconds: 7}")  # a reload of keys must not apply this
    keyed.roster.remove_backend(Role.DECODE, "d", 1)
    assert keyed.configuration.changed_stamps() != {}
    assert await keyed.configuration.reload_files() == ConfigChange(("auth.client_keys_file",))
    assert keyed.configuration.changed_stamps() == {}
    assert keyed.settings.timeouts.idle_seconds == 300
    assert keyed.configuration.current_snapshot().slots_by_key == {"b": 1}
    assert "d:1 draining" in keyed.members()


async def test_invalid_keys_file_is_logged_once_and_keeps_the_old_keys(keyed: Files) -> None:
    keyed.write_keys("keys: [{name: a}]")
    before = keyed.configuration.current_snapshot()

    def the_other_worker() -> None:
        with pytest.raises(SettingsError, match=r"keys\.yaml: entry 1 must have either"):
            asyncio.run(keyed.configuration.reload_files())

    in_child(the_other_worker)
    assert keyed.configuration.changed_stamps() == {}
    assert keyed.configuration.current_snapshot().client_keys == before.client_keys


async def test_keys_whose_file_has_gone_stay(keyed: Files) -> None:
    keyed.keys_path.unlink()
    assert keyed.configuration.changed_stamps() == {}
    assert len(keyed.configuration.current_snapshot().client_keys) == 2


async def test_keys_are_read_again_when_their_file_is_another(keyed: Files, tmp_path: Path) -> None:
    """It was not looked at before it was read, so it may have been written meanwhile."""
    other = tmp_path / "other.yaml"
    keyed.write_keys("keys: [{name: c, key: sk-3}]", other)
    keyed.write(INSTANCES + f"auth: {{client_keys_file: {other}}}")
    await keyed.configuration.reload_all()
    assert [key.name for key in keyed.configuration.current_snapshot().client_keys] == ["c"]
    assert keyed.configuration.changed_stamps() != {}
    assert await keyed.configuration.reload_files() == ConfigChange()
    assert keyed.configuration.changed_stamps() == {}


# Following


class Part:
    """A worker that only follows."""

    def __init__(self, configuration: SharedConfiguration) -> None:
        self.metrics = Metrics()
        self.applied: list[ConfigSnapshot] = []
        self.watcher = ConfigWatcher(configuration, configuration.current_snapshot(), self.applied.append, self.metrics)

    def metric(self, name: str) -> dict[str, float]:
        """Return the samples of a metric by label; "" is the label of a metric without labels."""
        return {
            next(iter(sample.labels.values()), ""): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == f"pdproxy_{name}"
        }


async def test_all_workers_follow_whichever_reloads(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.configuration")
    async with AsyncExitStack() as stack:
        one, other = parts = [Part(files.configuration) for _ in range(2)]
        for part in parts:
            await stack.enter_async_context(part.watcher)
        files.write(INSTANCES + "timeouts: {idle_seconds: 7}")
        assert (await one.watcher.reload_and_apply("a test")).options == ("timeouts.idle_seconds",)
        assert one.applied == [files.configuration.current_snapshot()]
        other.watcher.apply_new_configuration()
        assert other.applied == one.applied
    assert [line.getMessage() for line in caplog.records] == [
        "reload: applied: requested by a test: changed timeouts.idle_seconds"
    ]
    assert one.metric("config_reloads_total") == {"ok": 1.0, "failed": 0.0}
    assert one.metric("config_last_reload_successful") == {"": 1.0}
    assert other.metric("config_reloads_total") == {"ok": 0.0, "failed": 0.0}
    for part in parts:
        assert part.metric("config_last_reload_success_timestamp_seconds") == {
            "": files.configuration.current_snapshot().read_at
        }


async def test_refused_reload_is_counted_and_one_line(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    part = Part(files.configuration)
    read_at = files.configuration.current_snapshot().read_at
    async with part.watcher:
        files.write(INSTANCES + "workers: many")
        with pytest.raises(SettingsError):
            await part.watcher.reload_and_apply("a test")
        part.watcher.begin_reload("SIGHUP")
        await until(lambda: part.metric("config_reloads_total")["failed"] == 2, "both to be refused")
        assert part.metric("config_last_reload_successful") == {"": 0.0}
    sentence = f"{files.path}: workers must be a valid integer, not 'many'"
    assert [line.getMessage() for line in caplog.records] == [
        f"reload: rejected, nothing has changed: requested by {by}: {sentence}" for by in ("a test", "SIGHUP")
    ]
    assert part.applied == []
    assert part.metric("config_last_reload_success_timestamp_seconds") == {"": read_at}


async def test_reload_in_the_background_is_applied(files: Files) -> None:
    part = Part(files.configuration)
    async with part.watcher:
        files.write(INSTANCES + "timeouts: {idle_seconds: 7}")
        part.watcher.begin_reload("SIGHUP")
        await until(lambda: part.applied, "it")
    assert part.applied[0].settings.timeouts.idle_seconds == 7


async def test_reload_that_fails_by_our_own_fault_shows(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("our own fault")

    part = Part(files.configuration)
    async with part.watcher:
        files.before_load = fail
        part.watcher.begin_reload("SIGHUP")
        await until(lambda: "our own fault" in caplog.text, "it")


async def test_keys_file_is_looked_at_all_the_time(keyed: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.configuration")
    parts = [Part(keyed.configuration) for _ in range(2)]

    def all_look(name: str) -> bool:
        """Whether all workers have this key now."""
        for part in parts:
            part.watcher.apply_new_configuration()
        return all(part.applied and name in part.applied[-1].slots_by_key for part in parts)

    async with AsyncExitStack() as stack:
        for part in parts:
            await stack.enter_async_context(part.watcher)
        keyed.write_keys("keys: [{name: c, key: sk-3}]")
        await until(lambda: all_look("c"), "the new keys")
        keyed.write_keys("nonsense")
        await until(lambda: all_look("c") and "rejected" in caplog.text, "the mistake to be noticed")
        new = keyed.keys_path.with_suffix(".new")
        keyed.write_keys("keys: [{name: d, key: sk-4}]", new)
        new.rename(keyed.keys_path)
        await until(lambda: all_look("d"), "the newest keys")
    by = "a change of the client keys' file"
    assert [line.getMessage().partition(" must hold")[0] for line in caplog.records] == [
        f"reload: applied: requested by {by}: changed auth.client_keys_file",
        f"reload: rejected, nothing has changed: requested by {by}: {keyed.keys_path}",
        f"reload: applied: requested by {by}: changed auth.client_keys_file",
    ]
    counts: list[Any] = [part.metric("config_reloads_total") for part in parts]
    assert {result: sum(count[result] for count in counts) for result in counts[0]} == {"ok": 2.0, "failed": 1.0}


async def test_keys_file_that_is_being_written_is_left_alone(keyed: Files) -> None:
    part = Part(keyed.configuration)
    async with part.watcher:
        for count in range(1, 4):  # at each look it is another
            keyed.write_keys("keys:" + "\n  - {name: n, key: k}" * count)
            part.watcher.apply_new_configuration()
            await asyncio.sleep(0)
            assert part.metric("config_reloads_total") == {"ok": 0.0, "failed": 0.0}
        part.watcher.apply_new_configuration()
        await until(lambda: part.metric("config_reloads_total")["failed"], "it to be read")


async def test_reload_keeps_the_tls_of_configured_instances(files: Files) -> None:
    files.write("prefill: [https://p:1]\ndecode: [d:1]")
    await files.configuration.reload_all()
    assert [member.backend.tls for role in Role for member in files.roster.members_of_role(role) if member.origins] == [
        True,
        False,
    ]
    await files.configuration.reload_all()
    assert [member.backend.tls for member in files.roster.members_of_role(Role.PREFILL) if member.origins] == [True]
