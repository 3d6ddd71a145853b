"""Which connector engines need, by what they say of themselves. It asks nobody: `detection` does.

SGLang tells everything: its kind, and at `/server_info` whether it prefills or decodes. vLLM tells its kind, but how
its KV cache travels only with VLLM_SERVER_DEV_MODE=1, when `/server_info` has its whole configuration. Without it
nothing at its HTTP port tells the protocols apart before a prompt was computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.backend import Role
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KINDS: Final = {"vllm": "vLLM", "sglang": "SGLang"}
"""ModelCard.owned_by, which is the same for every model and in every version of either."""

_CONNECTORS: Final[Mapping[str, str]] = {
    "NixlConnector": "vllm_pull",
    "NixlPullConnector": "vllm_pull",
    "MooncakeConnectorV1": "vllm_pull",
    "MooncakeHybridConnector": "vllm_pull",
    "MooncakeConnector": "mooncake_bootstrap",
    "MooncakeLayerwiseConnector": "ascend_layerwise",
    "AscendStoreConnector": "vllm_store",
    "MooncakeConnectorStoreV1": "vllm_store",
    "MooncakeStoreConnector": "vllm_store",
    "UCMConnector": "vllm_store",
}
"""By the name that vLLM and vLLM-Ascend give to what moves the KV cache (KVConnectorFactory.register_connector)."""

_OTHER_ROLE: Final = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}


@dataclass(frozen=True, slots=True)
class Told:
    """What one engine has answered, as JSON; None for what it does not tell."""

    role: Role
    """What it was given as."""
    name: str
    models: Any
    """Of `/v1/models`."""
    info: Any = None
    """Of `/server_info?config_format=json`, which older SGLang calls `/get_server_info`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A connector, and in half a sentence why it is that."""

    connector: str
    reason: str


def recognise(engines: Sequence[Told]) -> Finding:
    """The connector for these engines, of which at least one is a prefiller.

    Raises SettingsError when there is none for all of them, or one has another role than it was given.
    """
    by_kind: dict[str, Told] = {}
    for engine in engines:
        by_kind.setdefault(_kind(engine), engine)
    if len(by_kind) > 1:
        found = " and ".join(f"{engine.name} is {kind}" for kind, engine in by_kind.items())
        raise SettingsError(f"connector auto: {found}, and no connector serves both")
    (kind,) = by_kind
    return _sglang(engines) if kind == "SGLang" else _vllm(engines)


def _kind(engine: Told) -> str:
    for owner in _each(engine.models, "data", "owned_by"):
        if isinstance(owner, str) and owner in _KINDS:
            return _KINDS[owner]
    raise SettingsError(
        f"connector auto: {engine.name} is neither vLLM nor SGLang, by its /v1/models: name the connector"
    )


def _sglang(engines: Sequence[Told]) -> Finding:
    for engine in engines:
        mode = _member(engine.info, "disaggregation_mode")
        if isinstance(mode, str) and mode != engine.role.value:
            started = "without --disaggregation-mode" if mode == "null" else f"with --disaggregation-mode {mode}"
            raise _wrong_role(engine, started)
    return Finding("sglang_bootstrap", f"{_count(engines)} are SGLang")


def _vllm(engines: Sequence[Told]) -> Finding:
    found: dict[str, tuple[str, str]] = {}  # by connector: how an engine calls it, and which engine
    for engine in engines:
        config = _member(engine.info, "vllm_config")
        if not isinstance(config, dict) or "kv_transfer_config" not in config:
            continue
        transfer = config["kv_transfer_config"]
        if _member(transfer, "kv_role") == _OTHER_ROLE[engine.role]:
            raise _wrong_role(engine, f"with kv_role {_OTHER_ROLE[engine.role]}")
        told, connector = _connector(engine, transfer)
        found.setdefault(connector, (told, engine.name))
    if not found:
        return Finding(
            "vllm_pull",
            f"{_count(engines)} are vLLM and do not tell how their KV cache travels, as they would with "
            "VLLM_SERVER_DEV_MODE=1: name the connector if decoders do not pull it",
        )
    if len(found) > 1:
        told = " and ".join(f"{name} has {told}" for told, name in found.values())
        raise SettingsError(f"connector auto: {told}, and no connector serves both")
    ((connector, (told, _)),) = found.items()
    return Finding(connector, f"{_count(engines)} are vLLM with {told}")


def _connector(engine: Told, transfer: Any) -> tuple[str, str]:
    """What moves an engine's KV cache, in its words and in ours. Of several that work together the one that hands over
    from prefiller to decoder counts, and not where the cache is kept besides.
    """
    told = _member(transfer, "kv_connector")
    if told is None:
        raise SettingsError(f"connector auto: {engine.name} was started without a --kv-transfer-config")
    parts = [told]
    if told == "MultiConnector":
        parts = list(_each(_member(transfer, "kv_connector_extra_config"), "connectors", "kv_connector"))
    known = {_CONNECTORS[part]: part for part in parts if isinstance(part, str) and part in _CONNECTORS}
    handing_over = {connector: part for connector, part in known.items() if connector != "vllm_store"} or known
    if len(handing_over) != 1:
        raise SettingsError(
            f"connector auto: {engine.name} has {' and '.join(map(str, parts)) or told}, which is not known to be "
            "served by one connector: name it"
        )
    ((connector, part),) = handing_over.items()
    return part, connector


def _wrong_role(engine: Told, started: str) -> SettingsError:
    noun = {Role.PREFILL: "prefiller", Role.DECODE: "decoder"}[engine.role]
    return SettingsError(f"connector auto: {engine.name} is given as a {noun} but was started {started}")


def _count(engines: Sequence[Told]) -> str:
    counts = Counter(engine.role for engine in engines)
    return f"{counts[Role.PREFILL]} prefill and {counts[Role.DECODE]} decode instances"


def _each(value: Any, members: str, name: str) -> Iterator[Any]:
    """One member of each of a list's objects."""
    listed = _member(value, members)
    return (_member(item, name) for item in (listed if isinstance(listed, list) else ()))


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
