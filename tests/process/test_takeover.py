"""The old process's side of a takeover, and sockets that systemd passes."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.process import takeover
from proxy.process.shared import ListeningSockets, create_shared_state
from proxy.process.supervisor.listening import create_listener, open_listeners, take_systemd_sockets
from proxy.process.takeover import Predecessor, Successor
from proxy.settings import Admin, Listen, LoadedSettings, Settings, SettingsError


@pytest.fixture
def successor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Successor]:
    """Return a function that starts a shell command as the successor."""

    def start(line: str) -> Successor:
        monkeypatch.setattr(takeover, "command_line", lambda: ["sh", "-c", line])
        return Successor({}, [[], {}])

    return start


def has_taken_over(successor: Successor) -> bool:
    while (found := successor.check_takeover()) is None:
        select.select([successor], [], [], 5)
    return found


def test_one_that_ends_has_not_taken_over(
    successor: Callable[[str], Successor], caplog: pytest.LogCaptureFixture
) -> None:
    assert not has_taken_over(successor("exit 2"))
    assert "takeover: failed, this process goes on serving: " in caplog.text


def test_one_that_does_not_get_ready_is_ended(
    successor: Callable[[str], Successor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "_READY_SECONDS", 0.01)
    slow = successor("exec sleep 60")
    while (found := slow.check_takeover()) is None:
        pass
    assert not found
    assert "is not ready after 0.01 s" in caplog.text
    _, status = os.waitpid(slow.pid, 0)
    assert os.WTERMSIG(status) == 15


def test_one_that_is_not_wanted_any_more_is_ended(
    successor: Callable[[str], Successor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    slow = successor("exec sleep 60")
    assert slow.check_takeover() is None
    slow.stop_process()
    assert f"takeover: successor stopped, because this process stops: process {slow.pid}" in caplog.text
    _, status = os.waitpid(slow.pid, 0)
    assert os.WTERMSIG(status) == 15
    assert slow.fileno() == -1


def test_program_that_is_not_there_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "command_line", lambda: ["/nowhere/pdproxy"])
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        Successor({}, [[], {}])
    assert os.listdir("/proc/self/fd") == before


def test_all_workers_have_to_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(
        takeover, "_spawn_successor", lambda text, fds: told.update(PDPROXY_PREDECESSOR=_kept(text)) or 1
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        old = Successor({"clients": listener}, [[], {"config": []}])
        new = Predecessor.from_environment(told)
        assert new is not None
        assert not told  # the next process is not notified
        assert new.sockets_by_name["clients"].getsockname() == listener.getsockname()
        assert new.roster_state == [[], {"config": []}]
        assert old.check_takeover() is None
        new.report_accepting(2)
        assert old.check_takeover() is None
        new.report_accepting(2)
        assert old.check_takeover() is True
        assert new.message_channel.recv(1) == b""
        new.report_accepting(2)  # a worker that takes the place of another
    for sock in (new.message_channel, *new.sockets_by_name.values()):
        sock.close()


def test_instances_that_cannot_be_read_are_missed_once(caplog: pytest.LogCaptureFixture) -> None:
    loaded = LoadedSettings(Settings.model_validate({"decode": ["127.0.0.1:1"], "connector": "plain"}), {})
    channel, other = socket.socketpair()
    with channel, other, ListeningSockets(create_listener("127.0.0.1", 0)) as listeners:
        create_shared_state(loaded, lambda: loaded, listeners, Predecessor(channel, {}, [[], {"config": []}]))
        assert not caplog.messages
        create_shared_state(loaded, lambda: loaded, listeners, Predecessor(channel, {}, [["of another version"]]))
    [told] = caplog.messages
    assert told.startswith("takeover: changes of instances at run time are lost")


def _kept(text: str) -> str:
    """Return the descriptors as another process inherits them."""
    fds = json.loads(text)
    sockets = {name: os.dup(fd) for name, fd in fds["sockets"].items()}
    return json.dumps({"channel": os.dup(fds["channel"]), "instances": os.dup(fds["instances"]), "sockets": sockets})


def test_process_without_takeover_variables_has_no_predecessor() -> None:
    assert Predecessor.from_environment({}) is None


def test_script_is_restarted_by_its_path_when_it_names_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "pdproxy"
    script.write_text("#!/opt/pdproxy/bin/python")
    script.chmod(0o755)
    monkeypatch.setattr("sys.orig_argv", ["python", str(script), "--port", "1"])
    assert takeover.command_line() == [str(script), "--port", "1"]
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "proxy", "--port", "1"])
    assert takeover.command_line()[1:] == ["-m", "proxy", "--port", "1"]


# Sockets that are given


def test_socket_that_is_given_is_listened_on() -> None:
    with create_listener("127.0.0.1", 0) as clients:
        settings = Settings(listen=Listen(port=clients.getsockname()[1]), admin=Admin(probe_port=0))
        with open_listeners(settings, {"clients": clients}) as listeners:
            assert listeners.clients is clients
            assert listeners.probes is not None
            assert listeners.probes is not clients


def test_passed_socket_without_a_configured_port_is_rejected() -> None:
    refused = pytest.raises(SettingsError, match="a socket for admin was passed, but no port is configured for it")
    with create_listener("127.0.0.1", 0) as unused, refused:
        open_listeners(Settings(listen=Listen(port=0)), {"admin": unused})


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_inherited_socket_must_have_the_configured_address(host: str) -> None:
    """Whether administration is for this host alone depends on it."""
    with create_listener(host, 0) as given:
        port = given.getsockname()[1] + (host == "127.0.0.1")
        with pytest.raises(SettingsError, match=rf"listens at {host}:\d+, but 127\.0\.0\.1:{port} is configured"):
            open_listeners(Settings(listen=Listen(port=port)), {"clients": given})


def test_inherited_socket_must_listen() -> None:
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        with pytest.raises(SettingsError, match="the socket for clients that this process was given does not listen"):
            open_listeners(Settings(listen=Listen(port=0)), {"clients": given})


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)]
)
def test_inherited_socket_must_be_one_for_tcp(family: socket.AddressFamily, kind: socket.SocketKind) -> None:
    refused = pytest.raises(
        SettingsError, match="the socket for clients that this process was given is not a TCP socket"
    )
    with socket.socket(family, kind) as given, refused:
        open_listeners(Settings(listen=Listen(port=0)), {"clients": given})


@pytest.mark.parametrize("names", ["clients:clients", "clients:other", "clients:admin:probes", ""])
def test_ambiguous_socket_names_are_rejected(names: str) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": names}
    with pytest.raises(SettingsError, match="FileDescriptorName="):
        take_systemd_sockets(environ)
    assert not environ


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_FDS": "1"}])
def test_descriptors_for_another_process_are_not_taken(environ: dict[str, str]) -> None:
    assert take_systemd_sockets(environ) == {}
