"""Failures of the trace collector: one log line, and no effect on requests."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.observe.tracing.collector import Collector, collecting


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]


async def refusals(collector: Collector, count: int) -> None:
    await until(lambda: len(collector.headers) >= count, f"{count} refusals")


async def test_lost_collector_and_its_return_are_logged_once(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not be used
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    gateway = await deploy(tracing={"endpoint": f"http://127.0.0.1:{port}/v1/traces"})
    with caplog.at_level("INFO", "proxy.tracing"):
        for _ in range(3):
            assert (await gateway.ask(request(Api.CHAT))).status == 200
        await until(lambda: messages(caplog), "the log line about the collector")
        assert (await gateway.ask(request(Api.CHAT))).status == 200
        async with collecting(port) as collector:
            while not collector.requests:
                assert (await gateway.ask(request(Api.CHAT))).status == 200
            await until(lambda: len(messages(caplog)) == 2, "the log line about its return")
    lost, back = messages(caplog)
    assert f"refuses spans, which are dropped: 127.0.0.1:{port}: " in lost
    assert "accepts spans again" in back


@pytest.mark.parametrize("status", [400, 503])
async def test_collector_that_refuses_spans_is_logged_once(
    deploy: Deploy, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    collector.answers += [status] * 1000
    gateway = await deploy(tracing={"endpoint": f"{collector.url}/v1/traces"})
    with caplog.at_level("INFO"):
        for times in (1, 2, 3):
            assert (await gateway.ask(request(Api.CHAT))).status == 200
            await refusals(collector, times)
        await until(lambda: messages(caplog), "the log line about the collector")
    assert len(messages(caplog)) == 1


async def test_silent_collector_delays_neither_requests_nor_the_end(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # for the abandoned thread
    monkeypatch.setattr("proxy.observe.collector._FLUSH_SECONDS", 0.05)
    connected = asyncio.Event()
    held = []

    def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        connected.set()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        gateway = await deploy(tracing={"endpoint": f"http://127.0.0.1:{port}/v1/traces"})
        assert (await gateway.ask(request(Api.CHAT))).status == 200
        await connected.wait()
        assert (await gateway.ask(request(Api.CHAT))).status == 200
        await gateway.end()
        for writer in held:
            writer.close()


async def test_error_of_the_sdk_is_logged(
    deploy: Deploy, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object) -> None:
        raise ValueError("invalid span")

    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter.export", raises)
    gateway = await deploy(tracing={"endpoint": f"{collector.url}/v1/traces"})
    with caplog.at_level("INFO", "proxy.tracing"):
        assert (await gateway.ask(request(Api.CHAT))).status == 200
        await until(lambda: messages(caplog), "the log line about the error")
    assert "ValueError: invalid span" in messages(caplog)[0]


async def test_switch_interval_is_shorter_while_spans_are_exported(deploy: Deploy, collector: Collector) -> None:
    before = sys.getswitchinterval()
    gateway = await deploy(tracing={"endpoint": f"{collector.url}/v1/traces"})
    assert sys.getswitchinterval() < before
    await gateway.end()
    assert sys.getswitchinterval() == before


async def test_variables_of_the_sdk_apply(
    deploy: Deploy, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("OTEL_SERVICE_NAME", "my-gateway"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging,service.version=mine"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
    ):
        monkeypatch.setenv(name, value)
    gateway = await deploy(tracing={"endpoint": f"{collector.url}/v1/traces"})
    await gateway.ask(request(Api.CHAT))
    await gateway.ask(request(Api.CHAT), traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    await collector.has(1)
    await gateway.end()
    (root,) = collector.requests  # the other request was not sampled
    resource = root.resource
    assert resource["service.name"] == "my-gateway"
    assert (resource["deployment.environment.name"], resource["service.version"]) == ("staging", "mine")
    assert collector.headers[0]["api-key"] == "abc"
    assert collector.headers[0]["content-encoding"] == "gzip"


async def test_remaining_spans_are_sent_at_the_end(
    deploy: Deploy, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    gateway = await deploy(tracing={"endpoint": f"{collector.url}/v1/traces"})
    await gateway.ask(request(Api.CHAT))
    gateway.worker.request_observers.flush_batch()
    assert collector.received == []
    await gateway.end()
    (root,) = collector.requests
    assert root.resource["service.name"] == "pdproxy"
