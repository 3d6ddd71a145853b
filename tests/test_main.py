"""The program from the outside: sub-commands, exit codes, and one sentence instead of a traceback."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

import proxy
from proxy.__main__ import main
from proxy.common.terms import format_count
from proxy.settings import load_settings

GUIDES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("guide_commands.yaml").read_text())


def words(line: str) -> list[str]:
    """Split a line as a shell does. shlex does not join lines at a backslash."""
    return shlex.split(line.replace("\\\n", " "))


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PROXY_") or name == "OPENAI_API_KEY":
            monkeypatch.delenv(name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "proxy", *arguments], capture_output=True, text=True, check=False)


@contextmanager
def gateway_answering(status: int) -> Iterator[int]:
    """Run a server that answers /livez with this status. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/livez" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server.server_port
        thread.join()


def test_command_line_of_the_kimi_k26_guide_is_accepted() -> None:
    found = load_settings(words(GUIDES["k2.6"]), {}).settings
    assert (found.listen.host, found.listen.port) == ("141.xx.xx.1", 1999)
    ports = range(7100, 7104)
    assert [str(e) for e in found.prefill] == [f"141.xx.xx.{node}:{port}" for node in (1, 2) for port in ports]
    assert [str(e) for e in found.decode] == [f"141.xx.xx.{node}:{port}" for node in (3, 4) for port in ports]


def test_command_line_of_the_kimi_k25_guide_is_accepted() -> None:
    found = load_settings(words(GUIDES["k2.5"]), {}).settings
    assert [str(e) for e in found.prefill] == [f"141.xx.xx.{n}:{port}" for n in (1, 2) for port in (7100, 7101)]
    assert [str(e) for e in found.decode] == [f"141.xx.xx.{n}:{port}" for n in (3, 4) for port in range(7100, 7116)]


