"""Engines behind TLS: which certificates are accepted, and that everything that speaks to engines speaks it."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Endpoint, Settings, parse_dns_name, parse_endpoints
from proxy.settings.tls import EngineTls, TlsFiles, load_tls
from proxy.sim.engine import SimulatedEngine
from proxy.upstream import EngineClient, EngineRequestError
from proxy.upstream.pump import _tcp_descriptor
from proxy.wire.openai import Api
from tests.asking import request
from tests.certificates import Certificates, TlsFront
from tests.conftest import Deploy
from tests.deployment import Deployment


@pytest.fixture
async def fronts() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def _deployed(
    deploy: Deploy, fronts: AsyncExitStack, pair: tuple[Path, Path], client_ca: Path | None = None, **engines: Any
) -> tuple[Deployment, list[TlsFront]]:
    """Start one prefiller and one decoder behind TLS, and a gateway."""
    both = [SimulatedEngine(role="prefill"), SimulatedEngine(role="decode")]
    servers = [await fronts.enter_async_context(TlsFront(engine, pair, client_ca)) for engine in both]
    gateway = await deploy(
        both[:1],
        both[1:],
        prefill=[f"https://127.0.0.1:{servers[0].port}"],
        decode=[f"https://127.0.0.1:{servers[1].port}"],
        engines=engines,
    )
    return gateway, servers


@pytest.mark.parametrize("streams", [True, False])
async def test_requests_reach_engines_behind_tls(
    deploy: Deploy, fronts: AsyncExitStack, certificates: Certificates, streams: bool
) -> None:
    gateway, _ = await _deployed(deploy, fronts, certificates.issue("engine"), ca_file=certificates.ca)
    for _ in range(3):
        answer = await gateway.ask(request(Api.CHAT, "word " * 1000, stream=streams))
        assert (answer.status, answer.is_done) == (200, True)
    models = await (await gateway.session.get(f"{gateway.url}/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["sim"]
    assert [len(engine.state.requests) > 3 for engine in gateway.engines] == [True, True]


async def test_server_name_replaces_the_host_in_certificates(
    deploy: Deploy, fronts: AsyncExitStack, certificates: Certificates
) -> None:
    pair = certificates.issue("engine", "engines.example")
    gateway, servers = await _deployed(deploy, fronts, pair, ca_file=certificates.ca, server_name="engines.example")
    assert (await gateway.ask(request(Api.CHAT))).status == 200
    assert {name for server in servers for name in server.server_names} == {"engines.example"}


async def test_client_certificate_is_presented_to_engines(
    deploy: Deploy, fronts: AsyncExitStack, certificates: Certificates
) -> None:
    certificate, key = certificates.issue("gateway", "gateway.example")
    gateway, _ = await _deployed(
        deploy,
        fronts,
        certificates.issue("engine"),
        certificates.ca,
        ca_file=certificates.ca,
        client_certificate=certificate,
        client_key=key,
    )
    assert (await gateway.ask(request(Api.CHAT))).status == 200


async def test_certificates_are_not_verified_if_verify_is_false(
    deploy: Deploy, fronts: AsyncExitStack, certificates: Certificates
) -> None:
    gateway, _ = await _deployed(deploy, fronts, certificates.issue("engine", "other.example"), verify=False)
    assert (await gateway.ask(request(Api.CHAT))).status == 200
    assert any(
        "certificates of engines are not verified" in text
        for text in Settings.model_validate({"engines": {"verify": False}}).access_warnings
    )


@pytest.mark.parametrize(
    ("identities", "days", "trusts", "reason"),
    [
        (("127.0.0.1",), 30, False, "unable to get local issuer certificate"),
        (("other.example",), 30, True, "IP address mismatch"),
        (("127.0.0.1",), -1, True, "certificate has expired"),
    ],
)
async def test_certificate_that_is_not_accepted_is_named(
    certificates: Certificates, tmp_path: Path, identities: tuple[str, ...], days: int, trusts: bool, reason: str
) -> None:
    (tmp_path / "other").mkdir()
    ca = certificates.ca if trusts else Certificates(tmp_path / "other").ca
    settings = Settings.model_validate({"engines": {"ca_file": ca}})
    files = load_tls(settings)
    pair = certificates.issue("engine", *identities, days=days)
    async with (
        SimulatedEngine(role="decode") as engine,
        TlsFront(engine, pair) as front,
        EngineClient(tls=EngineTls(lambda: (settings.engines, files))) as client,
    ):
        with pytest.raises(EngineRequestError) as failed:
            await client.get_body(f"https://127.0.0.1:{front.port}", "/health", 20)
    assert str(failed.value).startswith("cannot connect (TLS: certificate not accepted: ")
    assert reason in str(failed.value)


async def test_engine_that_speaks_no_tls_is_named() -> None:
    settings = Settings()
    async with (
        SimulatedEngine(role="decode") as engine,
        EngineClient(tls=EngineTls(lambda: (settings.engines, TlsFiles()))) as client,
    ):
        with pytest.raises(EngineRequestError, match=r"cannot connect \(TLS: the other side does not speak TLS\)"):
            await client.get_body(f"https://127.0.0.1:{engine.port}", "/health", 20)


async def test_new_context_is_made_after_a_change_only(certificates: Certificates) -> None:
    settings = Settings.model_validate({"engines": {"ca_file": certificates.ca}})
    files = load_tls(settings)
    tls = EngineTls(lambda: (settings.engines, files))
    context = tls.current_context
    files = load_tls(settings)
    assert tls.current_context is context
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_2, ssl.CERT_REQUIRED)
    certificates.authority = type(certificates.authority)()
    certificates.ca.touch()
    files = load_tls(settings)
    assert tls.current_context is not context


async def test_transport_with_tls_is_left_to_the_event_loop(certificates: Certificates) -> None:
    """Tokens that C writes into the socket would not be encrypted."""
    async with SimulatedEngine(role="decode") as engine, TlsFront(engine, certificates.issue("engine")) as front:
        _, plain = await asyncio.open_connection("127.0.0.1", engine.port)
        _, secured = await asyncio.open_connection("127.0.0.1", front.port, ssl=certificates.client())
        assert _tcp_descriptor(plain.transport) >= 0
        assert _tcp_descriptor(secured.transport) == -1
        plain.close()
        secured.close()


def test_addresses_with_tls_are_written_as_they_are_read() -> None:
    (endpoint,) = parse_endpoints("https://[::1]:7100 8998 model=kimi")
    assert endpoint == Endpoint(host="::1", port=7100, bootstrap_port=8998, models=("kimi",), tls=True)
    assert endpoint.model_dump() == "https://[::1]:7100 8998 model=kimi"
    assert str(endpoint) == "[::1]:7100"
    assert parse_dns_name("https://engines:7100-7101").tls
    assert parse_dns_name("https://_engines._tcp.example").tls
    assert not parse_dns_name("engines:7100").tls


async def test_doctor_examines_engines_behind_tls(fronts: AsyncExitStack, certificates: Certificates) -> None:
    pair = certificates.issue("engine")
    words = []
    for role in ("prefill", "decode"):
        engine = await fronts.enter_async_context(SimulatedEngine(role=role))
        front = await fronts.enter_async_context(TlsFront(engine, pair))
        words += [f"--{role}", f"https://127.0.0.1:{front.port}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "doctor", "--port", "0", *words),
        env={"PROXY_ENGINES__CA_FILE": str(certificates.ca)},
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, said.decode()
