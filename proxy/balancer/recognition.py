"""Selection of the connector from facts about the engines, and a check that a chosen connector serves an engine.

The facts come from `process.supervisor.detection`, for connector `auto` before the gateway serves, and from the prober
when an engine comes up. SGLang reports its kind, and in `/server_info` whether it prefills or decodes. vLLM reports its
kind, but its KV transfer only with VLLM_SERVER_DEV_MODE=1, when `/server_info` has its whole configuration. Otherwise
the HTTP port of a vLLM does not show its transfer protocol before it has computed a prompt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.engines import EngineIdentity, EngineSetup
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.common.backend import Role
from proxy.common.terms import format_count
from proxy.settings import CONNECTOR_TRAITS, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECTORS: Final = {part: name for name, traits in CONNECTOR_TRAITS.items() for part in traits.kv_connectors}
"""Connectors of the gateway, by the KV connectors of vLLM and vLLM-Ascend."""
_OFFLOADING: Final = frozenset({"HiSparseConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"})
"""KV connectors of vLLM that only move KV between a device and its host, for a larger cache."""

_UNSERVED: Final = {
    "DecodeBenchConnector": "it fills the KV cache with invented values for benchmarks: start the engines with "
    "NixlConnector",
    "ExampleHiddenStatesConnector": "it writes hidden states and transfers no KV cache: start the engines with "
    "NixlConnector",
    "MoRIIOConnector": "this gateway does not send its heartbeats, so start the engines with NixlConnector",
}
"""Advice by KV connectors of vLLM 0.32 and 0.33 that no connector of the gateway serves."""

# A rank receives at `reservation_zmq_port` plus its number (`config.py` of vLLM 0.32 `ec_connector/mooncake`).
_EC_MOONCAKE: Final = (
    "runs ECMooncakeConnector with several data-parallel ranks, each of which receives encoded media at a port of its "
    "own, and pdproxy does not choose the rank: use ECCPUConnector or ECExampleConnector"
)
_OTHER_ROLE: Final = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}
_GATEWAY: Final = (
    "is a gateway like this one and no engine: its load and health are not those of the engines behind it, and no KV "
    "cache is transferred. Configure the engines themselves"
)
_NOUNS: Final = {Role.PREFILL: "prefiller", Role.DECODE: "decoder", Role.ENCODE: "encoder"}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Facts about one engine and its configured role."""

    role: Role
    """Configured role."""
    engine_name: str
    engine_identity: EngineIdentity
    is_elastic: bool = False
    """Whether it may exchange its role."""

    @property
    def engine_setup(self) -> EngineSetup:
        """Setup of the engine, which is empty if the engine does not report it."""
        return self.engine_identity.engine_setup or EngineSetup()


@dataclass(frozen=True, slots=True)
class RecognisedConnector:
    """Connector that serves the engines."""

    connector_name: str
    recognition_reason: str
    """Reason for the log, as half a sentence."""


def recognise_connector(engine_reports: Sequence[EngineReport]) -> RecognisedConnector:
    """Return the connector for engines, of which at least one is a prefiller.

    Raises:
        SettingsError: No connector serves all engines, or one was started for another role.
    """
    by_kind: dict[str, EngineReport] = {}
    for engine in engine_reports:
        if engine.engine_identity.engine_kind is None:
            raise SettingsError(
                f"connector auto: {engine.engine_name} is neither vLLM nor SGLang, by its /v1/models: set `connector`"
            )
        by_kind.setdefault(engine.engine_identity.engine_kind, engine)
    if len(by_kind) > 1:
        kinds = " and ".join(f"{engine.engine_name} is {kind}" for kind, engine in by_kind.items())
        raise SettingsError(f"connector auto: {kinds}, and no connector serves both")
    for engine in engine_reports:
        started = _describe_wrong_role(engine)
        if started is not None:
            raise SettingsError(f"connector auto: {engine.engine_name} {started}")
    (kind,) = by_kind
    connectors = [name for name, traits in CONNECTOR_TRAITS.items() if traits.engine == kind]
    if len(connectors) == 1:
        return RecognisedConnector(connectors[0], f"{_describe_engine_count(engine_reports)} are {kind}")
    return _recognise_vllm_connector(engine_reports)


