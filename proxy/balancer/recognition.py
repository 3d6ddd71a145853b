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

from proxy.balancer.engines import Identity, Setup
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
    name: str
    identity: Identity
    is_elastic: bool = False
    """Whether it may exchange its role."""

    @property
    def setup(self) -> Setup:
        """Setup of the engine, which is empty if the engine does not report it."""
        return self.identity.setup or Setup()


@dataclass(frozen=True, slots=True)
class RecognisedConnector:
    """Connector that serves the engines."""

    connector: str
    reason: str
    """Reason for the log, as half a sentence."""


def recognise(engines: Sequence[EngineReport]) -> RecognisedConnector:
    """Return the connector for engines, of which at least one is a prefiller.

    Raises:
        SettingsError: No connector serves all engines, or one was started for another role.
    """
    by_kind: dict[str, EngineReport] = {}
    for engine in engines:
        if engine.identity.kind is None:
            raise SettingsError(
                f"connector auto: {engine.name} is neither vLLM nor SGLang, by its /v1/models: set `connector`"
            )
        by_kind.setdefault(engine.identity.kind, engine)
    if len(by_kind) > 1:
        kinds = " and ".join(f"{engine.name} is {kind}" for kind, engine in by_kind.items())
        raise SettingsError(f"connector auto: {kinds}, and no connector serves both")
    for engine in engines:
        started = _started_otherwise(engine)
        if started is not None:
            raise SettingsError(f"connector auto: {engine.name} {started}")
    (kind,) = by_kind
    connectors = [name for name, traits in CONNECTOR_TRAITS.items() if traits.engine == kind]
    if len(connectors) == 1:
        return RecognisedConnector(connectors[0], f"{_count_of(engines)} are {kind}")
    return _vllm(engines)


def find_connector_mismatch(
    engine: EngineReport, connector: str, bootstrap_port: int | None
) -> tuple[IncompatibilityKind, str] | None:
    """Return the kind and text of the problem if the chosen connector does not serve an engine, or None.

    `bootstrap_port` is the configured port of the engine's bootstrap server. None: none is configured.
    """
    identity, setup, traits = engine.identity, engine.setup, CONNECTOR_TRAITS[connector]
    if identity.is_gateway:
        return IncompatibilityKind.GATEWAY, _GATEWAY
    if setup.ec_connector == "ECMooncakeConnector" and setup.dp_size > 1:
        return IncompatibilityKind.CONNECTOR, _EC_MOONCAKE
    if identity.kind is None or engine.role is Role.ENCODE:
        return None
    if traits.engine not in (None, identity.kind):
        return IncompatibilityKind.CONNECTOR, _wrong_kind(identity.kind, connector)
    started = _started_otherwise(engine) if traits.takes_prefillers else _started_alone(setup)
    if started is not None:
        return IncompatibilityKind.ROLE, started
    if identity.kind == "SGLang":
        return _wrong_port(engine, bootstrap_port)
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
    if served_by & {None, connector, *traits.passes_on}:
        return None
    parts = " and ".join(setup.kv_connectors)
    wanted = " or ".join(sorted(filter(None, served_by)))
    return (
        IncompatibilityKind.CONNECTOR,
        f"runs {parts}, which connector {connector} does not serve: use {wanted}, or auto",
    )


def _wrong_kind(kind: str, connector: str) -> str:
    if kind == "SGLang":
        return f"is SGLang, which connector {connector} does not serve: use sglang_bootstrap, or auto"
    return (
        f"is vLLM, which ignores the parameters of connector {connector}, so every engine computes the whole request: "
        "use the connector for its --kv-transfer-config, or auto"
    )


def _started_otherwise(engine: EngineReport) -> str | None:
    """Return how an engine was started if that contradicts its role, or None."""
    setup, how = engine.setup, None
    mode = setup.disaggregation_mode
    if engine.is_elastic:
        return _started_for_one_role(setup)
    if mode is not None and mode != engine.role.value:
        how = "without --disaggregation-mode" if mode == "null" else f"with --disaggregation-mode {mode}"
    # With NIXL, prefillers and decoders may have the same kv_role.
    elif setup.kv_role == _OTHER_ROLE.get(engine.role) and not any("Nixl" in part for part in setup.kv_connectors):
        how = f"with kv_role {setup.kv_role}"
    return None if how is None else f"is configured as a {_NOUNS[engine.role]} but was started {how}"


