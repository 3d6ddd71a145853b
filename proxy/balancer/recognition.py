"""Which connector engines need, by what they say of themselves, and whether the one that was chosen serves them.

It sends no request itself. `process.supervisor.detection` does so for connector `auto`, before anything is served.
The prober does so when an engine comes up. SGLang tells everything: its kind, and at `/server_info` whether it
prefills or decodes. vLLM tells its kind, but how its KV cache travels only with VLLM_SERVER_DEV_MODE=1, when
`/server_info` has its whole configuration. Without it nothing at its HTTP port tells the protocols apart before a
prompt was computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.engines import Identity, Setup
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.common.backend import Role
from proxy.common.terms import counted
from proxy.settings import CONNECTOR_TRAITS, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECTORS: Final = {part: name for name, traits in CONNECTOR_TRAITS.items() for part in traits.kv_connectors}
"""The gateway's connectors, by the names of vLLM's and vLLM-Ascend's."""
_KEEPING: Final = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""vLLM's connectors that move KV between an engine's device and its own host, for a larger cache."""

_OTHER_ROLE: Final = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}
_GATEWAY: Final = (
    "is a gateway like this one and no engine: its load and health say nothing of the engines behind it, and no KV "
    "cache is handed over. Give the engines themselves"
)
_NOUNS: Final = {Role.PREFILL: "prefiller", Role.DECODE: "decoder", Role.ENCODE: "encoder"}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine says it is. `role` is what it was given as."""

    role: Role
    name: str
    identity: Identity

    @property
    def setup(self) -> Setup:
        """How it was started, as far as it tells."""
        return self.identity.setup or Setup()


@dataclass(frozen=True, slots=True)
class RecognisedConnector:
    """A connector, and in half a sentence why it is that."""

    connector: str
    reason: str


def recognise(engines: Sequence[EngineReport]) -> RecognisedConnector:
    """The connector for these engines, of which at least one is a prefiller.

    Raises SettingsError when there is none for all of them, or one has another role than it was given.
    """
    by_kind: dict[str, EngineReport] = {}
    for engine in engines:
        if engine.identity.kind is None:
            raise SettingsError(
                f"connector auto: {engine.name} is neither vLLM nor SGLang, by its /v1/models: name the connector"
            )
        by_kind.setdefault(engine.identity.kind, engine)
    if len(by_kind) > 1:
        found = " and ".join(f"{engine.name} is {kind}" for kind, engine in by_kind.items())
        raise SettingsError(f"connector auto: {found}, and no connector serves both")
    for engine in engines:
        started = _started_otherwise(engine)
        if started is not None:
            raise SettingsError(f"connector auto: {engine.name} {started}")
    (kind,) = by_kind
    connectors = [name for name, traits in CONNECTOR_TRAITS.items() if traits.engine == kind]
    if len(connectors) == 1:
        return RecognisedConnector(connectors[0], f"{_count_of(engines)} are {kind}")
    return _vllm(engines)


def unsuited(
    engine: EngineReport, connector: str, bootstrap_port: int | None
) -> tuple[IncompatibilityKind, str] | None:
    """In what an engine does not suit the connector that was chosen, and what to look at; None: in nothing it tells.

    `bootstrap_port`: where decoders are told to meet it, if it was given.
    """
    identity, setup, traits = engine.identity, engine.setup, CONNECTOR_TRAITS[connector]
    if identity.is_gateway:
        return IncompatibilityKind.GATEWAY, _GATEWAY
    if identity.kind is None or engine.role is Role.ENCODE:
        return None
    if traits.engine not in (None, identity.kind):
        return IncompatibilityKind.CONNECTOR, _wrong_kind(identity.kind, connector)
    started = _started_otherwise(engine) if traits.takes_prefillers else _started_alone(setup)
    if started is not None:
        return IncompatibilityKind.ROLE, started
    if identity.kind == "SGLang":
        return _wrong_port(engine, bootstrap_port)
    if not traits.takes_prefillers or not setup.tells_transfer:
        return None
    if not setup.kv_connectors:
        return (
            IncompatibilityKind.CONNECTOR,
            "was started without a --kv-transfer-config, so it cannot hand over KV cache",
        )
    if _KEEPING.issuperset(setup.kv_connectors):
        return IncompatibilityKind.CONNECTOR, _keeps(setup.kv_connectors)
    served_by = {_CONNECTORS.get(part) for part in setup.kv_connectors}
    if served_by & {None, connector, *traits.passes_on}:
        return None
    its = " and ".join(setup.kv_connectors)
    wanted = " or ".join(sorted(filter(None, served_by)))
    return (
        IncompatibilityKind.CONNECTOR,
        f"runs {its}, which connector {connector} does not serve: use {wanted}, or auto",
    )