def find_connector_mismatch(
    engine_report: EngineReport, connector_name: str, bootstrap_port: int | None
) -> tuple[IncompatibilityKind, str] | None:
    """Return the kind and text of the problem if the chosen connector does not serve an engine, or None.

    `bootstrap_port` is the configured port of the engine's bootstrap server. None: none is configured.
    """
    identity, setup, traits = (
        engine_report.engine_identity,
        engine_report.engine_setup,
        CONNECTOR_TRAITS[connector_name],
    )
    if identity.is_gateway:
        return IncompatibilityKind.GATEWAY, _GATEWAY
    if setup.ec_connector == "ECMooncakeConnector" and setup.dp_size > 1:
        return IncompatibilityKind.CONNECTOR, _EC_MOONCAKE
    if identity.engine_kind is None or engine_report.role is Role.ENCODE:
        return None
    if traits.engine not in (None, identity.engine_kind):
        return IncompatibilityKind.CONNECTOR, _describe_wrong_engine(identity.engine_kind, connector_name)
    started = _describe_wrong_role(engine_report) if traits.takes_prefillers else _describe_single_stage(setup)
    if started is not None:
        return IncompatibilityKind.ROLE, started
    if identity.engine_kind == "SGLang":
        return _find_wrong_bootstrap_port(engine_report, bootstrap_port)
    if not traits.takes_prefillers or not setup.has_transfer_config:
        return None
    if not setup.kv_connectors:
        return (
            IncompatibilityKind.CONNECTOR,
            "was started without a --kv-transfer-config, so it cannot transfer KV cache",
        )
    if _OFFLOADING.issuperset(setup.kv_connectors):
        return IncompatibilityKind.CONNECTOR, _describe_local_cache(setup.kv_connectors)
    served_by = {_CONNECTORS.get(part) for part in setup.kv_connectors}
    if served_by == {None} and (part := next(filter(_UNSERVED.get, setup.kv_connectors), None)):
        return IncompatibilityKind.CONNECTOR, f"runs {part}: {_UNSERVED[part]}"
    if served_by & {None, connector_name, *traits.passes_on}:
        return None
    parts = " and ".join(setup.kv_connectors)
    wanted = " or ".join(sorted(filter(None, served_by)))
    return (
        IncompatibilityKind.CONNECTOR,
        f"runs {parts}, which connector {connector_name} does not serve: use {wanted}, or auto",
    )


def _describe_wrong_engine(engine_kind: str, connector_name: str) -> str:
    if engine_kind == "SGLang":
        return f"is SGLang, which connector {connector_name} does not serve: use sglang_bootstrap, or auto"
    return (
        f"is vLLM, which ignores the parameters of connector {connector_name}, so every engine computes the "
        "whole request: "
        "use the connector for its --kv-transfer-config, or auto"
    )


def _describe_wrong_role(engine_report: EngineReport) -> str | None:
    """Return how an engine was started if that contradicts its role, or None."""
    setup, how = engine_report.engine_setup, None
    mode = setup.disaggregation_mode
    if engine_report.is_elastic:
        return _describe_fixed_role(setup)
    if mode is not None and mode != engine_report.role.value:
        how = "without --disaggregation-mode" if mode == "null" else f"with --disaggregation-mode {mode}"
    # With NIXL, prefillers and decoders may have the same kv_role.
    elif setup.kv_role == _OTHER_ROLE.get(engine_report.role) and not any(
        "Nixl" in part for part in setup.kv_connectors
    ):
        how = f"with kv_role {setup.kv_role}"
    return None if how is None else f"is configured as a {_NOUNS[engine_report.role]} but was started {how}"


