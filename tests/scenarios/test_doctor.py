"""`pdproxy doctor` as a program."""

from __future__ import annotations

import asyncio
import os
import sys

import orjson

from proxy.sim.engine import SimulatedEngine


async def doctor(*flags: str) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PROXY_", "OPENAI_"))}
    words = (sys.executable, "-m", "proxy", "doctor", *flags)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, env=environ)
    out, error = await program.communicate()
    return program.returncode or 0, out.decode(), error.decode()


async def test_a_decoder_that_fetches_nothing_is_found_by_the_program() -> None:
    async with (
        SimulatedEngine(role="prefill") as prefiller,
        SimulatedEngine(role="decode") as well,
        SimulatedEngine(role="decode", protocol="none") as deaf,
    ):
        engines = ("--prefill", prefiller.url, "--decode", well.url, deaf.url, "--port", "0")
        (code, told, error), (json_code, json, _) = await asyncio.gather(
            doctor(*engines), doctor("--json", "--canaries", "2", *engines)
        )
    assert (code, json_code, error) == (2, 2, "")
    assert f"✗ decode 127.0.0.1:{deaf.port}" in told
    assert "→ Is --kv-transfer-config set" in told
    assert f"✓ 127.0.0.1:{prefiller.port} → 127.0.0.1:{well.port}" in told
    bad = [found for found in orjson.loads(json)["findings"] if found["severity"] == "failure"]
    assert [(found["check"], found["subject"]) for found in bad] == [
        ("kv_not_fetched", f"decode 127.0.0.1:{deaf.port}")
    ]


async def test_a_mistake_on_the_command_line_is_one_sentence() -> None:
    code, out, error = await doctor("--canaries", "some")
    assert (code, out) == (2, "")
    assert error == "pdproxy: error: --canaries: 'some' is not a whole number\n"
