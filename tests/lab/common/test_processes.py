"""Programs of scripts: their output is kept, they restart, and they always end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from lab.common.processes import Program, fetch, quiet_ports

SERVER = """
import http.server, signal, sys
print("begun", flush=True)
{ignoring}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def server(directory: Path, ignoring: str = "") -> Program:
    (port,) = quiet_ports(1)
    command = [sys.executable, "-c", SERVER.format(ignoring=ignoring), str(port)]
    return Program(name="a server", command=command, port=port, output=directory / "log", ready_path="/")


def test_program_answers_in_its_block_and_restarts(tmp_path: Path) -> None:
    with server(tmp_path) as program:
        assert fetch(program.url + "/")
        program.end(signal.SIGKILL)
        assert program.has_ended
        program.restart()
        assert fetch(program.url + "/")
    assert program.has_ended
    assert program.text().count("begun") == 2


def test_stopped_program_ends(tmp_path: Path) -> None:
    with server(tmp_path) as program:
        program.send(signal.SIGSTOP)
    assert program.has_ended


def test_program_that_ends_at_once_is_named_with_its_output(tmp_path: Path) -> None:
    program = server(tmp_path, "raise SystemExit('no licence')")
    with pytest.raises(SystemExit, match=r"a server did not start; its output ends with:\n(?s:.*)no licence"):
        program.__enter__()


def test_quiet_ports_are_returned_once() -> None:
    assert not set(quiet_ports(5)) & set(quiet_ports(5))
