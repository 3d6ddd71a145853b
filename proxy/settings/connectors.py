"""What must be known of each connector before it is made: of its engines, of the configuration, of routes and ports.

No other file asks for a connector's name; it asks for one of these traits. They stand at the bottom because settings
are checked before anything else is imported. `proxy.connectors.CONNECTORS` has the classes, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorTraits:
    """The defaults are those of most protocols of vLLM."""

    engine: str | None = "vLLM"
    """The software that speaks it, as `Identity.kind` has it; None: any."""
    kv_connectors: tuple[str, ...] = ()
    """What vLLM and vLLM-Ascend call that which moves the KV cache (KVConnectorFactory.register_connector)."""
    passes_on: tuple[str, ...] = ()
    """Other connectors whose engines it serves, too, because it passes their KV parameters on."""
    takes_prefillers: bool = True
    """False: every engine does both stages, and is given as a decoder."""
    needs_prefillers: bool = True
    takes_encoders: bool = True
    needs_callback_port: bool = False
    """Engines call the gateway back, so each worker has a port for that."""
    has_prefill_first: bool = False
    """The decode leg begins when the prefill leg has ended, so no decoder is silent while a prompt is computed."""
    is_store: bool = False
    """The KV cache travels through a store that engines share, which also keeps it."""
    tells_bootstrap_port: bool = False
    """Prefillers say where their bootstrap server is. Of vLLM's only traffic tells."""
    meets_at_bootstrap: bool = False
    """Decoders meet a prefiller at its bootstrap server."""
    counts_expired_leases: bool = False
    """Prefillers count the KV whose lease ended before it was fetched."""
    has_sglang_routes: bool = False
    """Clients find SGLang's own routes, such as /server_info and /model_info."""
    lower_priority_first: bool = True
    """So do engines read the body's `priority`, unless they are told otherwise."""
    cache_path: str = "/reset_prefix_cache"
    """The engines' route that empties their prefix caches."""


CONNECTOR_TRAITS: Final[Mapping[str, ConnectorTraits]] = {
    # Until the engines have been asked, which they are at the start.
    "auto": ConnectorTraits(engine=None, needs_prefillers=False),
    "vllm_pull": ConnectorTraits(
        kv_connectors=(
            "NixlConnector",
            "NixlPullConnector",
            # vLLM-Ascend's: `request_finished` names the blocks in kv_transfer_params, and the decoder fetches them.
            "MooncakeConnectorV1",
            "MooncakeConnectorV2",
            "MooncakeD2RHConnectorV1",
            "MooncakeHybridConnector",
            "MooncakePullConnector",
        ),
        has_prefill_first=True,
        counts_expired_leases=True,
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
    ),
    "mooncake_bootstrap": ConnectorTraits(kv_connectors=("MooncakeConnector",), meets_at_bootstrap=True),
    "sglang_bootstrap": ConnectorTraits(
        engine="SGLang",
        takes_encoders=False,
        tells_bootstrap_port=True,
        meets_at_bootstrap=True,
        has_sglang_routes=True,
        lower_priority_first=False,
        cache_path="/flush_cache",
    ),
    "ascend_layerwise": ConnectorTraits(
        # With both, decoders announce themselves at the gateway's callback port before the prefill begins.
        kv_connectors=("MooncakeLayerwiseConnector", "SfaRemoteD2HConnector"),
        needs_callback_port=True,
    ),
    "plain": ConnectorTraits(engine=None, takes_prefillers=False, needs_prefillers=False),
}


def known_connector(name: str) -> str:
    """The same name. Raises ValueError for one that no connector has."""
    if name not in CONNECTOR_TRAITS:
        *others, last = (f"'{known}'" for known in CONNECTOR_TRAITS)
        raise ValueError(f"must be {', '.join(others)} or {last}")
    return name
