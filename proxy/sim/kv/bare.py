"""No KV connector at all: an engine that takes KV parameters in silence, and computes every prompt by itself.

What vLLM does without `--kv-transfer-config`: `kv_transfer_params` is one more member of a request ("Got
kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request.", in its own log and nowhere else).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.sim.kv.protocol import KvProtocol, Leg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.options import Options
    from proxy.sim.state import State


class NoProtocol(KvProtocol):
    """Every request is a request like any other."""

    def __init__(self, options: Options, state: State, address: Callable[[], tuple[str, int]]) -> None:
        pass

    def leg(self, params: Mapping[str, Any]) -> Leg:
        return Leg.ALONE
