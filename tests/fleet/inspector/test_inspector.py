"""Incompatible engines: found by traffic or reports, logged once, and logged again when compatible."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import pytest

from proxy.balancer.engines import EngineFacts, EngineIdentity, EngineKeys
from proxy.common.backend import Backend, Role
from proxy.fleet import inspector
from proxy.fleet.inspector import TransferMonitor, do_counters_grow
from proxy.sim.engine import SimulatedEngine
from proxy.sim.options import ProtocolName
from proxy.upstream import EngineClient
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.canned import CannedEngine
from tests.conftest import Deploy
from tests.deployment import Deployment, generations

LONG = "every good boy does fine and so does this prompt that is long enough to tell something " * 3
STORED = LONG * 20
SHORT_INTERVAL = {"transfer_interval_seconds": 0.02}


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy")


def logged(caplog: pytest.LogCaptureFixture, level: str, *words: str) -> list[str]:
    """Return the log lines of a level that contain all these words."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and all(word in record.getMessage() for word in words)
    ]


def access_lines(caplog: pytest.LogCaptureFixture) -> Iterator[dict[str, object]]:
    return (record.fields for record in caplog.records if record.name == "proxy.access" and hasattr(record, "fields"))


async def deploy_with_readings(deploy: Deploy, *args: Any, **options: Any) -> Deployment:
    """Deploy a gateway, and wait until it has read the counters of all decoders."""
    gateway = await deploy(*args, health=SHORT_INTERVAL, **options)
    await until(lambda: all(_readings(engine) for engine in gateway.decoders), "the first readings")
    return gateway


def _readings(engine: SimulatedEngine) -> int:
    return sum(seen.path == "/metrics" for seen in engine.requests)


async def send(gateway: Deployment, count: int, text: str = LONG) -> None:
    """Send `count` requests with different prompts, every second one streamed."""
    for number in range(count):
        answer = await gateway.ask(request(Api.CHAT, f"{number} {text}", stream=bool(number % 2)))
        assert answer.status == 200


async def wait_for_verdicts(gateway: Deployment, result: str, count: int) -> None:
    """Wait until at least `count` handoffs have this verdict."""
    await until(lambda: gateway.metrics("pdproxy_handovers_total").get((result,), 0) >= count, "the verdict")


def misfits(gateway: Deployment) -> set[tuple[str, ...]]:
    """Return instance, kind and role of each incompatible instance."""
    return set(gateway.metrics("pdproxy_instance_misfit"))


PAIRS: list[dict[str, Any]] = [
    {},
    {"engine": {"profile_name": "v0.33"}},
    {"connector": "mooncake_bootstrap"},
    {"connector": "ascend_layerwise"},
    {"connector": "sglang_bootstrap"},
    {"connector": "vllm_store"},
]