def _started_for_one_role(setup: Setup) -> str | None:
    """Return how an elastic engine was started if it cannot exchange its role, or None."""
    mode = setup.disaggregation_mode
    if mode == "null":
        return "is configured as elastic but was started without --disaggregation-mode"
    if mode is not None and not setup.can_switch_role:
        return "is configured as elastic but was started without --enable-pd-role-switch"
    if setup.kv_role in _OTHER_ROLE.values():
        return f"is configured as elastic but was started with kv_role {setup.kv_role}: start it with kv_both"
    return None


def _started_alone(setup: Setup) -> str | None:
    """Return how an engine that must do both stages was started if that contradicts it, or None."""
    mode = setup.disaggregation_mode
    if mode is None or mode == "null":
        return None
    return f"must do both stages but was started with --disaggregation-mode {mode}"


def _wrong_port(engine: EngineReport, bootstrap_port: int | None) -> tuple[IncompatibilityKind, str] | None:
    """Return the problem if the configured port is not that of SGLang's bootstrap server, or None."""
    port = engine.setup.bootstrap_port
    if engine.role is not Role.PREFILL or port is None or bootstrap_port in (None, port):
        return None
    hint = f"has its bootstrap server at port {port}, but decoders are sent to {bootstrap_port}"
    return IncompatibilityKind.BOOTSTRAP, f"{hint}: configure it as `--prefill URL {port}`"


def _vllm(engines: Sequence[EngineReport]) -> RecognisedConnector:
    by_connector: dict[str, tuple[str, str]] = {}  # KV connector and name of an engine, by connector
    for engine in engines:
        if engine.setup.has_transfer_config:
            part, connector = _connector(engine)
            by_connector.setdefault(connector, (part, engine.name))
    if not by_connector:
        return RecognisedConnector(
            "vllm_pull",
            f"{_count_of(engines)} are vLLM and report their KV transfer only with VLLM_SERVER_DEV_MODE=1: set "
            "`connector` unless decoders pull the cache",
        )
    if len(by_connector) > 1:
        parts = " and ".join(f"{name} has {part}" for part, name in by_connector.values())
        raise SettingsError(f"connector auto: {parts}, and no connector serves both")
    ((connector, (part, _)),) = by_connector.items()
    return RecognisedConnector(connector, f"{_count_of(engines)} are vLLM with {part}")


def _connector(engine: EngineReport) -> tuple[str, str]:
    """Return the KV connector of an engine and the gateway's connector for it.

    If several work together, the one that transfers from prefiller to decoder counts, and not a store beside it.
    """
    parts = engine.setup.kv_connectors
    if not parts:
        raise SettingsError(f"connector auto: {engine.name} was started without a --kv-transfer-config")
    if _OFFLOADING.issuperset(parts):
        raise SettingsError(f"connector auto: {engine.name} {_describe_local_cache(parts)}")
    served = {_CONNECTORS[part]: part for part in parts if part in _CONNECTORS}
    for part in () if served else filter(_UNSERVED.get, parts):
        raise SettingsError(f"connector auto: {engine.name} has {part}: {_UNSERVED[part]}")
    transferring = {name: part for name, part in served.items() if not CONNECTOR_TRAITS[name].is_store} or served
    if len(transferring) != 1:
        raise SettingsError(
            f"connector auto: {engine.name} has {' and '.join(parts)}, which no single connector serves for certain: "
            "set `connector`, see docs/reference/connectors.md"
        )
    ((connector, part),) = transferring.items()
    return part, connector


def _describe_local_cache(parts: Sequence[str]) -> str:
    return (
        f"has {' and '.join(parts)}, which keeps KV cache on one host and transfers none: combine it with "
        "NixlConnector in a MultiConnector, or use connector plain"
    )


def _count_of(engines: Sequence[EngineReport]) -> str:
    counts = Counter(engine.role for engine in engines)
    return f"{counts[Role.PREFILL]} prefill and {format_count(counts[Role.DECODE], 'decode instance')}"