def _describe_fixed_role(engine_setup: EngineSetup) -> str | None:
    """Return how an elastic engine was started if it cannot exchange its role, or None."""
    mode = engine_setup.disaggregation_mode
    if mode == "null":
        return "is configured as elastic but was started without --disaggregation-mode"
    if mode is not None and not engine_setup.can_switch_role:
        return "is configured as elastic but was started without --enable-pd-role-switch"
    if engine_setup.kv_role in _OTHER_ROLE.values():
        return f"is configured as elastic but was started with kv_role {engine_setup.kv_role}: start it with kv_both"
    return None


def _describe_single_stage(engine_setup: EngineSetup) -> str | None:
    """Return how an engine that must do both stages was started if that contradicts it, or None."""
    mode = engine_setup.disaggregation_mode
    if mode is None or mode == "null":
        return None
    return f"must do both stages but was started with --disaggregation-mode {mode}"


def _find_wrong_bootstrap_port(
    engine_report: EngineReport, bootstrap_port: int | None
) -> tuple[IncompatibilityKind, str] | None:
    """Return the problem if the configured port is not that of SGLang's bootstrap server, or None."""
    port = engine_report.engine_setup.bootstrap_port
    if engine_report.role is not Role.PREFILL or port is None or bootstrap_port in (None, port):
        return None
    hint = f"has its bootstrap server at port {port}, but decoders are sent to {bootstrap_port}"
    return IncompatibilityKind.BOOTSTRAP, f"{hint}: configure it as `--prefill URL {port}`"


def _recognise_vllm_connector(engine_reports: Sequence[EngineReport]) -> RecognisedConnector:
    by_connector: dict[str, tuple[str, str]] = {}  # KV connector and name of an engine, by connector
    for engine in engine_reports:
        if engine.engine_setup.has_transfer_config:
            part, connector = _connector_of_engine(engine)
            by_connector.setdefault(connector, (part, engine.engine_name))
    if not by_connector:
        return RecognisedConnector(
            "vllm_pull",
            f"{_describe_engine_count(engine_reports)} are vLLM and report their KV transfer only with "
            "VLLM_SERVER_DEV_MODE=1: set "
            "`connector` unless decoders pull the cache",
        )
    if len(by_connector) > 1:
        parts = " and ".join(f"{name} has {part}" for part, name in by_connector.values())
        raise SettingsError(f"connector auto: {parts}, and no connector serves both")
    ((connector, (part, _)),) = by_connector.items()
    return RecognisedConnector(connector, f"{_describe_engine_count(engine_reports)} are vLLM with {part}")


def _connector_of_engine(engine_report: EngineReport) -> tuple[str, str]:
    """Return the KV connector of an engine and the gateway's connector for it.

    If several work together, the one that transfers from prefiller to decoder counts, and not a store beside it.
    """
    parts = engine_report.engine_setup.kv_connectors
    if not parts:
        raise SettingsError(f"connector auto: {engine_report.engine_name} was started without a --kv-transfer-config")
    if _OFFLOADING.issuperset(parts):
        raise SettingsError(f"connector auto: {engine_report.engine_name} {_describe_local_cache(parts)}")
    served = {_CONNECTORS[part]: part for part in parts if part in _CONNECTORS}
    for part in () if served else filter(_UNSERVED.get, parts):
        raise SettingsError(f"connector auto: {engine_report.engine_name} has {part}: {_UNSERVED[part]}")
    transferring = {name: part for name, part in served.items() if not CONNECTOR_TRAITS[name].is_store} or served
    if len(transferring) != 1:
        raise SettingsError(
            f"connector auto: {engine_report.engine_name} has {' and '.join(parts)}, which no single connector "
            "serves for certain: "
            "set `connector`, see docs/reference/connectors.md"
        )
    ((connector, part),) = transferring.items()
    return part, connector


def _describe_local_cache(connector_parts: Sequence[str]) -> str:
    return (
        f"has {' and '.join(connector_parts)}, which keeps KV cache on one host and transfers none: combine it with "
        "NixlConnector in a MultiConnector, or use connector plain"
    )


def _describe_engine_count(engine_reports: Sequence[EngineReport]) -> str:
    counts = Counter(engine.role for engine in engine_reports)
    return f"{counts[Role.PREFILL]} prefill and {format_count(counts[Role.DECODE], 'decode instance')}"
