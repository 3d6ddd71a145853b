"""The protocols that move the KV cache from prefiller to decoder, and the table of all connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.connectors.ascend_layerwise import AscendLayerwise
from proxy.connectors.mooncake_bootstrap import MooncakeBootstrap
from proxy.connectors.nixl_push import NixlPush
from proxy.connectors.plain import PlainConnector
from proxy.connectors.sequential import VllmPull, VllmStore
from proxy.connectors.sglang_bootstrap import SglangBootstrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.connectors.base import Connector

CONNECTORS: Final[Mapping[str, type[Connector]]] = {
    "ascend_layerwise": AscendLayerwise,
    "mooncake_bootstrap": MooncakeBootstrap,
    "nixl_push": NixlPush,
    "plain": PlainConnector,
    "sglang_bootstrap": SglangBootstrap,
    "vllm_pull": VllmPull,
    "vllm_store": VllmStore,
}
