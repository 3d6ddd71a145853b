"""How the KV cache travels from prefiller to decoder: one file per protocol, and the table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.connectors.plain import Plain
from proxy.connectors.vllm_pull import VllmPull

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.connectors.base import Connector, Kit

CONNECTORS: Final[Mapping[str, Callable[[Kit], Connector]]] = {
    "plain": Plain,
    "vllm_pull": VllmPull,
}