@pytest.mark.parametrize("options", PAIRS, ids=str)
async def test_decoder_that_fetches_kv_is_compatible(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    gateway = await deploy_with_readings(deploy, **options)
    text = STORED if options.get("connector") == "vllm_store" else LONG
    await send(gateway, 4, text)
    await wait_for_verdicts(gateway, "transferred", 1)
    await send(gateway, 1, "another " + text)
    assert [line["kv"] for line in access_lines(caplog)][-1] == "transferred"
    assert ("computed",) not in gateway.metrics("pdproxy_handovers_total")
    assert misfits(gateway) == set()
    assert logged(caplog, "WARNING") == []


async def test_first_access_log_line_has_the_verdict(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(health={"transfer_interval_seconds": 600.0})
    (decoder,) = gateway.decoders
    await until(lambda: _readings(decoder) > 0, "the reading before the first handoff")
    with decoder.held():
        asking = asyncio.create_task(gateway.ask(request(Api.CHAT, LONG, stream=True)))
        await wait_for_verdicts(gateway, "transferred", 1)
    assert (await asking).status == 200
    await until(lambda: list(access_lines(caplog)), "the line")
    assert [line["kv"] for line in access_lines(caplog)] == ["transferred"]
    async with gateway.session.get(gateway.url + "/instances") as response:
        assert [each["kv"] for each in (await response.json())["instances"]] == [None, "transferred"]


@pytest.mark.parametrize("options", [{}, {"connector": "mooncake_bootstrap"}], ids=str)
async def test_decoder_without_a_connector_is_logged_once(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    gateway = await deploy_with_readings(deploy, decoder={"protocol": "none"}, **options)
    decoder = address(gateway.decoders[0])
    await send(gateway, 4)
    await wait_for_verdicts(gateway, "computed", 3)
    await until(lambda: misfits(gateway), "the misfit")
    assert misfits(gateway) == {(decoder, "kv_not_fetched", "decode")}
    (line,) = logged(caplog, "WARNING")
    assert line.startswith(f"inspector: decode instance {decoder} does not fetch the KV cache that prefillers offer: ")
    assert "--kv-transfer-config" in line

    await until(lambda: gateway.metrics("pdproxy_instance_pinned_kv"), "the metric of pinned KV")
    await send(gateway, 4, "again " + LONG)
    assert [line["kv"] for line in access_lines(caplog)][-4:] == ["computed"] * 4
    assert len(logged(caplog, "WARNING")) == 1
    await until(lambda: list(gateway.metrics("pdproxy_instance_pinned_kv").values()) == [8], "all pinned KV")
    gateway.expects_pinned = 8


async def test_decoder_is_logged_as_compatible_when_it_fetches_again(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy_with_readings(deploy, decoder={"protocol": "none"})
    (engine,) = gateway.decoders
    await send(gateway, 3)
    await wait_for_verdicts(gateway, "computed", 3)
    await until(lambda: gateway.metrics("pdproxy_instance_pinned_kv"), "the metric of pinned KV")
    engine.options = dataclasses.replace(engine.options, protocol=None)
    readings = _readings(engine)
    await engine.restart()
    await send(gateway, 1, "again " + LONG)
    await until(lambda: _readings(engine) > readings, "a reading of the counters of the restarted engine")
    await send(gateway, 3, "once more " + LONG)
    await wait_for_verdicts(gateway, "transferred", 1)
    assert misfits(gateway) == set()
    assert logged(caplog, "INFO", "fits again") == [
        (f"inspector: decode instance {address(engine)} fits again: it fetches the KV cache that prefillers offer")
    ]
    gateway.expects_pinned, gateway.expects_inexact_pins = (
        3,
        True,
    )  # the gateway learns later that the decoder fetches again


async def test_handoffs_to_an_engine_without_counters_are_unknown(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = SimulatedEngine(role="decode", protocol="none")
    decoder.faults.add("refuse_status", path="/metrics", status=404)
    gateway = await deploy_with_readings(deploy, 1, [decoder])
    await send(gateway, 5)
    await wait_for_verdicts(gateway, "unknown", 5)
    assert [line["kv"] for line in access_lines(caplog)] == ["unknown"] * 5
    assert logged(caplog, "WARNING") == []
    gateway.expects_pinned, gateway.expects_inexact_pins = 5, True


async def test_short_prompts_give_no_verdict(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy_with_readings(deploy, decoder={"protocol": "none"})
    await send(gateway, 5, "hi")
    assert gateway.scoreboard.count_handoffs(gateway.worker.pools.decode.all_backends()[0].slot).handoff_count == 0
    assert logged(caplog, "WARNING") == []
    gateway.expects_pinned, gateway.expects_inexact_pins = 5, True


async def test_prompt_without_prefill_is_counted_as_local(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy_with_readings(deploy, kv={"prefill_min_tokens": 100_000})
    await send(gateway, 4)
    assert [line["kv"] for line in access_lines(caplog)] == ["local"] * 4
    assert gateway.metrics("pdproxy_handovers_total") == {}


# Verdicts on pairs: a decoder's counters include all prefillers

RECOMPUTES: dict[str, Any] = {"kv_load_failure_policy": "recompute"}
NOWHERE = "127.0.0.9"  # an address without a listener


async def wait_for_computed_pairs(gateway: Deployment, expected: set[tuple[str, str]]) -> None:
    """Send requests one by one until exactly these pairs have the verdict `computed`."""
    computed: set[tuple[str, str]] = set()
    for number in range(200):
        readings = [_readings(engine) for engine in gateway.decoders]
        await send(gateway, 1, f"{number} {LONG}")
        await until(
            lambda: [_readings(engine) for engine in gateway.decoders] != readings,  # noqa: B023
            "a reading of the counters",
        )
        pairs = await shown_pair_verdicts(gateway)
        computed = {pair for pair, verdict in pairs.items() if verdict == "computed"}
        if computed == expected:
            return
    raise AssertionError(f"pairs that compute: {computed}; expected: {expected}")


async def shown_pair_verdicts(gateway: Deployment) -> dict[tuple[str, str], str]:
    """Return the verdict of each pair as GET /instances shows it."""
    async with gateway.session.get(gateway.url + "/instances") as answer:
        shown = (await answer.json())["instances"]
    return {
        (prefiller, one["address"]): verdict for one in shown for prefiller, verdict in (one["kv_from"] or {}).items()
    }


async def test_unreachable_prefiller_is_logged_beside_a_healthy_one(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    prefillers = [SimulatedEngine(role="prefill"), SimulatedEngine(role="prefill", kv_host=NOWHERE)]
    gateway = await deploy_with_readings(deploy, prefillers, 1, decoder=RECOMPUTES)
    well, odd, decoder = (address(engine) for engine in gateway.engines)
    await wait_for_computed_pairs(gateway, {(odd, decoder)})
    await until(lambda: misfits(gateway), "the misfit")
    assert misfits(gateway) == {(odd, "kv_not_fetched", "prefill")}
    (line,) = logged(caplog, "WARNING")
    assert line.startswith(
        f"inspector: prefill instance {odd} keeps KV that no decoder fetches, while decoders fetch the KV of others: "
    )
    assert await shown_pair_verdicts(gateway) == {(odd, decoder): "computed", (well, decoder): "transferred"}

    before = len(list(access_lines(caplog)))
    await send(gateway, 4, "again " + LONG)
    lines = list(access_lines(caplog))[before:]
    assert {(line["p"], line["kv"]) for line in lines} >= {(odd, "computed"), (well, "transferred")}

    prefillers[1].options = dataclasses.replace(prefillers[1].options, kv_host=None)
    await prefillers[1].restart()
    await wait_for_computed_pairs(gateway, set())
    assert logged(caplog, "INFO", "fits again") == [
        f"inspector: prefill instance {odd} fits again: decoders fetch its KV"
    ]
    assert misfits(gateway) == set()
    assert len(logged(caplog, "WARNING")) == 1
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 200, True


async def test_bad_pair_is_logged_without_blaming_either_instance(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimulatedEngine(role="prefill") as one, SimulatedEngine(role="prefill") as two:
        decoders = [
            SimulatedEngine(role="decode", unreachable_ports=frozenset({two.port}), **RECOMPUTES),
            SimulatedEngine(role="decode", **RECOMPUTES),
        ]
        stand_ins = [StandIn("prefill", port=engine.port) for engine in (one, two)]
        gateway = await deploy_with_readings(deploy, stand_ins, decoders, balance={"prefill_policy": "random"})
        await wait_for_computed_pairs(gateway, {(address(two), address(decoders[0]))})
        await until(lambda: logged(caplog, "WARNING"), "the line")
        await send(gateway, 8, "again " + LONG)
        (line,) = logged(caplog, "WARNING")
        assert line == (
            f"inspector: prefill instance {address(two)} and decode instance {address(decoders[0])} do not fit each "
            "other: the decoder computes this prefiller's prompts again. Check that it reaches the address in the "
            "prefiller's kv_transfer_params"
        )
        assert misfits(gateway) == set()
        gateway.may_stay_pinned, gateway.expects_inexact_pins = 200, True
        await gateway.end()


async def test_decoder_that_fetches_from_no_prefiller_is_logged_once(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    decoders = [SimulatedEngine(role="decode", protocol="none"), SimulatedEngine(role="decode")]
    gateway = await deploy_with_readings(deploy, 2, decoders, balance={"prefill_policy": "random"})
    odd = address(decoders[0])
    await wait_for_computed_pairs(gateway, {(address(engine), odd) for engine in gateway.prefillers})
    await until(lambda: misfits(gateway), "the misfit")
    assert misfits(gateway) == {(odd, "kv_not_fetched", "decode")}
    assert (
        len(
            logged(
                caplog, "WARNING", f"inspector: decode instance {odd} does not fetch the KV cache that prefillers offer"
            )
        )
        == 1
    )
    assert len(logged(caplog, "WARNING")) <= 2  # a pair may have been found first
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 200, True


# Expired leases, which prefillers count

LEASE: dict[str, Any] = {
    "prefiller": {"connector_name": "nixl", "pin_seconds": 1.0},
    "decoder": {"connector_name": "nixl"},
    "kv": {"pin_seconds": 1.0, "release": "never"},
}


MOONCAKE_LEASE: dict[str, Any] = {
    "connector": "mooncake_bootstrap",
    "prefiller": {"profile_name": "v0.33", "pin_seconds": 1.0},
    "kv": {"pin_seconds": 1.0, "release": "never"},
}


@pytest.mark.parametrize(
    ("lease", "protocol"), [(LEASE, "pull"), (MOONCAKE_LEASE, "transfer")], ids=["nixl", "mooncake"]
)
async def test_prefiller_with_expiring_leases_is_logged_without_decoder_counters(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, lease: dict[str, Any], protocol: ProtocolName
) -> None:
    decoder = SimulatedEngine(role="decode", protocol="none", connector_name="nixl")
    decoder.faults.add("refuse_status", path="/metrics", status=404)
    gateway = await deploy_with_readings(deploy, 1, [decoder], **lease)
    (engine,) = gateway.prefillers
    await until(lambda: _readings(engine) > 1, "the first reading, beside that for its ranks")
    await send(gateway, 5)
    await until(lambda: misfits(gateway), "the misfit")
    assert misfits(gateway) == {(address(engine), "kv_not_fetched", "prefill")}
    (line,) = logged(caplog, "WARNING")
    assert line.startswith(
        f"inspector: prefill instance {address(engine)} frees KV that no decoder has fetched in time"
    )
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in line
    await until(lambda: gateway.metrics("pdproxy_kv_orphans_total").get((), 0) >= 3, "the orphans")

    decoder.options = dataclasses.replace(decoder.options, protocol=protocol)
    await decoder.restart()
    await send_until_logged(
        gateway, caplog, f"inspector: prefill instance {address(engine)} fits again: decoders fetch its KV"
    )
    assert misfits(gateway) == set()
    assert len(logged(caplog, "WARNING", "frees KV")) == 1
    gateway.expects_inexact_pins = True


async def test_failed_transfers_of_engines_are_counted(deploy: Deploy) -> None:
    gateway = await deploy_with_readings(
        deploy, engine={"connector_name": "nixl", "kv_load_failure_policy": "recompute"}
    )
    await send(gateway, 1)
    gateway.prefillers[0].core.protocol.pins.clear()
    decoder = gateway.decoders[0]
    decoder.options = dataclasses.replace(decoder.options, unreachable_ports=frozenset({gateway.prefillers[0].port}))
    decoder.core.protocol._options = decoder.options  # type: ignore[attr-defined]
    await send(gateway, 3, "again " + LONG)
    await until(lambda: gateway.metrics("pdproxy_failed_transfers_total") == {("decode",): 3.0}, "the count")
    gateway.may_stay_pinned, gateway.expects_inexact_pins = 3, True


async def send_until_logged(gateway: Deployment, caplog: pytest.LogCaptureFixture, line: str) -> None:
    """Send requests one by one until this line is logged."""
    for number in range(2000):
        await send(gateway, 1, f"{number} at last {LONG}")
        if logged(caplog, "INFO", line):
            return
    raise AssertionError(f"not logged: {line}")


async def test_leases_of_abandoned_requests_blame_no_instance(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy_with_readings(deploy, **LEASE)
    (engine,) = gateway.prefillers
    await until(lambda: _readings(engine) > 1, "the first reading, beside that for its ranks")
    await send(gateway, 4)
    gateway.decoders[0].faults.add("slow_load", seconds=60.0)
    for number in range(4):
        async with gateway.asking(request(Api.CHAT, f"{number} left {LONG}", stream=True)):
            await until(lambda: len(engine.pins) > 0, "KV that waits for its decoder")
        await until(lambda: not engine.pins, "the end of its lease")
    gateway.decoders[0].faults.clear()
    readings = _readings(engine)
    await send(gateway, 4, "again " + LONG)
    await until(lambda: _readings(engine) > readings + 2, "readings after that")
    assert misfits(gateway) == set()
    assert logged(caplog, "WARNING") == []
    gateway.expects_inexact_pins = True


async def test_engines_without_a_common_store_are_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy_with_readings(deploy, connector="vllm_store", engine={"protocol": "none"})
    await send(gateway, 4, STORED)
    await wait_for_verdicts(gateway, "computed", 3)
    await until(lambda: misfits(gateway), "the misfit")
    (line,) = logged(caplog, "WARNING")
    assert "finds nothing in the KV store" in line


async def test_counters_are_not_read_without_handoffs_or_when_disabled(deploy: Deploy) -> None:
    silent = await deploy(health={"transfer_interval_seconds": 0.0})
    await until(lambda: _readings(silent.prefillers[0]) == 1, "the question for its ranks")
    await send(silent, 4)
    gateway = await deploy_with_readings(deploy)
    await send(gateway, 4)
    await wait_for_verdicts(gateway, "transferred", 1)
    readings = _readings(gateway.decoders[0])
    await send(gateway, 20, "hi")
    assert _readings(gateway.decoders[0]) <= readings + 1  # a reading of the earlier handoffs
    assert (_readings(silent.prefillers[0]), _readings(silent.decoders[0])) == (1, 0)


async def test_decoder_with_more_prefillers_than_lanes_is_read_rarely(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pair can be judged then, but the decoder can. It was read after each handoff before."""
    monkeypatch.setattr(inspector, "LANES", 1)
    looks: list[bool] = []
    start_due_readings = TransferMonitor.start_due_readings

    def count_looks(self: TransferMonitor, interval_seconds: float) -> bool:
        looks.append(start_due_readings(self, interval_seconds))
        return looks[-1]

    monkeypatch.setattr(TransferMonitor, "start_due_readings", count_looks)
    gateway = await deploy(2, 1, health={"transfer_interval_seconds": 600.0})
    (decoder,) = gateway.decoders
    await until(lambda: _readings(decoder) > 0, "the reading before the first handoff")
    await send(gateway, 2)
    await wait_for_verdicts(gateway, "transferred", 1)
    await until(lambda: looks and not looks[-1], "the end of urgent readings")
    readings, seen = _readings(decoder), len(looks)
    await send(gateway, 4, "again " + LONG)
    await until(lambda: len(looks) > seen + 1, "two looks after these handoffs")
    assert _readings(decoder) == readings


async def test_prefiller_counters_are_read_only_with_leases(deploy: Deploy) -> None:
    gateway = await deploy_with_readings(deploy, connector="ascend_layerwise")
    await until(lambda: _readings(gateway.prefillers[0]) == 1, "the question for its ranks")
    await send(gateway, 4)
    await wait_for_verdicts(gateway, "transferred", 1)
    assert _readings(gateway.prefillers[0]) == 1


async def test_prefiller_without_a_connector_is_logged_once(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(prefiller={"protocol": "none"})
    await send(gateway, 3)
    prefiller = address(gateway.prefillers[0])
    assert misfits(gateway) == {(prefiller, "no_kv_params", "prefill")}
    (line,) = logged(caplog, "WARNING")
    assert line.startswith(f"inspector: prefill instance {prefiller} answers prefills without kv_transfer_params")
    assert "check its --kv-transfer-config" in line
    assert [line["kv"] for line in access_lines(caplog)] == ["local"] * 3


async def test_prefiller_is_logged_as_compatible_when_it_has_kv_params_again(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy()
    gateway.prefillers[0].faults.add("missing_kv_params")
    long = "word " * 12_000
    for _ in range(2):
        answer = await gateway.ask(request(Api.CHAT, long))
        assert (answer.status, answer.error["code"]) == (502, "kv_handoff_failed")
    assert len(logged(caplog, "WARNING", "without kv_transfer_params")) == 1
    gateway.prefillers[0].faults.clear()
    await send(gateway, 1, long)
    assert len(logged(caplog, "INFO", "fits again: its answers have KV parameters for decoders")) == 1
    assert misfits(gateway) == set()


def address(engine: Any) -> str:
    return f"{engine.host}:{engine.port}"


async def wait_for_misfits(gateway: Deployment, *expected: tuple[str, str, str]) -> None:
    """Wait until exactly these instances are incompatible."""
    await until(lambda: len(misfits(gateway)) >= len(expected), "the misfits")
    assert misfits(gateway) == set(expected)


async def test_vllm_is_incompatible_with_the_sglang_connector(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    vllm = {"profile_name": "v0.30", "protocol": "none"}
    gateway = await deploy(connector="sglang_bootstrap", engine=vllm, health=SHORT_INTERVAL)
    prefiller, decoder = (address(engine) for engine in gateway.engines)
    await wait_for_misfits(gateway, (prefiller, "connector", "prefill"), (decoder, "connector", "decode"))
    assert len(logged(caplog, "WARNING", "is vLLM, which ignores the parameters of connector sglang_bootstrap")) == 2


async def test_sglang_is_incompatible_with_vllm_connectors(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(engine={"profile_name": "sglang"}, health=SHORT_INTERVAL)
    prefiller, decoder = (address(engine) for engine in gateway.engines)
    await wait_for_misfits(gateway, (prefiller, "connector", "prefill"), (decoder, "connector", "decode"))
    assert len(logged(caplog, "WARNING", "is SGLang, which connector vllm_pull does not serve: use sglang_boot")) == 2


async def test_sglang_in_another_role_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(
        connector="sglang_bootstrap", prefiller={"role": "decode"}, decoder={"role": "decode"}, health=SHORT_INTERVAL
    )
    prefiller = address(gateway.prefillers[0])
    await wait_for_misfits(gateway, (prefiller, "role", "prefill"))
    (line,) = logged(caplog, "WARNING")
    assert line == (
        f"inspector: prefill instance {prefiller} is configured as a prefiller but was "
        "started with --disaggregation-mode decode"
    )


async def test_wrong_bootstrap_port_of_sglang_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    async with SimulatedEngine(role="prefill", profile_name="sglang") as engine:
        stand_in = StandIn("prefill", port=engine.port, bootstrap_port=1)
        decoder = SimulatedEngine(role="decode", profile_name="sglang")
        gateway = await deploy([stand_in], [decoder], connector="sglang_bootstrap", health=SHORT_INTERVAL)
        await wait_for_misfits(gateway, (address(engine), "bootstrap", "prefill"))
        (line,) = logged(caplog, "WARNING")
        port = engine.bootstrap_port
        assert line.endswith(
            f"has its bootstrap server at port {port}, but decoders are sent to 1: "
            f"configure it as `--prefill URL {port}`"
        )


async def test_connector_that_vllm_does_not_run_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(
        engine={"dev_mode": True},
        prefiller={"protocol": "transfer"},
        decoder={"protocol": "none"},
        health=SHORT_INTERVAL,
    )
    prefiller, decoder = (address(engine) for engine in gateway.engines)
    await wait_for_misfits(gateway, (prefiller, "connector", "prefill"), (decoder, "connector", "decode"))
    assert logged(
        caplog, "WARNING", prefiller, "which connector vllm_pull does not serve: use mooncake_bootstrap, or auto"
    )
    assert logged(caplog, "WARNING", decoder, "was started without a --kv-transfer-config")


@pytest.mark.parametrize("options", [*PAIRS, {"connector": "plain"}], ids=str)
async def test_engines_compatible_with_the_connector_are_not_logged(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    engine: dict[str, Any] = {**options.get("engine", {}), "dev_mode": True}
    gateway = await deploy(**{**options, "engine": engine}, health=SHORT_INTERVAL)
    health, pools = gateway.worker.health, gateway.worker.pools
    backends = [*pools.prefill.all_backends(), *pools.decode.all_backends()]
    await until(
        lambda: all((f := health.health_of(b).engine_facts) and f.identity.engine_setup for b in backends),
        "the setup of all engines",
    )
    await send(gateway, 1)
    assert misfits(gateway) == set()
    assert logged(caplog, "WARNING") == []


async def test_model_of_a_single_engine_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    engines = [SimulatedEngine(role="decode", model=model) for model in ("sim", "other", "sim")]
    gateway = await deploy(1, engines, health=SHORT_INTERVAL)
    odd = address(engines[1])
    await wait_for_misfits(gateway, (odd, "model", "decode"))
    (line,) = logged(caplog, "WARNING")
    assert line == f"inspector: decode instance {odd} serves 'other', and prefill instances 'sim': it gets no requests"


async def test_model_is_not_logged_when_its_decoder_is_down(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    both = [[SimulatedEngine(role=role, model=model) for model in ("sim", "other")] for role in ("prefill", "decode")]
    gateway = await deploy(*both, health=SHORT_INTERVAL)
    worker = gateway.worker
    (first, second), health = worker.pools.decode.all_backends(), worker.health
    await until(
        lambda: worker.pools.decode.eligible_backends() and worker.lanes.served_models.has_several_groups,
        "the engines' models",
    )
    for _ in range(10):
        health.on_probe(second, False, "it is down")
    facts = health.health_of(first).engine_facts
    assert facts is not None
    health.set_engine_facts(first, replace(facts, identity=replace(facts.identity, models=frozenset({"third"}))))
    await until(lambda: misfits(gateway), "a model that only one serves")
    assert misfits(gateway) == {(first.name, "model", "decode"), (address(gateway.prefillers[0]), "model", "prefill")}


async def test_rejected_engine_key_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(decoder={"api_key": "theirs"}, auth={"engine_api_key": "another-key"}, health=SHORT_INTERVAL)
    decoder = address(gateway.decoders[0])
    await wait_for_misfits(gateway, (decoder, "engine_key", "decode"))
    (line,) = logged(caplog, "WARNING")
    assert line.startswith(
        f"inspector: decode instance {decoder} rejects the key that pdproxy sends: check OPENAI_API_KEY or auth"
    )


async def test_engine_added_without_its_required_key_is_logged(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    key = "the-engines-key"
    gateway = await deploy(engine={"api_key": key}, auth={"engine_api_key": key}, health=SHORT_INTERVAL)
    async with SimulatedEngine(role="decode", api_key=key) as added:
        gateway.roster.add_for_administrator(Backend(Role.DECODE, added.host, added.port))
        backend = gateway.worker.pools.decode.all_backends()[-1]
        gateway.worker.health.on_probe(backend, True, "test")
        gateway.worker.health.set_engine_facts(backend, EngineFacts(identity=EngineIdentity(has_refused_key=True)))
        await wait_for_misfits(gateway, (address(added), "engine_key", "decode"))
        (line,) = logged(caplog, "WARNING")
        assert 'requires a key, and pdproxy sends it none because it was added without "send_key": true' in line
        gateway.roster.remove_backend(Role.DECODE, added.host, added.port)
        gateway.worker.prober.remove_drained_backends()
        assert misfits(gateway) == set()


async def test_missing_engine_key_is_logged_when_a_request_fails(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(engine={"api_key": "theirs"}, health=SHORT_INTERVAL)
    prefiller = address(gateway.prefillers[0])
    assert [(await gateway.ask(request(Api.CHAT))).status for _ in range(3)] == [401] * 3
    assert misfits(gateway) == {(prefiller, "engine_key", "prefill")}
    (line,) = logged(caplog, "WARNING")
    assert "requires a key, and this gateway has none: set OPENAI_API_KEY or auth.engine_api_key" in line
    assert (await gateway.ask(request(Api.CHAT), authorization="Bearer theirs")).status == 200
    assert logged(caplog, "INFO", "fits again") == [
        f"inspector: prefill instance {prefiller} fits again: it accepts the key"
    ]


async def test_client_without_a_key_does_not_blame_the_engine(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await deploy(engine={"api_key": "theirs"}, health=SHORT_INTERVAL)
    assert (await gateway.ask(request(Api.CHAT), authorization="Bearer theirs")).status == 200
    assert (await gateway.ask(request(Api.CHAT))).status == 401
    assert misfits(gateway) == set()
    assert logged(caplog, "WARNING") == []


@dataclasses.dataclass
class StandIn(CannedEngine):
    """Puts a running server in the place of an engine."""

    bootstrap_port: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_gateway_configured_as_an_engine_is_logged(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    inner = await deploy()
    port = int(inner.url.rpartition(":")[2])
    gateway = await deploy([StandIn("prefill", port=port)], 1, health=SHORT_INTERVAL)
    await wait_for_misfits(gateway, (f"127.0.0.1:{port}", "gateway", "prefill"))
    (line,) = logged(caplog, "WARNING")
    assert f"prefill instance 127.0.0.1:{port} is a gateway like this one and no engine" in line


# Bootstrap servers of vLLM's MooncakeConnector, which only requests check


async def test_closed_bootstrap_port_is_logged_and_the_prefiller_stays_healthy(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    prefiller = StandIn("prefill", bootstrap_port=1)
    async with SimulatedEngine(role="prefill", protocol="transfer") as engine:
        prefiller.port = engine.port
        gateway = await deploy(
            [prefiller], 1, connector="mooncake_bootstrap", health=SHORT_INTERVAL, retry={"max_attempts": 1}
        )
        backend = gateway.worker.pools.prefill.all_backends()[0]
        for _ in range(3):
            answer = await gateway.ask(request(Api.CHAT))
            assert (answer.status, answer.error["code"]) == (503, "prefill_bootstrap")
            assert "its bootstrap server at port 1 cannot be reached (connection refused)" in answer.error["message"]
            assert "127.0.0.1" not in answer.error["message"]
            assert "retry-after" in answer.headers
        assert misfits(gateway) == {(address(engine), "bootstrap", "prefill")}
        (line,) = logged(caplog, "WARNING", "bootstrap")
        assert line.startswith(
            f"inspector: prefill instance {address(engine)} cannot be met by decoders: its bootstrap server"
        )
        assert gateway.worker.health.health_of(backend).is_confirmed_healthy

        gateway.roster.add_for_administrator(
            Backend(Role.PREFILL, backend.host, backend.port, bootstrap_port=engine.bootstrap_port)
        )
        await send(gateway, 1)
        assert misfits(gateway) == set()
        assert len(logged(caplog, "INFO", "fits again: its bootstrap server answers")) == 1
        await gateway.end()


async def test_stopped_prefiller_is_not_reported_for_its_bootstrap_port(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(connector="mooncake_bootstrap", health=SHORT_INTERVAL, admission={"wait_seconds": 0.5})
    await gateway.prefillers[0].kill()
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.error["code"]) == (503, "no_healthy_prefill")
    assert logged(caplog, "WARNING", "bootstrap server") == []


async def test_bootstrap_port_of_another_prefiller_does_not_blame_the_decoder(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    short: dict[str, Any] = {"waiting_seconds": 0.05, "pin_seconds": 0.05}
    async with SimulatedEngine(role="prefill", protocol="transfer", **short) as wrong:
        right = SimulatedEngine(role="prefill", protocol="transfer", **short)
        async with right:
            stand_ins = [StandIn("prefill", port=e.port, bootstrap_port=right.bootstrap_port) for e in (wrong, right)]
            gateway = await deploy(stand_ins, 1, connector="mooncake_bootstrap", decoder=short, health=SHORT_INTERVAL)
            for number in range(8):  # both prefillers are used; requests that fail at one are retried at the other
                answer = await gateway.ask(request(Api.CHAT, f"{number} {LONG}", stream=bool(number % 2)))
                assert answer.status == 200
            (decoder,) = gateway.worker.pools.decode.all_backends()
            assert gateway.worker.health.health_of(decoder).consecutive_failures == 0
            assert misfits(gateway) == {(address(wrong), "bootstrap", "prefill")}
            (line,) = logged(caplog, "WARNING", "cannot be met by decoders")
            assert line.startswith(
                f"inspector: prefill instance {address(wrong)} cannot be met by decoders: its bootstrap server is"
            )
            assert f"another prefiller's: prefill instance {address(right)} has the same" in line
            # On a busy machine a pin may expire first, and this connector cannot release KV.
            assert gateway.metrics("pdproxy_kv_released_total").keys() <= {("unsupported",)}
            assert gateway.metrics("pdproxy_instance_pinned_kv") == {}
            await gateway.end()


async def test_prefiller_with_an_engine_id_is_not_met_at_a_foreign_port(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    engine: dict[str, Any] = {"role": "prefill", "protocol": "transfer", "dev_mode": True}
    async with SimulatedEngine(**engine) as one, SimulatedEngine(**engine) as other:
        stand_in = StandIn("prefill", port=one.port, bootstrap_port=other.bootstrap_port)
        gateway = await deploy([stand_in], 1, connector="mooncake_bootstrap", health=SHORT_INTERVAL)
        pool = gateway.worker.pools.prefill
        await until(lambda: pool.engine_id_of(pool.all_backends()[0]), "its engine_id")
        answer = await gateway.ask(request(Api.CHAT))
        assert (answer.status, answer.error["code"]) == (503, "prefill_bootstrap")
        (line,) = logged(caplog, "WARNING", "cannot be met by decoders")
        assert f"the bootstrap server at port {other.bootstrap_port} is another prefiller's" in line
        assert gateway.decoders[0].state.prompt_tokens == 0
        await gateway.end()


# Request ids in engines


@pytest.mark.parametrize("options", [*PAIRS, {"connector": "plain"}, {"kv": {"prefill_min_tokens": 10_000}}], ids=str)
async def test_engines_receive_the_request_ids_of_the_access_log(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    gateway = await deploy(**options)
    for stream in (True, False):
        answer = await gateway.ask(request(Api.CHAT, stream=stream))
        line = list(access_lines(caplog))[-1]
        is_sglang = options.get("connector") == "sglang_bootstrap"
        (decode,) = generations(*gateway.decoders)[-1:]
        assert line["d_id"] == (decode.body["rid"] if is_sglang else decode.headers["x-request-id"])
        answer_id = (answer.events[0] if stream else answer.json)["id"]
        assert str(line["d_id"]) in answer_id
        prefills = generations(*gateway.prefillers)[-1:]
        ids = [leg.body["rid"] if is_sglang else leg.headers["x-request-id"] for leg in prefills]
        assert line["p_id"] == (ids[0] if ids else "-")


@pytest.mark.parametrize("connector", ["vllm_pull", "vllm_store", "mooncake_bootstrap", "ascend_layerwise"])
async def test_prefill_error_with_status_200_is_an_error(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, connector: str
) -> None:
    said = {"object": "error", "message": "out of paper", "type": "InternalServerError", "param": None, "code": 500}
    gateway = await deploy(connector=connector, retry={"max_attempts": 1})
    gateway.prefillers[0].faults.add("refuse_status", status=200, body=said)
    answer = await gateway.ask(request(Api.CHAT))
    assert (answer.status, answer.json) == (500, said)
    assert gateway.metrics("pdproxy_missing_kv_total") == {}
    assert misfits(gateway) == set()
    gateway.expects_inexact_pins = True  # it may have pinned KV before it failed


# Progress


@pytest.mark.fault(115)
@pytest.mark.parametrize("profile", ["v0.18", "v0.33"])
async def test_engine_makes_progress_while_its_token_counters_grow(profile: str) -> None:
    async with SimulatedEngine(role="decode", profile_name=profile) as engine, EngineClient() as client:
        backend = Backend(Role.DECODE, engine.host, engine.port)
        assert not await do_counters_grow(client, EngineKeys(None), backend, 0.0)
        looking = asyncio.create_task(do_counters_grow(client, EngineKeys(None), backend, 0.2))
        await until(lambda: _readings(engine) == 3, "the first reading")
        body = b'{"model": "sim", "prompt": "x"}'
        assert (await client.post_json(engine.url, "/v1/completions", 5.0, body)).status == 200
        assert await looking


@pytest.mark.fault(115)
async def test_silent_engine_makes_no_progress() -> None:
    async with EngineClient() as client:
        async with CannedEngine("decode") as engine:
            backend = Backend(Role.DECODE, engine.host, engine.port)
            assert not await do_counters_grow(client, EngineKeys(None), backend, 0.0)
        assert not await do_counters_grow(client, EngineKeys(None), backend, 0.0)
