"""Clients connect by TLS: what the listener speaks, whom it accepts, and what is left of a failed handshake."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from proxy.wire.openai import Api
from tests.asking import ask, read, request, until
from tests.certificates import Certificates
from tests.conftest import Deploy
from tests.deployment import Deployment

FAILURES = "pdproxy_tls_handshake_failures_total"


def _listen(pair: Sequence[Path], **options: Any) -> dict[str, Any]:
    return {"tls_certificate": pair[0], "tls_key": pair[1], **options}


def _session(context: ssl.SSLContext) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


async def _connect(gateway: Deployment, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port, ssl=context)


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read()
    except OSError:
        return True


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_chats_are_served_over_tls(
    deploy: Deploy, certificates: Certificates, fast_path: bool, streams: bool
) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good"), fast_path=fast_path))
    async with _session(certificates.client()) as session:
        answers = [await ask(session, gateway.url, request(Api.CHAT, stream=streams)) for _ in range(3)]
        big = await ask(session, gateway.url, request(Api.CHAT, "word " * 20_000))
        long = io.BytesIO(orjson.dumps(request(Api.CHAT, stream=streams, user="x" * 2_000_000)))
        async with session.post(f"{gateway.url}{Api.CHAT.path}", data=long) as response:
            answers.append(await read(response))
        metrics = await (await session.get(f"{gateway.url}/metrics")).text()
    assert {(answer.status, answer.is_done) for answer in (*answers, big)} == {(200, True)}
    assert len({answer.text for answer in answers}) == 1
    assert 'pdproxy_tls_certificate_expiry_timestamp_seconds{section="listen"}' in metrics


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_listener_speaks_http_1_and_tls_1_2_or_later(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = certificates.client()
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await _connect(gateway, context)
        secured = writer.get_extra_info("ssl_object")
        assert (secured.selected_alpn_protocol(), secured.version()) == ("http/1.1", version.name.replace("_", "."))
        writer.close()
    context = certificates.client()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(ConnectionResetError):  # uvloop closes the connection without an alert
        await _connect(gateway, context)
    await until(lambda: gateway.metrics(FAILURES) == {(): 1}, "the failure")


async def test_client_without_tls_is_rejected_with_one_log_line(
    deploy: Deploy, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await _is_closed(reader)
    writer.close()
    text = "listener: TLS handshake failed: the other side does not speak TLS"
    await until(lambda: text in caplog.messages, "the log line")
    assert [message for message in caplog.messages if "handshake" in message] == [text]


async def test_client_that_only_connects_is_no_failure(deploy: Deploy, certificates: Certificates) -> None:
    """Load balancers check ports in this way."""
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    await until(lambda: gateway.worker.client_listener.connection_count == 1, "the connection")
    writer.close()
    await until(lambda: gateway.worker.client_listener.connection_count == 0, "its end")
    assert gateway.metrics(FAILURES) == {}


async def test_handshake_that_takes_too_long_ends(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good"), header_seconds=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    assert await _is_closed(reader)
    writer.close()
    await until(lambda: gateway.metrics(FAILURES) == {(): 1}, "the failure")


async def test_stopping_ends_handshakes(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    await until(lambda: gateway.worker.client_listener.connection_count == 1, "the connection")
    await gateway.end()
    assert await _is_closed(reader)
    writer.close()


async def test_connections_beyond_the_limit_get_an_answer_over_tls(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good"), max_connections=10))
    context = certificates.client()
    writers = [(await _connect(gateway, context))[1] for _ in range(10)]
    await until(lambda: gateway.metrics("pdproxy_connections") == {(): 10}, "ten connections")
    reader, writer = await _connect(gateway, context)
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    for each in (writer, *writers):
        each.close()
    await until(lambda: gateway.worker.client_listener.connection_count == 0, "the end of all")


async def test_error_that_ends_a_connection_arrives_over_tls(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    reader, writer = await _connect(gateway, certificates.client())
    writer.write(b"GET / HTTP/9.9\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 505 ")
    writer.close()


async def test_requests_sent_with_the_end_of_the_handshake_are_served(
    deploy: Deploy, certificates: Certificates
) -> None:
    """Send the request together with the client's last message of the handshake."""
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65536))
    client.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    writer.write(outgoing.read())
    incoming.write(await reader.read())
    assert client.read(65536).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_mutual_tls_accepts_certificates_of_its_authority_only(
    deploy: Deploy, certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "strangers").mkdir()
    strangers = Certificates(tmp_path / "strangers")
    gateway = await deploy(listen=_listen(certificates.issue("good"), tls_client_ca=certificates.ca))
    for pair, is_accepted in (
        (certificates.issue("client", "team-a"), True),
        (strangers.issue("client", "team-a"), False),
        (certificates.issue("late", "team-a", days=-1), False),
        (None, False),
    ):
        async with _session(certificates.client(pair)) as session:
            try:
                assert (await ask(session, gateway.url, request(Api.CHAT))).status == 200
                assert is_accepted
            except aiohttp.ClientError:
                assert not is_accepted
    await until(lambda: gateway.metrics(FAILURES) == {(): 3}, "three failures")


async def test_renegotiation_is_refused(deploy: Deploy, certificates: Certificates) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    port = urlsplit(gateway.url).port
    process = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_2", "-CAfile", str(certificates.ca)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(b"R\n"), 60)
    assert b"RENEGOTIATING" in said
    assert b"no renegotiation" in said


async def test_handshake_that_runs_when_accepting_stops_is_completed(
    deploy: Deploy, certificates: Certificates
) -> None:
    gateway = await deploy(listen=_listen(certificates.issue("good")))
    connecting = socket.create_connection(("127.0.0.1", urlsplit(gateway.url).port))
    connecting.setblocking(False)
    stopping = asyncio.ensure_future(gateway.stop_accepting())
    reader, writer = await asyncio.open_connection(
        sock=connecting, ssl=certificates.client(), server_hostname="localhost"
    )
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await stopping
