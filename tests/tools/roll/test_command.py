"""`pdproxy roll` as an operator says it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from proxy.__main__ import main
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.tools.roll.test_walk import PROBED, memberships, name_of, slow

PROXIES = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:1") | {"no_proxy": ""}
"""Environment with an HTTP proxy that does not exist. Tools connect to gateways directly."""


async def roll(gateway: Deployment, path: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "roll", "--role", "decode", "--url", gateway.url, *words),
        cwd=path,
        env={**os.environ, **PROXIES, "PYTHONPATH": os.getcwd()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_hook_restarts_each_and_ctrl_c_ends_it_when_none_is_away(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    first, second = gateway.decoders
    hook = "echo {role} {host} {port} {address} >> hooks; while test ! -e go; do sleep 0.05; done"
    words = ("--hook", hook, "--settle-seconds", "0")
    rolling = await roll(gateway, tmp_path, *words)
    async with asyncio.timeout(60):
        await until((tmp_path / "hooks").exists, "the hook")
        rolling.send_signal(signal.SIGINT)
        assert rolling.stdout is not None
        while b"another Ctrl-C" not in await rolling.stdout.readline():
            pass
        assert await memberships(gateway) == ["disabled", "enabled"]
        (tmp_path / "go").touch()
        said, _ = await rolling.communicate()
    assert rolling.returncode == 1
    assert said.decode().endswith(
        "pdproxy roll: stopped by hand\nrestarted so far: 1 instance; run the command again to resume\n"
    )
    assert await memberships(gateway) == ["enabled", "enabled"]
    rolling = await roll(gateway, tmp_path, *words)
    said, _ = await rolling.communicate()
    assert said.decode().startswith("resuming the roll of ")
    assert said.decode().endswith("all 1 are restarted; clients have seen 0 requests fail meanwhile\n")
    asked = [f"decode 127.0.0.1 {engine.port} {name_of(engine)}" for engine in (first, second)]
    assert (tmp_path / "hooks").read_text().splitlines() == asked
    assert not (tmp_path / "pdproxy-roll-decode.json").exists()


async def test_failing_hook_is_reported(deploy: Deploy, tmp_path: Path) -> None:
    gateway = await deploy(1, [slow(), slow()], health=PROBED)
    rolling = await roll(gateway, tmp_path, "--hook", "exit 3")
    said, _ = await rolling.communicate()
    name = name_of(gateway.decoders[0])
    assert rolling.returncode == 1
    assert f"pdproxy roll: the hook of {name} ended with code 3\n{name} is away, and may still be disabled" in (
        said.decode()
    )


async def test_dry_run_tells_the_plan(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gateway = await deploy(1, [slow(), slow()])
    words = ["roll", "--role", "decode", "--url", gateway.url, "--hook", "restart {address}", "--dry-run"]
    assert await asyncio.to_thread(main, words) == 0
    one, two = map(name_of, gateway.decoders)
    assert capsys.readouterr().out == (
        "2 decode instances, one at a time, with at least 1 other instance serving:\n"
        f"  {one}  0 in flight now; restarted: restart {one}\n"
        f"  {two}  0 in flight now; restarted: restart {two}\n"
    )
    assert await memberships(gateway) == ["enabled", "enabled"]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--role", "both"],
        ["--role", "decode", "--url", "gateway:1999"],
        ["--role", "decode", "--url", "http://gateway/metrics"],
        ["--role", "decode", "--hook", "restart {name}"],
        ["--role", "decode", "--hook", "for i in ${i}; do"],
        ["--role", "decode", "--min-serving", "-1"],
        ["--role", "decode", "--settle-seconds", "soon"],
        ["--role", "decode", "--admin-key-file", "/nowhere"],
    ],
)
def test_mistakes_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roll", *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith("pdproxy: error: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(("key", "problem"), [("s3cr3t\ns3cr3t", "must be printable ASCII"), ("\n", "is empty")])
def test_admin_key_that_cannot_be_sent_is_refused_and_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, problem: str
) -> None:
    (tmp_path / "key").write_text(key)
    line = ["roll", "--role", "decode", "--url", "http://h:1", "--hook", "x", "--admin-key-file", str(tmp_path / "key")]
    assert main(line) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert "s3cr3t" not in told


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--url", "http://root:s3cr3t@h:1"), "--url: must be http://host:port"),
        (("--url", "http://h:abc"), "--url: must be http://host:port"),
        (("--drain-seconds", "soon"), "--drain-seconds: must be a number of seconds, 0 or more"),
        (("--min-serving", "-1"), "--min-serving: must be a whole number, 0 or more"),
        (("--hook", "x {host.name}"), "--hook: knows {address}"),
    ],
)
def test_mistake_in_a_flag_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    assert main(["roll", "--role", "decode", "--hook", "x", *words]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert problem in told
    assert "s3cr3t" not in told


def test_server_that_is_no_gateway_is_reported(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            """Not on the test's terminal."""

    with ThreadingHTTPServer(("127.0.0.1", unused_tcp_port), Other) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{unused_tcp_port}"
            state = str(tmp_path / "state")
            assert main(["roll", "--role", "decode", "--hook", "x", "--url", url, "--state", state]) == 1
        finally:
            server.shutdown()
            serving.join()
    assert "does not answer like a gateway" in capsys.readouterr().err