@pytest.mark.parametrize("line", GUIDES.values(), ids=GUIDES)
def test_check_config_says_ok(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", *words(line)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


@pytest.mark.parametrize(
    ("host", "variables", "notes"),
    [
        ("127.0.0.1", {}, []),
        ("localhost", {}, []),
        ("0.0.0.0", {}, ["every client that can reach 0.0.0.0 is served without a key", "administration is closed"]),
        ("0.0.0.0", {"PROXY_AUTH__ADMIN_KEY": "k-1"}, ["every client that can reach 0.0.0.0 is served without a key"]),
        ("10.0.0.1", {"PROXY_ADMIN__PORT": "9000"}, ["every client that can reach 10.0.0.1 is served without a key"]),
        ("127.0.0.1", {"PROXY_ADMIN__PORT": "9000", "PROXY_ADMIN__HOST": "::"}, ["administration is closed"]),
        ("127.0.0.1", {"PROXY_ADMIN__TRUST_LOCAL": "true"}, ["every program on this host may administer"]),
        ("127.0.0.1", {"PROXY_ADMIN__TRUST_LOCAL": "true", "PROXY_AUTH__ADMIN_KEY": "k-1"}, []),
    ],
)
def test_check_config_prints_access_rules(
    host: str,
    variables: dict[str, str],
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["check-config", "--prefill", "p:1", "--decode", "d:1", "--host", host]) == 0
    output = capsys.readouterr().out.splitlines()[1:]
    assert [re.split("[:,]", line.removeprefix("note: "))[0] for line in output] == notes


def test_check_config_reports_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--decode", "a"]) == 2
    assert capsys.readouterr().err == "pdproxy: error: --decode: 'a' has no port: write it as host:port\n"


@pytest.mark.parametrize("command", ["check-config", "print-config"])
def test_check_config_warns_of_probable_mistakes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROXY_WORKER", "4")
    assert main([command, "--prefill", "p:1", "--decode", "d:1", "--port", "1", "--port", "2"]) == 0
    out, err = capsys.readouterr()
    assert "warning" not in out
    assert err.splitlines() == [
        "pdproxy: warning: --port is given 2 times: the last value applies",
        "pdproxy: warning: PROXY_WORKER is no option and is ignored: did you mean PROXY_WORKERS?",
    ]


def test_check_config_reads_the_keys_of_clients_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    monkeypatch.setenv("PROXY_AUTH__CLIENT_KEYS_FILE", str(keys))
    assert main(["check-config", "--prefill", "p:1", "--decode", "d:1"]) == 2
    assert capsys.readouterr().err.startswith(f"pdproxy: error: {keys} holds no key")
    keys.write_text("keys: [{name: a, key: sk-1}]")
    assert main(["check-config", "--prefill", "p:1", "--decode", "d:1"]) == 0


def test_print_config_prints_yaml_even_without_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print-config", "--port", "5"]) == 0
    out = capsys.readouterr().out
    assert "  port: 5  # --port\n" in out
    assert yaml.safe_load(out)["prefill"] == []


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_exit_with_0(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 0
    assert (proxy.__version__ if flag == "--version" else "--prefiller-hosts") in capsys.readouterr().out


@pytest.mark.parametrize("line", ["help", "help doctor", "version", "serve --help", "serve --version"])
def test_commands_about_the_program_exit_with_0(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(line.split()) == 0
    except SystemExit as left:
        assert left.code == 0  # noqa: PT017 argparse leaves after its help
    expected = {"help": "--prefiller-hosts", "help doctor": "--canaries", "serve --help": "usage: pdproxy serve "}
    assert expected.get(line, f"pdproxy {proxy.__version__}") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("doctr", "unknown command doctr (did you mean doctor?)"),
        ("check_config", "unknown command check_config (did you mean check-config?)"),
        ("start --port 1", "unknown command start (did you mean serve?)"),
        ("status", "unknown command status (did you mean top?)"),
        ("help doctr", "unknown command doctr (did you mean doctor?)"),
        (
            "frobnicate",
            (
                "unknown command frobnicate: use serve, print-config, check-config, health, doctor, top, advise,"
                " launch, roll, mock-engine, completion, help or version"
            ),
        ),
        ("version now", "unrecognized arguments: now"),
    ],
)
def test_unknown_command_gets_a_suggestion(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"pdproxy: error: {sentence}\n"


def test_command_line_without_arguments_names_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.endswith("or a --config file; `pdproxy --help` lists all flags\n")


@pytest.mark.parametrize(
    "line",
    [
        "--prefiller-hosts a b c --prefiller-ports 1 2 --decode d:1",
        "--frobnicate 1",
        "check-config --config /nowhere.yaml",
    ],
)
def test_mistake_prints_one_sentence_and_exits_with_2(line: str) -> None:
    result = run(*line.split())
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("pdproxy: error: ")
    assert result.stderr.count("\n") == 1


def test_taken_port_prints_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port), "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
def test_health_asks_the_gateway_whether_it_is_alive(status: int, exit_code: int) -> None:
    with gateway_answering(status) as port:
        assert main(["health", "--host", "0.0.0.0", "--port", str(port)]) == exit_code


def test_health_asks_the_port_for_probes_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway_answering(200) as port, socket.create_server(("127.0.0.1", 0)) as clients:
        monkeypatch.setenv("PROXY_ADMIN__PROBE_PORT", str(port))
        monkeypatch.setenv("PROXY_ADMIN__HOST", "0.0.0.0")
        assert main(["health", "--port", str(clients.getsockname()[1])]) == 0


def test_health_fails_without_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound_but_not_listening:
        bound_but_not_listening.bind(("127.0.0.1", 0))
        port = bound_but_not_listening.getsockname()[1]
        assert main(["health", "--port", str(port)]) == 1
    assert f"127.0.0.1 port {port} does not answer" in capsys.readouterr().err


def test_health_exits_with_0_or_1_only() -> None:
    assert main(["health", "--frobnicate"]) == 1


@contextmanager
def interrupts(disposition: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    """Set the disposition of SIGINT, which child processes inherit if it is ignored."""
    before = signal.signal(signal.SIGINT, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# In the background of a script, and so under `nohup scripts/test &`, tests run with interrupts ignored.
@pytest.mark.parametrize("around", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_interrupt_prints_no_traceback(around: Callable[..., object] | signal.Handlers) -> None:
    with interrupts(around), socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "proxy", "health", "--port", str(silent.getsockname()[1])]
        with interrupts(signal.default_int_handler):
            started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        with started as process, silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate()
    assert process.returncode == 130
    assert err == ""


@pytest.mark.parametrize("words", [["completion", "bash"], ["check-config", "--decode", "h:1", "--prefill", "h:2"]])
def test_closed_pipe_prints_no_traceback(words: list[str]) -> None:
    """The first command writes more than fits into the buffer of standard output, the second one less."""
    command = [sys.executable, "-m", "proxy", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the program has written, which is after its imports
        errors = process.stderr.read()
        assert (process.wait(), errors) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(("number", "words"), [(0, "0 workers"), (1, "1 worker"), (2, "2 workers")])
def test_count_agrees_with_its_noun(number: int, words: str) -> None:
    assert format_count(number, "worker") == words
