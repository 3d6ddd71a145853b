"""`pdproxy doctor` as a program."""

from __future__ import annotations

import asyncio
import os
import sys

import orjson
import pytest

from proxy.__main__ import main
from proxy.sim.engine import SimulatedEngine


async def doctor(*flags: str) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PROXY_", "OPENAI_"))}
    words = (sys.executable, "-m", "proxy", "doctor", *flags)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, env=environ)
    out, error = await program.communicate()
    return program.returncode or 0, out.decode(), error.decode()


async def test_decoder_that_fetches_nothing_is_found_by_the_program() -> None:
    async with (
        SimulatedEngine(role="prefill") as prefiller,
        SimulatedEngine(role="decode") as well,
        SimulatedEngine(role="decode", protocol="none") as deaf,
    ):
        code, told, error = await doctor("--prefill", prefiller.url, "--decode", well.url, deaf.url, "--port", "0")
    assert (code, error) == (2, "")
    assert f"✗ decode 127.0.0.1:{deaf.port}" in told
    assert "→ Check that --kv-transfer-config is set" in told
    assert f"✓ 127.0.0.1:{prefiller.port} → 127.0.0.1:{well.port}" in told


async def test_doctor_reports_unreachable_engines_as_json() -> None:
    code, told, error = await doctor(
        "--json", "--canaries", "0", "--prefill", "127.0.0.3:9", "--decode", "127.0.0.1:9", "127.0.0.2:9", "--port", "0"
    )
    found = [(finding["severity"], finding["check"]) for finding in orjson.loads(told)["findings"]]
    assert (code, error, found.count(("failure", "connect"))) == (2, "", 3)


def test_mistake_on_the_command_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--canaries", "some"]) == 2
    assert capsys.readouterr() == ("", "pdproxy: error: --canaries: must be a whole number, 0 or more\n")
