"""Traits of each connector, for checks before it is created.

No other module compares a connector's name; it reads one of these traits. They are part of the settings, because
settings are checked before anything else is imported. `proxy.connectors.CONNECTORS` has the classes under the same
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorTraits:
    """Traits of one connector. The defaults are those of most vLLM protocols."""

    engine: str | None = "vLLM"
    """Software that speaks the protocol, as in `EngineIdentity.engine_kind`; None: several."""
    kv_connectors: tuple[str, ...] = ()
    """Names in vLLM and vLLM-Ascend of connectors that move the KV cache (KVConnectorFactory.register_connector)."""
    passes_on: tuple[str, ...] = ()
    """Names of other connectors whose engines it serves, too, because it passes their KV parameters on."""
    takes_prefillers: bool = True
    """Whether there are prefillers. If not, every engine does both stages and is configured as a decoder."""
    needs_prefillers: bool = True
    takes_encoders: bool = True
    needs_callback_port: bool = False
    """Whether engines call the gateway, so that each worker needs a port for callbacks."""
    has_prefill_first: bool = False
    """Whether the decode leg begins after the prefill leg, so that no decoder is silent during a prefill."""
    is_store: bool = False
    """Whether the KV cache is transferred through a store that engines share, and that keeps it."""
    tells_bootstrap_port: bool = False
    """Whether prefillers report their bootstrap server. In vLLM, only traffic shows it."""
    meets_at_bootstrap: bool = False
    """Whether decoders connect to a prefiller at its bootstrap server."""
    reads_back: bool = False
    """Whether prefillers can read the KV cache of answers from decoders."""
    names_prefill_ranks: bool = False
    """Whether decoders must know the data-parallel rank of the prefill leg, so that it must name one of several."""
    counts_expired_leases: bool = False
    """Whether prefillers count expired leases."""
    has_sglang_routes: bool = False
    """Whether clients get SGLang's own routes, such as /server_info and /model_info."""
    lower_priority_first: bool = True
    """Whether engines serve lower values of the body's `priority` first, by default."""
    cache_path: str = "/reset_prefix_cache"
    """Route of the engines that clears their prefix caches."""
    exchanges_roles: bool = False
    """Whether an engine may prefill at one time and decode at another, so that instances may be elastic."""
    role_switch_path: str | None = None
    """Route of the engines that exchanges their role. None: they serve both roles without being asked."""


CONNECTOR_TRAITS: Final[Mapping[str, ConnectorTraits]] = {
    # until the engines have been asked, at the start
    "auto": ConnectorTraits(engine=None, needs_prefillers=False, reads_back=True, exchanges_roles=True),
    "vllm_pull": ConnectorTraits(
        kv_connectors=(
            "NixlConnector",
            "NixlPullConnector",
            # vLLM-Ascend: `request_finished` returns the blocks in kv_transfer_params, and the decoder fetches them.
            "MooncakeConnectorV1",
            "MooncakeConnectorV2",
            "MooncakeD2RHConnectorV1",
            "MooncakeHybridConnector",
            "MooncakePullConnector",
        ),
        has_prefill_first=True,
        reads_back=True,
        counts_expired_leases=True,
        exchanges_roles=True,
    ),
    "vllm_store": ConnectorTraits(
        kv_connectors=(
            "AscendStoreConnector",
            "ExampleConnector",
            "FlexKVConnectorV1",
            "HF3FSKVConnector",
            "LMCacheConnectorV1",
            "LMCacheMPConnector",
            "MooncakeConnectorStoreV1",
            "MooncakeStoreConnector",
            "UCMConnector",
        ),
        passes_on=("vllm_pull",),
        has_prefill_first=True,
        is_store=True,
        exchanges_roles=True,
    ),
    "nixl_push": ConnectorTraits(
        kv_connectors=("NixlPushConnector",), names_prefill_ranks=True, counts_expired_leases=True
    ),
    "mooncake_bootstrap": ConnectorTraits(
        kv_connectors=("MooncakeConnector",), meets_at_bootstrap=True, counts_expired_leases=True
    ),
    "sglang_bootstrap": ConnectorTraits(
        engine="SGLang",
        takes_encoders=False,
        tells_bootstrap_port=True,
        meets_at_bootstrap=True,
        has_sglang_routes=True,
        lower_priority_first=False,
        cache_path="/flush_cache",
        exchanges_roles=True,
        # entrypoints/http_server.py, with --enable-pd-role-switch
        role_switch_path="/pd_role_switch",
    ),
    "ascend_layerwise": ConnectorTraits(
        # In both, decoders call the gateway's callback port before the prefill begins.
        kv_connectors=("MooncakeLayerwiseConnector", "SfaRemoteD2HConnector"),
        needs_callback_port=True,
    ),
    "plain": ConnectorTraits(engine=None, takes_prefillers=False, needs_prefillers=False),
}


_SYNONYMS: Final[Mapping[str, str]] = {
    "nixl": "vllm_pull",
    "lmcache": "vllm_store",
    "store": "vllm_store",
    "sglang": "sglang_bootstrap",
    "layerwise": "ascend_layerwise",
    "none": "plain",
    **{
        kv_connector.lower(): name for name, traits in CONNECTOR_TRAITS.items() for kv_connector in traits.kv_connectors
    },
}
"""Other names of connectors, in lower case: names in engines, and common short forms that have one meaning."""


def read_connector_name(name: str) -> str:
    """Return the connector with this name or synonym. Raises ValueError for an unknown connector."""
    plain = name.lower().replace("-", "_")
    if plain in CONNECTOR_TRAITS:
        return plain
    if found := _SYNONYMS.get(plain.replace("_", "")):
        return found
    *others, last = (f"'{known}'" for known in CONNECTOR_TRAITS)
    expected = f"must be {', '.join(others)} or {last}"
    if plain == "mooncake":
        expected = (
            "must be mooncake_bootstrap for vLLM's MooncakeConnector, vllm_pull for vLLM-Ascend's MooncakeConnectorV1,"
            " vllm_store for MooncakeStoreConnector, or sglang_bootstrap for SGLang"
        )
    raise ValueError(expected)