def _wrong_kind(kind: str, connector: str) -> str:
    if kind == "SGLang":
        return f"is SGLang, which connector {connector} does not serve: use sglang_bootstrap, or auto"
    return (
        f"is vLLM, which ignores what connector {connector} sends it, so every engine computes everything by itself: "
        "use the connector that suits its --kv-transfer-config, or auto"
    )


def _started_otherwise(engine: EngineReport) -> str | None:
    """How an engine was started, if not in the role it was given."""
    setup, how = engine.setup, None
    mode = setup.disaggregation_mode
    if mode is not None and mode != engine.role.value:
        how = "without --disaggregation-mode" if mode == "null" else f"with --disaggregation-mode {mode}"
    # NIXL's prefillers and decoders are the same.
    elif setup.kv_role == _OTHER_ROLE.get(engine.role) and not any("Nixl" in part for part in setup.kv_connectors):
        how = f"with kv_role {setup.kv_role}"
    return None if how is None else f"is given as a {_NOUNS[engine.role]} but was started {how}"


def _started_alone(setup: Setup) -> str | None:
    """How an engine that is to do both stages was started, if not for that."""
    mode = setup.disaggregation_mode
    if mode is None or mode == "null":
        return None
    return f"is to do both stages but was started with --disaggregation-mode {mode}"


def _wrong_port(engine: EngineReport, bootstrap_port: int | None) -> tuple[IncompatibilityKind, str] | None:
    """Whether decoders are told another port than SGLang's bootstrap server has."""
    its = engine.setup.bootstrap_port
    if engine.role is not Role.PREFILL or its is None or bootstrap_port in (None, its):
        return None
    hint = f"has its bootstrap server at port {its}, and decoders are sent to {bootstrap_port}"
    return IncompatibilityKind.BOOTSTRAP, f"{hint}: give it as `--prefill URL {its}`"


def _vllm(engines: Sequence[EngineReport]) -> RecognisedConnector:
    found: dict[str, tuple[str, str]] = {}  # by connector: how an engine calls it, and which engine
    for engine in engines:
        if engine.setup.tells_transfer:
            told, connector = _connector(engine)
            found.setdefault(connector, (told, engine.name))
    if not found:
        return RecognisedConnector(
            "vllm_pull",
            f"{_count_of(engines)} are vLLM and do not report how their KV cache travels, as they would with "
            "VLLM_SERVER_DEV_MODE=1: name the connector unless decoders pull the cache",
        )
    if len(found) > 1:
        told = " and ".join(f"{name} has {told}" for told, name in found.values())
        raise SettingsError(f"connector auto: {told}, and no connector serves both")
    ((connector, (told, _)),) = found.items()
    return RecognisedConnector(connector, f"{_count_of(engines)} are vLLM with {told}")


def _connector(engine: EngineReport) -> tuple[str, str]:
    """What moves an engine's KV cache, in its words and in ours. Of several that work together the one that hands over
    from prefiller to decoder counts, and not where the cache is kept besides.
    """
    parts = engine.setup.kv_connectors
    if not parts:
        raise SettingsError(f"connector auto: {engine.name} was started without a --kv-transfer-config")
    if _KEEPING.issuperset(parts):
        raise SettingsError(f"connector auto: {engine.name} {_keeps(parts)}")
    known = {_CONNECTORS[part]: part for part in parts if part in _CONNECTORS}
    handing_over = {name: part for name, part in known.items() if not CONNECTOR_TRAITS[name].is_store} or known
    if len(handing_over) != 1:
        raise SettingsError(
            f"connector auto: {engine.name} has {' and '.join(parts)}, which no single connector is known to serve: "
            "set `connector`, see Connectors in OPERATING.md"
        )
    ((connector, part),) = handing_over.items()
    return part, connector


def _keeps(parts: Sequence[str]) -> str:
    return (
        f"has {' and '.join(parts)}, which keeps KV cache on its own host and hands none over: combine it with "
        "NixlConnector in a MultiConnector, or use connector plain"
    )


def _count_of(engines: Sequence[EngineReport]) -> str:
    counts = Counter(engine.role for engine in engines)
    return f"{counts[Role.PREFILL]} prefill and {counted(counts[Role.DECODE], 'decode instance')}"
