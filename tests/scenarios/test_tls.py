"""A gateway with TLS as operators run it: certificates are rotated, tools connect, and another process takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import ask, request, until
from tests.certificates import Certificates
from tests.scenarios.conftest import Site
from tests.scenarios.program import Program, refused
from tests.scenarios.test_ports import admin_url
from tests.scenarios.test_stopping import is_ready
from tests.scenarios.test_takeover import newest, replace, replaceable

STREAMS = 200
WORKERS = ("--workers", "2")


@pytest.fixture
async def session(certificates: Certificates) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session that verifies certificates, with a new connection for each request."""
    connector = aiohttp.TCPConnector(ssl=certificates.client(), limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def _words(prefiller: SimulatedEngine, decoder: SimulatedEngine, *more: str) -> list[str]:
    engines = ["--prefill", f"{prefiller.host}:{prefiller.port}", "--decode", f"{decoder.host}:{decoder.port}"]
    return [*engines, *more]


def _environment(pair: tuple[Path, Path]) -> dict[str, str]:
    return {"PROXY_LISTEN__TLS_CERTIFICATE": str(pair[0]), "PROXY_LISTEN__TLS_KEY": str(pair[1])}


async def _secured(program: Program, session: aiohttp.ClientSession) -> None:
    program.url = program.url.replace("http:", "https:")
    await is_ready(session, program.url)


async def _serial(program: Program, certificates: Certificates) -> str:
    """Return the serial number of the certificate that a new connection gets."""
    host, _, port = program.url.removeprefix("https://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=certificates.client())
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return str(found)


async def _serves_other_than(old: str, program: Program, certificates: Certificates) -> str:
    """Wait until both workers serve another certificate, and return its serial number."""
    async with asyncio.timeout(60):
        while True:
            found = {await _serial(program, certificates) for _ in range(20)}
            if len(found) == 1 and old not in found:
                return found.pop()


async def _run(*words: str, **environment: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *words,
        env={"PATH": os.environ["PATH"], **environment},
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.timeout(180)
async def test_rotation_interrupts_no_stream(site: Site, certificates: Certificates) -> None:
    pair = certificates.issue("gateway")
    async with replaceable(*_words(site.prefiller, site.decoder, *WORKERS), **_environment(pair)) as program:
        await _secured(program, site.session)
        serial = await _serial(program, certificates)
        body = request(Api.CHAT, stream=True, max_tokens=600)
        answers = [asyncio.create_task(ask(site.session, program.url, body)) for _ in range(STREAMS)]
        await until(lambda: site.decoder.state.live == STREAMS, "all streams")
        certificates.issue("gateway")
        serial = await _serves_other_than(serial, program, certificates)
        assert site.decoder.state.live == STREAMS
        # A certificate without its key, and then an expired one, are refused. The old one stays.
        failures = "reload: rejected, nothing has changed: requested by a change of listen.tls_"
        key = pair[1].read_bytes()
        pair[1].write_bytes(key[:100])
        await program.says(failures)
        certificates.issue("gateway", days=-1)
        await program.says("certificate has expired")
        assert await _serial(program, certificates) == serial
        certificates.issue("gateway")
        await _serves_other_than(serial, program, certificates)
        ended = await asyncio.gather(*answers)
    assert [answer for answer in ended if not answer.is_done or answer.status != 200] == []


async def test_sighup_reports_a_certificate_that_cannot_be_used(site: Site, certificates: Certificates) -> None:
    pair = certificates.issue("gateway")
    async with replaceable(*_words(site.prefiller, site.decoder), **_environment(pair)) as program:
        await _secured(program, site.session)
        serial = await _serial(program, certificates)
        pair[1].unlink()
        program.signal(signal.SIGHUP)
        await program.says(
            "rejected, nothing has changed: requested by SIGHUP: listen.tls_key .* cannot be read: no such file"
        )
        assert await _serial(program, certificates) == serial


async def test_start_with_an_expired_certificate_is_refused_in_one_sentence(certificates: Certificates) -> None:
    certificate, key = certificates.issue("old", days=-1)
    config = certificates.directory / "gateway.yaml"
    config.write_text(
        f"connector: plain\ndecode: ['127.0.0.1:1']\nlisten: {{tls_certificate: {certificate}, tls_key: {key}}}\n"
    )
    code, output = await refused("--config", str(config))
    assert (code, output.count("\n")) == (2, 1)
    assert output.endswith("cannot be used: certificate has expired\n")


async def test_another_process_takes_over_with_tls(site: Site, certificates: Certificates) -> None:
    pair = certificates.issue("gateway")
    async with replaceable(*_words(site.prefiller, site.decoder, *WORKERS), **_environment(pair)) as program:
        await _secured(program, site.session)
        old = newest(program)
        body = request(Api.CHAT, stream=True, max_tokens=400)
        answers = [asyncio.create_task(ask(site.session, program.url, body)) for _ in range(20)]
        await until(lambda: site.decoder.state.live == 20, "all streams")
        stop = asyncio.Event()
        statuses: set[int] = set()

        async def keeps_asking() -> None:
            while not stop.is_set():
                statuses.add((await ask(site.session, program.url, request(Api.CHAT))).status)

        asking = asyncio.create_task(keeps_asking())
        await replace(program)
        assert newest(program) != old
        assert (await ask(site.session, program.url, request(Api.CHAT))).status == 200
        stop.set()
        await asking
        assert {answer.is_done for answer in await asyncio.gather(*answers)} == {True}
        assert statuses == {200}


async def test_operators_connect_to_their_port_with_its_own_certificate(site: Site, certificates: Certificates) -> None:
    certificate, key = certificates.issue("operators")
    options = {"TLS_CERTIFICATE": str(certificate), "TLS_KEY": str(key), "TLS_CLIENT_CA": str(certificates.ca)}
    environment = {f"PROXY_ADMIN__{name}": value for name, value in options.items()}
    async with replaceable(*_words(site.prefiller, site.decoder), PROXY_ADMIN__PORT="0", **environment) as program:
        await is_ready(site.session, program.url)  # clients connect without TLS
        url = (await admin_url(program)).replace("http:", "https:")
        with pytest.raises(aiohttp.ClientError):  # without a certificate
            await site.session.get(f"{url}/metrics")
        await program.says("listener: TLS handshake failed: peer did not return a certificate")
        operator = aiohttp.TCPConnector(ssl=certificates.client(certificates.issue("operator", "alice")))
        async with aiohttp.ClientSession(connector=operator) as allowed:
            async with allowed.get(f"{url}/admin/config") as answer:
                assert answer.status == 200
            async with allowed.get(f"{url}/metrics") as answer:
                metrics = await answer.text()
    assert 'pdproxy_tls_certificate_expiry_timestamp_seconds{section="admin"}' in metrics
    assert 'pdproxy_tls_certificate_expiry_timestamp_seconds{section="listen"}' not in metrics
    lines = program.output.count("listener: TLS handshake failed")  # aiohttp connects again
    assert f"pdproxy_tls_handshake_failures_total {lines}.0" in metrics


async def test_tools_and_clients_connect_over_tls(site: Site, certificates: Certificates) -> None:
    environment = _environment(certificates.issue("gateway"))
    async with replaceable(*_words(site.prefiller, site.decoder), **environment) as program:
        await _secured(program, site.session)
        port = program.url.rpartition(":")[2]
        await program.says(f"ready: https://127.0.0.1:{port}")
        pdproxy = (sys.executable, "-m", "proxy")
        ca = str(certificates.ca)
        assert await _run(*pdproxy, "health", "--port", port, **environment) == (0, "")
        code, said = await _run(*pdproxy, "health", "--port", port)
        assert code == 1, said
        for words in (["--port", port], ["--url", program.url, "--ca-file", ca]):
            code, said = await _run(*pdproxy, "top", "--once", "--interval", "0.1", *words, **environment)
            assert (code, site.decoder.url.removeprefix("http://") in said) == (0, True), said
        code, said = await _run(*pdproxy, "top", "--once", "--url", program.url)
        assert code == 1
        assert "certificate verify failed" in said
        roll = ("roll", "--role", "decode", "--url", program.url, "--dry-run", "--min-serving", "0")
        code, said = await _run(*pdproxy, *roll, "--ca-file", ca, "--state", str(certificates.directory / "roll.json"))
        assert (code, "1 decode instance" in said) == (0, True), said
        advise = ("advise", "--seconds", "0.2", "--metrics", f"{program.url}/metrics")
        code, said = await _run(*pdproxy, *advise, "--ca-file", ca)
        assert "does not answer" not in said
        code, said = await _run(
            *pdproxy, "doctor", *_words(site.prefiller, site.decoder, "--port", port), **environment
        )
        assert "port" not in [line.split()[1] for line in said.splitlines() if line.startswith("✗")]
        code, said = await _run("curl", "-sS", "--http2", "--cacert", ca, f"{program.url}/v1/models")
        assert (code, '"id":"sim"' in said) == (0, True), said
        client = openai.AsyncOpenAI(
            base_url=f"{program.url}/v1",
            api_key="none",
            http_client=openai.DefaultAsyncHttpxClient(verify=certificates.client()),
        )
        async with client:
            stream = await client.chat.completions.create(
                model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
            )
            assert len([chunk async for chunk in stream]) > 8


async def test_health_succeeds_without_a_certificate_with_mutual_tls(site: Site, certificates: Certificates) -> None:
    environment = {**_environment(certificates.issue("gateway")), "PROXY_LISTEN__TLS_CLIENT_CA": str(certificates.ca)}
    async with replaceable(*_words(site.prefiller, site.decoder), **environment) as program:
        port = program.url.rpartition(":")[2]
        assert await _run(sys.executable, "-m", "proxy", "health", "--port", port, **environment) == (0, "")
