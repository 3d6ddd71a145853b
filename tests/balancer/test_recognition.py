"""Selection of the connector from facts about engines, and the check of a chosen one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from proxy.balancer.engines import EngineIdentity, parse_kind, parse_setup
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.recognition import EngineReport, find_connector_mismatch, recognise_connector
from proxy.common.backend import Role
from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS, SettingsError

P, D = Role.PREFILL, Role.DECODE
CONNECTOR, ROLE = IncompatibilityKind.CONNECTOR, IncompatibilityKind.ROLE
NAMES: dict[str, Any] = {P: "10.0.0.1:7100", D: "10.0.0.3:7100"}


def models(owner: object) -> Any:
    return {"object": "list", "data": [{"id": "kimi", "object": "model", "owned_by": owner}]}


def said(role: Role, name: str, models: Any, info: Any = None) -> EngineReport:
    """Return the report of an engine with these answers at `/v1/models` and `/server_info`."""
    return EngineReport(role, name, EngineIdentity(parse_kind(models), engine_setup=parse_setup(info)))


def sglang(role: Role, mode: str | None = None) -> EngineReport:
    """Return the report of an SGLang, by default in its configured role."""
    return said(role, NAMES[role], models("sglang"), {"disaggregation_mode": mode or role.value, "version": "0.5.23"})


def vllm(role: Role, *connectors: str, kv_role: str = "kv_both") -> EngineReport:
    """Return the report of a vLLM, which is in development mode if it has connectors."""
    if not connectors:
        return said(role, NAMES[role], models("vllm"))
    extra = {"connectors": [{"kv_connector": name, "kv_role": kv_role} for name in connectors]}
    transfer: dict[str, Any] = {"kv_connector": connectors[0], "kv_role": kv_role, "kv_connector_extra_config": {}}
    if len(connectors) > 1:
        transfer |= {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    return said(role, NAMES[role], models("vllm"), {"vllm_config": {"kv_transfer_config": transfer}})


def encoder(name: str, ranks: int = 1) -> EngineReport:
    """Return the report of an encoder with this connector for encoded media, and data-parallel ranks."""
    config: dict[str, Any] = {"kv_transfer_config": None}
    config["ec_transfer_config"] = {"ec_connector": name, "ec_role": "ec_producer"}
    config["parallel_config"] = {"data_parallel_size": ranks}
    return said(Role.ENCODE, "e:1", models("vllm"), {"vllm_config": config})


NIXL_OPTIONS = {"bidirectional_kv_xfer": True, "kv_lease_duration": 12, "decoder_kv_blocks_ttl": 40}
UNSERVED = "which no single connector serves for certain: set `connector`, see docs/reference/connectors.md"


def problem(*engines: EngineReport) -> str:
    with pytest.raises(SettingsError) as raised:
        recognise_connector(engines)
    return str(raised.value)


def test_sglang_engines_get_the_bootstrap_connector() -> None:
    found = recognise_connector([sglang(P), sglang(D), sglang(D)])
    assert (found.connector_name, found.recognition_reason) == (
        "sglang_bootstrap",
        "1 prefill and 2 decode instances are SGLang",
    )


def test_sglang_that_reports_no_role_keeps_the_configured_one() -> None:
    assert recognise_connector(
        [said(P, "", models("sglang"), None), said(D, "", models("sglang"), "?")]
    ).connector_name == ("sglang_bootstrap")


@pytest.mark.parametrize(
    ("role", "mode", "sentence"),
    [
        (P, "decode", "10.0.0.1:7100 is configured as a prefiller but was started with --disaggregation-mode decode"),
        (D, "prefill", "10.0.0.3:7100 is configured as a decoder but was started with --disaggregation-mode prefill"),
        (D, "null", "10.0.0.3:7100 is configured as a decoder but was started without --disaggregation-mode"),
    ],
)
def test_sglang_engine_in_another_role_is_an_error(role: Role, mode: str, sentence: str) -> None:
    engines = [sglang(P), sglang(D), sglang(role, mode)]
    assert problem(*engines) == f"connector auto: {sentence}"


def test_vllm_without_transfer_config_gets_the_pull_connector() -> None:
    found = recognise_connector([vllm(P), vllm(D)])
    assert found.connector_name == "vllm_pull"
    assert "VLLM_SERVER_DEV_MODE=1: set `connector` unless decoders pull the cache" in found.recognition_reason


@pytest.mark.parametrize(
    ("told", "connector"),
    [
        ("NixlConnector", "vllm_pull"),
        ("NixlPushConnector", "nixl_push"),
        ("MooncakeConnectorV1", "vllm_pull"),
        ("MooncakeConnector", "mooncake_bootstrap"),
        ("MooncakeLayerwiseConnector", "ascend_layerwise"),
        ("AscendStoreConnector", "vllm_store"),
        ("MooncakeStoreConnector", "vllm_store"),
        ("LMCacheConnectorV1", "vllm_store"),
        ("LMCacheMPConnector", "vllm_store"),
        ("FlexKVConnectorV1", "vllm_store"),
        ("HF3FSKVConnector", "vllm_store"),
        ("MooncakePullConnector", "vllm_pull"),
        ("MooncakeConnectorV2", "vllm_pull"),
        ("MooncakeD2RHConnectorV1", "vllm_pull"),
        ("SfaRemoteD2HConnector", "ascend_layerwise"),
    ],
)
def test_connector_is_found_by_the_kv_connector_of_vllm(told: str, connector: str) -> None:
    found = recognise_connector([vllm(P, told, kv_role="kv_producer"), vllm(D, told, kv_role="kv_consumer")])
    assert (found.connector_name, found.recognition_reason) == (
        connector,
        f"1 prefill and 1 decode instance are vLLM with {told}",
    )


@pytest.mark.parametrize(
    ("together", "connector"),
    [
        (("MooncakeConnectorV1", "AscendStoreConnector"), "vllm_pull"),
        (("RecomputeCPUOffloadConnector", "MooncakeLayerwiseConnector"), "ascend_layerwise"),
        (("AscendStoreConnector", "OffloadingConnector"), "vllm_store"),
    ],
)
def test_transferring_connector_counts_beside_a_store(together: tuple[str, ...], connector: str) -> None:
    assert recognise_connector([vllm(P, *together), vllm(D, *together)]).connector_name == connector


def test_one_engine_with_a_transfer_config_is_enough() -> None:
    assert recognise_connector([vllm(P), vllm(D, "MooncakeLayerwiseConnector")]).connector_name == "ascend_layerwise"


@pytest.mark.parametrize(
    ("engines", "sentence"),
    [
        ([sglang(P), vllm(D)], "10.0.0.1:7100 is SGLang and 10.0.0.3:7100 is vLLM, and no connector serves both"),
        (
            [vllm(P, "NixlConnector"), vllm(D, "MooncakeConnector")],
            "10.0.0.1:7100 has NixlConnector and 10.0.0.3:7100 has MooncakeConnector, and no connector serves both",
        ),
        (
            [vllm(P, "MooncakeConnectorV1", kv_role="kv_consumer"), vllm(D)],
            "10.0.0.1:7100 is configured as a prefiller but was started with kv_role kv_consumer",
        ),
        (
            [vllm(P), vllm(D, "MooncakeConnectorV1", kv_role="kv_producer")],
            "10.0.0.3:7100 is configured as a decoder but was started with kv_role kv_producer",
        ),
        (
            [said(P, "p:1", models("vllm"), {"vllm_config": {"kv_transfer_config": None}}), vllm(D)],
            "p:1 was started without a --kv-transfer-config",
        ),
        (
            [vllm(P, "OffloadingConnector"), vllm(D)],
            (
                "10.0.0.1:7100 has OffloadingConnector, which keeps KV cache on one host and transfers none: "
                "combine it with NixlConnector in a MultiConnector, or use connector plain"
            ),
        ),
        (
            [vllm(P, "MoRIIOConnector"), vllm(D)],
            (
                "10.0.0.1:7100 has MoRIIOConnector: this gateway does not send its heartbeats, so start the engines "
                "with NixlConnector"
            ),
        ),
        (
            [vllm(P, "NixlPushConnector"), vllm(D, "NixlConnector")],
            "10.0.0.1:7100 has NixlPushConnector and 10.0.0.3:7100 has NixlConnector, and no connector serves both",
        ),
        (
            [vllm(P, "NixlConnector", "MooncakeLayerwiseConnector"), vllm(D)],
            "10.0.0.1:7100 has NixlConnector and MooncakeLayerwiseConnector, " + UNSERVED,
        ),
        (
            [said(P, "p:1", models("lmdeploy")), vllm(D)],
            "p:1 is neither vLLM nor SGLang, by its /v1/models: set `connector`",
        ),
    ],
)
def test_engines_without_a_common_connector_are_an_error(engines: list[EngineReport], sentence: str) -> None:
    assert problem(*engines) == f"connector auto: {sentence}"


# KVConnectorFactory of vLLM 0.32, and vLLM-Ascend 0.30.
VLLM_NAMES = """DecodeBenchConnector ExampleConnector ExampleHiddenStatesConnector FlexKVConnectorV1 HF3FSKVConnector
    HiSparseConnector LMCacheConnectorV1 LMCacheMPConnector MoRIIOConnector MooncakeConnector MooncakeStoreConnector
    NixlConnector NixlPullConnector NixlPushConnector OffloadingConnector SimpleCPUOffloadConnector""".split()
ASCEND_NAMES = """AscendStoreConnector MooncakeConnectorStoreV1 MooncakeConnectorV1 MooncakeConnectorV2
    MooncakeD2RHConnectorV1 MooncakeHybridConnector MooncakeLayerwiseConnector MooncakePullConnector
    SfaRemoteD2HConnector UCMConnector""".split()


@pytest.mark.parametrize("name", VLLM_NAMES + ASCEND_NAMES)
def test_every_kv_connector_has_a_connector_or_a_reason(name: str) -> None:
    engines = [vllm(P, name), vllm(D, name)]
    if any(name in traits.kv_connectors for traits in CONNECTOR_TRAITS.values()):
        assert recognise_connector(engines).connector_name in CONNECTORS
    else:
        assert re.search("(start the engines|combine it) with NixlConnector", problem(*engines))


@pytest.mark.parametrize("answer", [None, 1, [], {}, {"data": 1}, {"data": [None, 1]}, models(None), models([1])])
def test_malformed_models_are_those_of_an_unknown_engine(answer: Any) -> None:
    assert "is neither vLLM nor SGLang" in problem(said(P, "p:1", answer), vllm(D))


@pytest.mark.parametrize(
    "transfer",
    [
        {"kv_connector": "MultiConnector"},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [1, {}]}},
        {"kv_connector": ["x"]},
    ],
)
def test_malformed_transfer_config_is_an_error(transfer: Any) -> None:
    engine = said(P, "p:1", models("vllm"), {"vllm_config": {"kv_transfer_config": transfer}})
    assert "which no single connector serves for certain" in problem(engine, vllm(D))


def test_options_of_a_combined_connector_are_read() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_connector_extra_config": NIXL_OPTIONS}
    extra = {"connectors": [nixl, {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": 1}]}
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    setup = said(P, "p:1", models("vllm"), {"vllm_config": {"kv_transfer_config": transfer}}).engine_setup
    assert (setup.has_bidirectional_kv, setup.lease_seconds, setup.answer_kv_seconds) == (True, 12.0, 40.0)


@pytest.mark.parametrize("info", [1, [], {}, {"vllm_config": "text"}, {"vllm_config": {}}])
def test_malformed_server_info_of_vllm_is_ignored(info: Any) -> None:
    assert recognise_connector([said(P, "p:1", models("vllm"), info), vllm(D)]).connector_name == "vllm_pull"


@pytest.mark.parametrize(
    ("engine", "connector", "kind", "words"),
    [
        (vllm(P), "sglang_bootstrap", CONNECTOR, "is vLLM"),
        (sglang(D), "mooncake_bootstrap", CONNECTOR, "use sglang_bootstrap, or auto"),
        (sglang(P, "null"), "sglang_bootstrap", ROLE, "without --disaggregation-mode"),
        (sglang(D, "decode"), "plain", ROLE, "must do both stages"),
        (vllm(D, "NixlConnector"), "mooncake_bootstrap", CONNECTOR, "runs NixlConnector"),
        (vllm(P, "MooncakeConnector"), "vllm_store", CONNECTOR, "use mooncake_bootstrap, or auto"),
        (vllm(P, "NixlPushConnector"), "vllm_pull", CONNECTOR, "use nixl_push, or auto"),
        (vllm(P, "MoRIIOConnector"), "vllm_pull", CONNECTOR, "does not send its heartbeats"),
        (vllm(D, "HiSparseConnector"), "vllm_pull", CONNECTOR, "combine it with NixlConnector"),
        (encoder("ECMooncakeConnector", 2), "vllm_pull", CONNECTOR, "use ECCPUConnector or ECExampleConnector"),
        (vllm(P, "MooncakeConnector", kv_role="kv_consumer"), "mooncake_bootstrap", ROLE, "as a prefiller"),
        (
            said(D, "d:1", models("vllm"), {"vllm_config": {"kv_transfer_config": None}}),
            "vllm_pull",
            CONNECTOR,
            "without a --kv-transfer-config",
        ),
    ],
)
def test_engine_is_unsuited_to_the_chosen_connector(
    engine: EngineReport, connector: str, kind: IncompatibilityKind, words: str
) -> None:
    found = find_connector_mismatch(engine, connector, None)
    assert found is not None
    assert (found[0], words in found[1]) == (kind, True)


@pytest.mark.parametrize(
    ("engine", "connector"),
    [
        (vllm(P), "mooncake_bootstrap"),  # it does not tell
        (encoder("ECCPUConnector"), "vllm_pull"),
        (encoder("ECMooncakeConnector"), "vllm_pull"),
        (vllm(D, "NixlConnector", kv_role="kv_producer"), "vllm_pull"),  # NIXL's roles are the same
        (vllm(P, "NixlConnector"), "vllm_store"),  # what it names is fetched there, too
        (vllm(P, "NixlConnector", "MooncakeStoreConnector"), "vllm_pull"),
        (vllm(P, "P2pNcclConnector"), "vllm_pull"),  # no connector is known to serve it
        (vllm(D, "NixlConnector"), "plain"),
        (sglang(P), "sglang_bootstrap"),
        (sglang(D, "null"), "plain"),
        (said(P, "p:1", models("lmdeploy")), "vllm_pull"),
        (said(Role.ENCODE, "e:1", models("vllm"), {"vllm_config": {"kv_transfer_config": None}}), "vllm_pull"),
    ],
)
def test_engine_may_suit_the_chosen_connector(engine: EngineReport, connector: str) -> None:
    assert find_connector_mismatch(engine, connector, None) is None


def test_configured_bootstrap_port_must_be_that_of_sglang() -> None:
    told = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
    engine = said(P, "p:1", models("sglang"), told)
    assert find_connector_mismatch(engine, "sglang_bootstrap", None) is None
    assert find_connector_mismatch(engine, "sglang_bootstrap", 8998) is None
    found = find_connector_mismatch(engine, "sglang_bootstrap", 8999)
    assert found is not None
    assert found[0] is IncompatibilityKind.BOOTSTRAP


def elastic(report: EngineReport) -> EngineReport:
    return replace(report, is_elastic=True)


def test_elastic_sglang_may_have_either_role_at_present() -> None:
    info = {
        "disaggregation_mode": "prefill",
        "enable_pd_role_switch": True,
        "internal_states": [{"disaggregation_mode": "decode"}],
    }
    report = said(D, NAMES[D], models("sglang"), info)
    assert report.engine_setup.disaggregation_mode == "decode"
    for role in (P, D):
        assert find_connector_mismatch(elastic(replace(report, role=role)), "sglang_bootstrap", None) is None


@pytest.mark.parametrize(
    ("report", "connector", "words"),
    [
        (sglang(D), "sglang_bootstrap", "is configured as elastic but was started without --enable-pd-role-switch"),
        (
            sglang(D, "null"),
            "sglang_bootstrap",
            "is configured as elastic but was started without --disaggregation-mode",
        ),
        (
            vllm(D, "NixlConnector", kv_role="kv_consumer"),
            "vllm_pull",
            "is configured as elastic but was started with kv_role kv_consumer: start it with kv_both",
        ),
    ],
)
def test_elastic_engine_that_was_started_for_one_role_is_incompatible(
    report: EngineReport, connector: str, words: str
) -> None:
    assert find_connector_mismatch(elastic(report), connector, None) == (ROLE, words)


def test_elastic_vllm_that_serves_both_roles_is_compatible() -> None:
    assert find_connector_mismatch(elastic(vllm(D, "NixlConnector")), "vllm_pull", None) is None
