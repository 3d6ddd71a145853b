"""Canaries in a running gateway: metrics, log lines, and no effect on clients."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

OFTEN: dict[str, Any] = {"every_seconds": 0.02, "canary_tokens": 64, "canary_seconds": 5.0}


def canaries(gateway: Deployment) -> dict[str, float]:
    return {labels[0]: count for labels, count in gateway.metrics("pdproxy_canaries_total").items()}


def set_interval(gateway: Deployment, every_seconds: float) -> None:
    settings = gateway.worker.settings
    doctor = settings.doctor.model_copy(update={"every_seconds": every_seconds})
    gateway.worker.apply_snapshot(
        replace(gateway.worker.current_snapshot, settings=settings.model_copy(update={"doctor": doctor}))
    )


def log_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "proxy.canary.watch"]


async def test_canaries_are_sent_only_if_an_interval_is_set(deploy: Deploy) -> None:
    gateway = await deploy()
    set_interval(gateway, 0.02)
    await until(lambda: canaries(gateway).get("transferred", 0) >= 2, "canaries")
    set_interval(gateway, 0.0)
    await until(lambda: not gateway.leaks(), "the end of the last one")
    asked = len(generations(*gateway.decoders))
    assert canaries(gateway) == {"transferred": asked / 2}


@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap", "mooncake_bootstrap", "ascend_layerwise"])
async def test_every_pair_gets_canaries(deploy: Deploy, connector: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy")
    gateway = await deploy(2, 2, connector=connector, doctor=OFTEN)
    await until(lambda: canaries(gateway).get("transferred", 0) >= 4, "one round")
    set_interval(gateway, 0.0)
    assert set(canaries(gateway)) == {"transferred"}
    assert all(generations(engine) for engine in gateway.engines)
    assert log_lines(caplog) == []
    assert not [record for record in caplog.records if record.name == "proxy.access"]
    assert gateway.metrics("pdproxy_requests_total") == {}


@pytest.mark.parametrize(
    ("fault", "result", "words"),
    [
        ("corrupt_kv", "differs", "the KV cache arrives damaged"),
        ("reset_before_headers", "failed", "decode instance"),
    ],
)
async def test_bad_pair_is_logged_once_and_once_when_good_again(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, fault: str, result: str, words: str
) -> None:
    caplog.set_level(logging.INFO, "proxy")
    gateway = await deploy(doctor=OFTEN)
    gateway.expects_inexact_pins = True
    (decoder,) = gateway.decoders
    decoder.faults.add(fault, path="/v1/completions")
    await until(lambda: canaries(gateway).get(result, 0) >= 3, "bad canaries")
    decoder.faults.clear()
    await until(lambda: canaries(gateway).get("transferred", 0) >= 2, "good canaries")
    set_interval(gateway, 0.0)
    lines = log_lines(caplog)
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert words in lines[0][1]


async def test_decoder_that_recomputes_canaries_is_counted(deploy: Deploy) -> None:
    recomputing = SimulatedEngine(role="decode", protocol="none")
    gateway = await deploy(1, [recomputing], doctor=OFTEN)
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 1000, True  # the decoder fetches no KV
    await until(lambda: canaries(gateway).get("computed", 0) >= 1, "a canary")
    set_interval(gateway, 0.0)
    assert set(canaries(gateway)) == {"computed"}
