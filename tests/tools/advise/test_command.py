"""The sub-command in front of a running gateway."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.__main__ import main
from tests.conftest import Deploy

ASKED = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "stream": True}


async def test_report_agrees_with_a_running_gateways_metrics(
    deploy: Deploy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):  # the address is asked directly
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    gateway = await deploy(2, 1, prefiller={"prefill_ms_per_1k_tokens": 5.0}, decoder={"decode_step_ms": 20.0})
    url = f"{gateway.url}/metrics"
    flags = ["advise", "--metrics", url, "--seconds", "1.5", "--decode-streams", "4"]
    for form in ([], ["--json"]):
        advising = asyncio.create_task(asyncio.to_thread(main, [*flags, *form]))
        while not advising.done():
            answers = await asyncio.gather(*(gateway.ask(ASKED | {"max_tokens": 30}) for _ in range(8)))
            assert all(answer.is_done for answer in answers)
        assert await advising == 0
    table, _, told = capsys.readouterr().out.partition("{")
    found = json.loads("{" + told)
    assert found["now"] == "2P1D"
    assert [split["split"] for split in found["splits"]] == ["2P1D", "1P2D"]
    assert found["decode_streams_when_full"] == 4
    assert found["token_seconds"] > 0
    assert "2P1D (now)" in table
    assert table.rstrip().endswith(".")


def test_gateway_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--metrics", "http://127.0.0.1:1/metrics"]) == 1
    assert capsys.readouterr().err.startswith("pdproxy advise: http://127.0.0.1:1/metrics does not answer: ")


async def test_program_with_another_protocol_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(main, ["advise", "--metrics", f"http://127.0.0.1:{port}/metrics"]) == 1
    told = capsys.readouterr().err
    assert told.endswith("does not answer: the other side does not speak HTTP\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--metrics", "gateway:1999"], ["--metrics", "http://h/", "--seconds", "0"]])
def test_mistakes_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith("pdproxy: error: ")
    assert told.count("\n") == 1
