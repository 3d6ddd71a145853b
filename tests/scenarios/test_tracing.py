"""Several workers send their traces to one collector, each as an instance of the same service."""

from __future__ import annotations

import os
import signal

import aiohttp

from proxy.wire.openai import Api
from tests.asking import ask, request
from tests.observe.tracing.collector import collecting
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway

REQUESTS = 4


async def test_all_workers_are_traced_and_their_last_requests_too(site: Site) -> None:
    async with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "front"}
        words = (*site.engines, "--workers", "2")
        async with gateway(*words, **environment) as program:
            first, second = program.children()
            for sleeps in (first, second):  # the other one serves
                os.kill(sleeps, signal.SIGSTOP)
                for _ in range(REQUESTS // 2):
                    async with aiohttp.ClientSession() as session:
                        assert (await ask(session, program.url, request(Api.CHAT))).status == 200
                os.kill(sleeps, signal.SIGCONT)
            program.signal(signal.SIGTERM)  # long before their batches would be due
            assert await program.ended() == 0
    assert len(collector.requests) == REQUESTS
    assert {root.resource["service.name"] for root in collector.requests} == {"front"}
    assert len({root.resource["service.instance.id"] for root in collector.requests}) == 2
    for root in collector.requests:
        assert collector.tree(root) == [("attempt", ["prefill", "decode"])]
        assert f"trace_id={root.trace_id}" in program.output or f'"trace_id":"{root.trace_id}"' in program.output
