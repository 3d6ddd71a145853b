"""Ports of each node, and the processes that listen there. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.tools.launch.plan import Launch, Plan

TRANSPORT: Final = "Mooncake's own ports, taken at random"
_TRANSPORT_FIRST: Final = 20_000
_TRANSPORT_PER_DEVICE: Final = 1_000
"""Ports of Mooncake's AscendDirectTransport: the first one, and the number for each device of the node.

It takes random ports from 20000 on (vllm-ascend's pd_disaggregation_mooncake_multi_node.md, kv_port Configuration
Guide).
"""
_SGLANG_BEHIND_MEETING: Final = 5
"""SGLang takes the ports after that of --dist-init-addr for its own processes (PortArgs.init_new)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Ports of a node that a process needs."""

    node: str
    what: str
    ports: range

    def __str__(self) -> str:
        first, last = self.ports.start, self.ports.stop - 1
        return f"{self.what} ({first if first == last else f'{first}-{last}'})"


def claims(plan: Plan) -> Iterator[Claim]:
    """Return the ports of all listening processes."""
    topology = plan.topology
    for launch in plan.launches:
        where, label = launch.node_name, f"the API of {launch.name}"
        yield Claim(where, label, launch.endpoints)
        if topology.engine == "sglang":
            yield from _of_sglang(launch)
            continue
        if meets(plan, launch) and launch.node_name == launch.master:
            yield Claim(where, f"rpc_port of {launch.name}", range(launch.part.rpc_port, launch.part.rpc_port + 1))
        if launch.kv_port is not None:
            # MooncakeConnectorWorker: kv_port + data_parallel_rank * tensor_parallel_size + the number of the device
            first, last = (launch.kv_port + rank * launch.part.tp for rank in (launch.ranks.start, launch.ranks.stop))
            yield Claim(where, f"kv_port of {launch.name}", range(first, last))
    if topology.connector is not None and topology.connector.startswith("Mooncake"):
        for name in dict.fromkeys(launch.node_name for launch in plan.launches):
            last = _TRANSPORT_FIRST + _TRANSPORT_PER_DEVICE * topology.nodes[name].devices
            yield Claim(name, TRANSPORT, range(_TRANSPORT_FIRST, last))
    if topology.gateway.node is not None:
        settings = Settings.model_validate(topology.gateway.settings)
        listens = {
            "the gateway": settings.listen.port,
            "the gateway's admin.port": settings.admin.port,
            "the gateway's admin.probe_port": settings.admin.probe_port,
        }
        for what, port in listens.items():
            if port:
                yield Claim(topology.gateway.node, what, range(port, port + 1))


def meets(plan: Plan, launch: Launch) -> bool:
    """Return whether the ranks of the group get an address for their connections."""
    if plan.topology.launcher == "serve_nodes" or plan.topology.engine == "sglang":
        return launch.nodes > 1
    return launch.part.dp > 1


def _of_sglang(launch: Launch) -> Iterator[Claim]:
    if launch.role == "prefill" and launch.endpoints:
        port = launch.part.bootstrap_port
        yield Claim(launch.node_name, f"bootstrap_port of {launch.name}", range(port, port + 1))
    if launch.nodes > 1 and launch.index == 0:
        port = launch.part.rpc_port
        yield Claim(launch.node_name, f"rpc_port of {launch.name}", range(port, port + 1 + _SGLANG_BEHIND_MEETING))
