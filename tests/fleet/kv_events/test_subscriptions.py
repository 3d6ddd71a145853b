"""A gateway that receives the KV events of its prefillers through a subscriber process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from proxy.balancer.policies.prefixes import CachedPrefixes
from proxy.fleet.kv_events import subscriptions
from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment

SIZE = 16
AUTO = {"endpoint": "auto"}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_UPDATE_SECONDS", 0.02)


def publishing(profile: str = "v0.33", endpoint: str = "tcp://127.0.0.1:0", **options: Any) -> SimulatedEngine:
    kind = {"role": "prefill", "profile_name": profile, "block_size": SIZE, "num_gpu_blocks": 1000, **options}
    return SimulatedEngine(kv_events_config=f'{{"publisher":"zmq","endpoint":"{endpoint}"}}', **kind)


def prompt(number: int, words: int = 300) -> dict[str, Any]:
    text = " ".join(f"{number}-{word}" for word in range(words))
    return {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}


async def cached_prefixes(gateway: Deployment) -> CachedPrefixes:
    """Return the known prefixes of the only prefiller. `has_room` takes the latest events."""
    (prefiller,) = gateway.worker.pools.prefill.policy._prefillers.prefillers_by_key.values()  # type: ignore[attr-defined]
    gateway.worker.pools.prefill.has_room()
    return prefiller.cached_prefixes


async def wait_for_prefixes(
    gateway: Deployment, condition: Callable[[CachedPrefixes], bool], what: str
) -> CachedPrefixes:
    cached = await cached_prefixes(gateway)

    def holds() -> bool:
        gateway.worker.pools.prefill.has_room()
        return condition(cached)

    await until(holds, what)
    return cached


async def publish_until(gateway: Deployment, condition: Callable[[], object]) -> None:
    """Publish events until the condition holds: the subscription may begin late."""
    (engine,) = gateway.prefillers
    async with asyncio.timeout(60):
        while not condition():
            assert engine.kv_events is not None
            engine.kv_events.removed("unknown")
            await asyncio.sleep(0.005)


def has_events(gateway: Deployment) -> Callable[[], object]:
    return lambda: gateway.metrics("pdproxy_kv_events_total")


async def test_early_evictions_and_resets_of_engines_are_noted(deploy: Deploy) -> None:
    gateway = await deploy([publishing()], kv_events=AUTO)
    await publish_until(gateway, has_events(gateway))
    for number in range(20):
        await gateway.ask(prompt(number))
    cached = await wait_for_prefixes(gateway, lambda cached: cached.knows_capacity, "evictions")
    assert cached.capacity_tokens == pytest.approx(1000 * SIZE, rel=0.3)
    assert len(cached)
    async with gateway.session.post(gateway.url + "/reset_prefix_cache") as response:
        assert response.status == 200
    await wait_for_prefixes(gateway, lambda cached: not len(cached), "an empty cache")
    address = gateway.prefillers[0].url.removeprefix("http://")
    counted = gateway.metrics("pdproxy_kv_events_total")
    assert {kind for _, kind, _ in counted} == {"stored", "removed", "cleared"}
    assert {each for each, _, _ in counted} == {address}


async def test_configured_port_is_used_when_engines_report_none(deploy: Deploy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gateway = await deploy([publishing("v0.23", f"tcp://127.0.0.1:{port}")], kv_events={"endpoint": f"tcp://*:{port}"})
    await publish_until(gateway, has_events(gateway))


async def test_sglang_reports_its_endpoints(deploy: Deploy) -> None:
    gateway = await deploy([publishing("sglang")], kv_events=AUTO, connector="sglang_bootstrap")
    await publish_until(gateway, has_events(gateway))


async def test_restarted_engine_is_empty_and_subscribed_again(deploy: Deploy) -> None:
    gateway = await deploy([publishing()], kv_events=AUTO)
    await publish_until(gateway, has_events(gateway))
    (engine,) = gateway.prefillers
    publisher = engine.kv_events
    assert publisher is not None
    publisher._next_sequence_number = 0
    await publish_until(gateway, lambda: gateway.metrics("pdproxy_kv_event_gaps_total"))
    assert [reason for _, reason, _ in gateway.metrics("pdproxy_kv_event_gaps_total")] == ["started_anew"]


async def test_unreadable_events_are_logged_once(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy([publishing()], kv_events=AUTO)
    await publish_until(gateway, has_events(gateway))
    publisher = gateway.prefillers[0].kv_events
    assert publisher is not None
    for _ in range(3):
        publisher.publish(b"\xc1")
        before = unreadable(gateway)
        await until(lambda before=before: unreadable(gateway) > before, "what cannot be read")
    assert len([line for line in caplog.messages if "cannot be read" in line]) == 1
    assert (await gateway.ask(prompt(1))).status == 200


def kinds(gateway: Deployment) -> list[str]:
    return [kind for (_, kind, _), count in gateway.metrics("pdproxy_kv_events_total").items() if count]


def unreadable(gateway: Deployment) -> float:
    return sum(
        count for (_, kind, _), count in gateway.metrics("pdproxy_kv_events_total").items() if kind == "unreadable"
    )


async def test_engines_without_endpoints_and_silent_ones_are_logged_once(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_SILENT_UPDATES", 2)
    template = {"endpoint": "tcp://*:+1", "topic": "kv"}
    for settings, words in ((AUTO, "does not report where"), (template, "begins with 'kv'")):

        def said(words: str = words) -> list[str]:
            return [line for line in caplog.messages if words in line]

        gateway = await deploy(
            prefiller={"profile_name": "v0.23", "prefill_ms_per_1k_tokens": 50.0}, kv_events=settings
        )
        for number in range(100):
            if said():
                break
            await gateway.ask(prompt(number))
        await gateway.ask(prompt(1000))
        (line,) = said()
        assert gateway.prefillers[0].url.removeprefix("http://") in line
        await gateway.end()


async def test_unresponsive_engine_is_asked_again(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_ASK_AGAIN_SECONDS", 0.01)
    prefiller = publishing()
    prefiller.faults.add("refuse_status", status=503, path="/kv_event_sources", times=2)
    gateway = await deploy([prefiller], kv_events=AUTO)
    await publish_until(gateway, has_events(gateway))
    (line,) = [line for line in caplog.messages if "asking again" in line]
    assert line.endswith("/kv_event_sources answered 503")
    assert not [line for line in caplog.messages if "does not report where" in line]


async def test_engine_with_unreadable_events_is_not_called_silent(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_SILENT_UPDATES", 1)
    gateway = await deploy([publishing(block_size=1024, prefill_ms_per_1k_tokens=1000.0)], kv_events=AUTO)
    publisher = gateway.prefillers[0].kv_events
    assert publisher is not None
    async with asyncio.timeout(60):
        while "cannot be read" not in caplog.text:
            publisher.publish(b"\xc1")
            await asyncio.sleep(0.005)
    assert (await gateway.ask(prompt(1, words=30))).status == 200  # of which no block is full
    assert set(kinds(gateway)) == {"unreadable"}
    assert "has served requests and published no KV events" not in caplog.text


async def test_unusable_configured_endpoint_is_logged_once(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(kv_events={"endpoint": "tcp://*:65535", "ranks": 2})
    await until(lambda: [line for line in caplog.messages if "no ports from 65535 on" in line], "a warning")
    assert (await gateway.ask(prompt(1))).status == 200
    await gateway.end()
    assert len([line for line in caplog.messages if "no ports from 65535 on" in line]) == 1


async def test_subscriber_process_is_restarted(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_RESTART_SECONDS", (0.01, 0.01))
    pids: list[int] = []
    make = subscriptions.SubscriberProcess

    def made(child: Any) -> subscriptions.SubscriberProcess:
        pids.append(child.pid)
        return make(child)

    monkeypatch.setattr(subscriptions, "SubscriberProcess", made)
    gateway = await deploy([publishing()], kv_events=AUTO)
    await publish_until(gateway, has_events(gateway))
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: len(pids) == 2, "another process")
    before = sum(gateway.metrics("pdproxy_kv_events_total").values())
    await publish_until(gateway, lambda: sum(gateway.metrics("pdproxy_kv_events_total").values()) > before)
    assert [record.levelno for record in caplog.records if "has ended with code -9" in record.message] == [
        logging.WARNING
    ]
    await gateway.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[1], 0)
