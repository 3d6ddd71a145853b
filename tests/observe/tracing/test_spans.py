"""Spans that a collector receives: their tree, their attributes and errors, with and without the fast path."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.deployment import Deployment, generations
from tests.observe.tracing.collector import Collector, Received

CLIENTS_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN = "b7ad6b7169203331"


def tracing_to(collector: Collector, ratio: float | None = None, **listen: object) -> dict[str, Any]:
    """Return settings that export spans to the collector."""
    return {"tracing": {"endpoint": f"{collector.url}/v1/traces", "sample_ratio": ratio}, "listen": listen}


async def root_of_only_request(collector: Collector) -> Received:
    """Return the span of the only request."""
    await collector.has(1)
    (root,) = collector.requests
    return root


async def with_attempts(count: int, gateway: Deployment, collector: Collector) -> Received:
    """Send two requests, and return the span of the one with this number of attempts.

    With two instances, only one request comes to the failing instance first.
    """
    for _ in range(2):
        assert (await gateway.ask(request(Api.CHAT, stream=True, max_tokens=12))).is_done
    await collector.has(2)
    (found,) = [root for root in collector.requests if root.attributes["pdproxy.attempts"] == count]
    return found


def parent_spans(gateway: Deployment) -> dict[str, str]:
    """Return the parent span that engines got in their headers, by role."""
    return {
        role: seen.headers["traceparent"].split("-")[2]
        for role, engines in (("prefill", gateway.prefillers), ("decode", gateway.decoders))
        for seen in generations(*engines)
    }


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_request_attempt_and_legs_have_spans(
    deploy: Deploy, collector: Collector, is_fast: bool, stream: bool
) -> None:
    gateway = await deploy(**tracing_to(collector, fast_path=is_fast))
    answer = await gateway.ask(request(Api.CHAT, stream=stream), x_request_id="r-1")
    assert answer.is_done
    root = await root_of_only_request(collector)
    assert (root.name, root.kind, root.parent_id, root.error) == ("chat sim", "server", "", None)
    assert collector.tree(root) == [("attempt", ["prefill", "decode"])]
    (attempt,) = collector.below(root)
    prefill, decode = collector.below(attempt)
    assert (prefill.kind, decode.kind, attempt.kind) == ("client", "client", "internal")
    assert parent_spans(gateway) == {"prefill": prefill.id, "decode": decode.id}
    assert [span.attributes["server.port"] for span in (prefill, decode)] == [engine.port for engine in gateway.engines]
    attributes = root.attributes
    expected = {
        "pdproxy.request_id": "r-1",
        "pdproxy.term": "--",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "sim",
        "gen_ai.provider.name": "vllm",
        "gen_ai.usage.output_tokens": 8,
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "llm_d.pd_proxy.connector": "vllm_pull",
        "llm_d.pd_proxy.disaggregation_used": True,
    }
    assert {name: attributes[name] for name in expected} == expected
    stages = ["prefill", "handoff", "first_token", "stream"] if stream else ["prefill", "stream"]
    assert [event.name for event in attempt.span.events] == stages
    assert attempt.attributes["llm_d.pd_proxy.prefill_target"] == f"127.0.0.1:{gateway.prefillers[0].port}"
    assert prefill.attributes["llm_d.pd_proxy.request_id"] == attempt.attributes["pdproxy.prefill.request_id"]
    # Each span lies within its parent, except for the time to return connections.
    for span, above in ((attempt, root), (prefill, attempt), (decode, attempt)):
        assert above.span.start_time_unix_nano <= span.span.start_time_unix_nano
        assert span.span.end_time_unix_nano <= root.span.end_time_unix_nano


@pytest.mark.parametrize("is_fast", [True, False])
async def test_trace_of_the_client_is_passed_to_the_engines(
    deploy: Deploy, collector: Collector, is_fast: bool
) -> None:
    gateway = await deploy(**tracing_to(collector, 0.0, fast_path=is_fast))
    headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01", "tracestate": "vendor=1"}
    await gateway.ask(request(Api.CHAT), **headers)
    root = await root_of_only_request(collector)
    assert (root.trace_id, root.parent_id) == (CLIENTS_TRACE, CLIENTS_SPAN)
    seen = [seen.headers for seen in generations(*gateway.engines)]
    assert {one["traceparent"].split("-")[1] for one in seen} == {CLIENTS_TRACE}
    assert [one["tracestate"] for one in seen] == ["vendor=1"] * 2


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("traceparent", [f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-00", None, "00-1-2-01"])
async def test_unsampled_request_is_unsampled_at_engines(
    deploy: Deploy, collector: Collector, is_fast: bool, traceparent: str | None
) -> None:
    gateway = await deploy(**tracing_to(collector, 0.0, fast_path=is_fast))
    headers = {} if traceparent is None else {"traceparent": traceparent, "tracestate": "vendor=1"}
    await gateway.ask(request(Api.CHAT), **headers)
    await gateway.end()  # sends remaining spans
    assert collector.received == []
    for seen in generations(*gateway.engines):
        version, trace_id, span_id, flags = seen.headers["traceparent"].split("-")
        assert (version, len(trace_id), len(span_id), int(flags, 16) & 1) == ("00", 32, 16, 0)
        assert ("tracestate" in seen.headers) == (trace_id == CLIENTS_TRACE)


@pytest.mark.parametrize("is_fast", [True, False])
async def test_failed_attempt_has_a_span_before_its_retry(deploy: Deploy, collector: Collector, is_fast: bool) -> None:
    gateway = await deploy(2, 1, **tracing_to(collector, fast_path=is_fast))
    gateway.prefillers[0].faults.add("refuse_status", status=500)
    root = await with_attempts(2, gateway, collector)
    assert (root.error, collector.tree(root)[1]) == (None, ("attempt", ["prefill", "decode"]))
    first, second = collector.below(root)
    assert (first.error, first.attributes["pdproxy.attempt.kind"]) == ("status", "first")
    (leg,) = collector.below(first)
    assert (leg.name, leg.error, leg.attributes["http.response.status_code"]) == ("prefill", "500", 500)
    assert (second.error, second.attributes["pdproxy.attempt.kind"]) == (None, "retry")


async def test_refused_connection_is_an_attempt_without_a_leg(deploy: Deploy, collector: Collector) -> None:
    gateway = await deploy(2, 1, **tracing_to(collector))
    gone = gateway.prefillers[0]
    await gone.kill()
    root = await with_attempts(2, gateway, collector)
    first, second = collector.below(root)
    assert (first.error, collector.below(first)) == ("connect", [])
    assert first.attributes["llm_d.pd_proxy.prefill_target"] == f"127.0.0.1:{gone.port}"
    assert (second.error, root.error) == (None, None)


@pytest.mark.parametrize("is_fast", [True, False])
async def test_resumed_answer_has_a_broken_and_a_resuming_attempt(
    deploy: Deploy, collector: Collector, is_fast: bool
) -> None:
    gateway = await deploy(1, 2, **tracing_to(collector, fast_path=is_fast))
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3)
    root = await with_attempts(2, gateway, collector)
    assert (root.error, root.attributes["pdproxy.resumes"], root.attributes["gen_ai.usage.output_tokens"]) == (
        None,
        1,
        12,
    )
    first, second = collector.below(root)
    assert (first.error, second.error) == ("broken", None)
    assert second.attributes["pdproxy.attempt.kind"] == "resume"
    assert [span.name for span in collector.below(first)] == ["prefill", "decode"]
    assert collector.below(first)[1].error == "broken"
    assert [span.name for span in collector.below(second)][-1] == "decode"


@pytest.mark.parametrize("is_fast", [True, False])
async def test_span_of_a_leaving_client_has_its_error(deploy: Deploy, collector: Collector, is_fast: bool) -> None:
    gateway = await deploy(decoder={"decode_step_ms": 20.0}, **tracing_to(collector, fast_path=is_fast))
    async with gateway.asking(request(Api.CHAT, stream=True, max_tokens=500)) as client:
        await client.has_tokens(2)
        await client.leave()
        root = await root_of_only_request(collector)
    assert (root.error, root.attributes["pdproxy.term"]) == ("client_left", "CD")
    (attempt,) = collector.below(root)
    assert attempt.error == "client_left"
    prefill, decode = collector.below(attempt)
    # The engines have not failed.
    assert (prefill.error, decode.error) == (None, None)
    assert ("pdproxy.cancelled" in prefill.attributes, decode.attributes["pdproxy.cancelled"]) == (False, True)


async def test_failed_request_fails_its_span_and_invalid_one_does_not(deploy: Deploy, collector: Collector) -> None:
    gateway = await deploy(**tracing_to(collector))
    assert (await gateway.ask(request(Api.CHAT, max_tokens="many"))).status == 400
    await collector.has(1)
    gateway.prefillers[0].faults.add("refuse_status", status=500)
    assert (await gateway.ask(request(Api.CHAT))).status == 500
    await collector.has(2)
    refused, failed = collector.requests
    assert (refused.error, refused.attributes["http.response.status_code"]) == (None, 400)
    assert failed.error == "prefill_status"


async def test_queue_time_has_a_span(deploy: Deploy, collector: Collector) -> None:
    one_at_a_time = {"max_running_decode": 1, "wait_seconds": 5.0}
    gateway = await deploy(decoder={"decode_step_ms": 5.0}, admission=one_at_a_time, **tracing_to(collector))
    async with gateway.asking(request(Api.CHAT, stream=True, max_tokens=20)) as first:
        await first.has_tokens(1)
        await gateway.ask(request(Api.CHAT))
        await first.has_tokens(19)
    await collector.has(2)
    waited, instant = sorted(map(collector.tree, collector.requests), key=len, reverse=True)
    assert (waited[0], len(waited), len(instant)) == ("queue", 2, 1)


async def test_each_unit_has_an_attempt_span(deploy: Deploy, collector: Collector) -> None:
    gateway = await deploy(**tracing_to(collector))
    await gateway.ask(request(Api.CHAT, n=3))
    root = await root_of_only_request(collector)
    assert collector.tree(root) == [("attempt", ["prefill", "decode"])] * 3
    assert sorted(span.attributes["pdproxy.unit"] for span in collector.below(root)) == [0, 1, 2]


@pytest.mark.parametrize("connector", ["vllm_store", "mooncake_bootstrap", "sglang_bootstrap", "ascend_layerwise"])
async def test_concurrent_legs_have_spans(deploy: Deploy, collector: Collector, connector: str) -> None:
    gateway = await deploy(connector=connector, **tracing_to(collector))
    assert (await gateway.ask(request(Api.CHAT, stream=True))).is_done
    root = await root_of_only_request(collector)
    (attempt,) = collector.below(root)
    legs = collector.below(attempt)
    assert sorted(span.name for span in legs) == ["decode", "prefill"]
    assert parent_spans(gateway) == {span.name: span.id for span in legs}
    assert [span.error for span in legs] == [None, None]


async def test_access_line_has_the_trace_id_if_sampled(
    deploy: Deploy, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(**tracing_to(collector, 0.0))
    with caplog.at_level("INFO", "proxy.access"):
        for flags in ("01", "00"):
            await gateway.ask(request(Api.CHAT), traceparent=f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-{flags}")
        await gateway.end()
    lines = [getattr(record, "fields", {}) for record in caplog.records if record.name == "proxy.access"]
    assert [line.get("trace_id") for line in lines] == [CLIENTS_TRACE, None]
