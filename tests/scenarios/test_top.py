"""`pdproxy top` as a program, in front of a gateway that works."""

from __future__ import annotations

import asyncio
import os
import re
import sys

import pytest

from proxy.__main__ import main
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import Deployment


async def top(*flags: str) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PROXY_")}
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "proxy", "top", *flags)
    program = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, env=environ)
    out, error = await program.communicate()
    return program.returncode or 0, out.decode(), error.decode()


async def test_top_shows_the_activity_of_a_gateway(gateway: Deployment) -> None:
    is_seen = False

    async def ask() -> None:
        while not is_seen:
            await gateway.ask(request(Api.CHAT, "hello", stream=True))

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        await until(lambda: bool(gateway.metrics("pdproxy_tokens_total")), "the first answers")
        numbers = [0.0]
        while 0.0 in numbers:  # on a busy machine no request may have ended between both looks
            code, told, error = await top("--url", gateway.url, "--once", "--interval", "0.3")
            assert (code, error) == (0, "")
            shown = dict(re.findall(r"^(requests|tokens) +([0-9.,]+)/s", told, re.MULTILINE))
            numbers = [float(shown[name].replace(",", "")) for name in ("requests", "tokens")]
        is_seen = True  # so that no request is broken off, which would leave KV behind
    for engine, role in ((gateway.prefillers[0], "prefill"), (gateway.decoders[0], "decode")):
        (row,) = [line for line in told.splitlines() if f"127.0.0.1:{engine.port}" in line]
        assert row.split()[:3] == [role, f"127.0.0.1:{engine.port}", "up"]


def test_no_gateway_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("pdproxy: 127.0.0.1 port 9 does not answer:")
