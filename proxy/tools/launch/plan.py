"""The processes of each node, derived from the topology. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.tools.launch.topology import Group, Node, Part, RoleName, Share, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The process or processes of one node for one group."""

    role: RoleName
    group: int
    """Index of the group in its role, from 0."""
    part: Part
    node_name: str
    node: Node
    index: int
    """Index of the node in the group; node 0 has the first rank."""
    nodes: int
    """Number of nodes of the group."""
    ranks: range
    """Data-parallel ranks. SGLang assigns ranks itself, so there is one for each process."""
    devices: range
    port: int
    kv_port: int | None
    engine_id: str | None
    """The `engine_id` of the topology; None: the engine makes one up at each start."""
    dp_address: str
    """Address at which the ranks of the group connect to each other."""
    master: str
    """Name of the node with rank 0; empty if no node has it."""
    endpoints: range
    """Ports in the gateway's configuration; empty if another node of the group has the endpoint."""

    @property
    def name(self) -> str:
        """Return the name of the process, such as prefill-0."""
        return f"{self.role}-{self.group}"

    @property
    def subject(self) -> str:
        """Return the name of the process in findings."""
        return f"{self.role} {self.node_name}"

    def devices_of(self, rank: int) -> range:
        """Return the devices of one rank of the process."""
        first = self.devices.start + (rank - self.ranks.start) * self.part.tp
        return range(first, first + self.part.tp)


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of the whole fleet, by the topology."""

    topology: Topology
    launches: tuple[Launch, ...]

    def of(self, role: RoleName) -> list[Launch]:
        """Return the processes of one role."""
        return [launch for launch in self.launches if launch.role == role]

    def groups(self) -> list[list[Launch]]:
        """Return the processes of each group together."""
        found: dict[tuple[str, int], list[Launch]] = defaultdict(list)
        for launch in self.launches:
            found[launch.role, launch.group].append(launch)
        return list(found.values())


def make_plan(topology: Topology) -> Plan:
    """Return the plan of a topology, in the order of the file."""
    return Plan(topology, tuple(_make_launches(topology)))


def _make_launches(topology: Topology) -> Iterator[Launch]:
    taken: dict[str, int] = defaultdict(int)
    """First free device of each node."""
    for role, part in topology.roles.items():
        for group_number, group in enumerate(part.groups):
            ranks = list(_assign_ranks(topology, part, group))
            master = next((s.node for s, its in zip(group.nodes, ranks, strict=True) if 0 in its), "")
            meeting = group.dp_address or topology.nodes[master or group.nodes[0].node].address
            for index, share in enumerate(group.nodes):
                devices = _assign_devices(topology, role, share, len(ranks[index]), len(group.nodes), taken[share.node])
                taken[share.node] = max(taken[share.node], devices.stop)
                port = share.port or part.port
                yield Launch(
                    role=role,
                    group=group_number,
                    part=part,
                    node_name=share.node,
                    node=topology.nodes[share.node],
                    index=index,
                    nodes=len(group.nodes),
                    ranks=ranks[index],
                    devices=devices,
                    port=port,
                    kv_port=share.kv_port or part.kv_port,
                    engine_id=share.engine_id,
                    dp_address=meeting,
                    master=master,
                    endpoints=_endpoint_ports(topology, port, index, len(ranks[index])),
                )


def _assign_ranks(topology: Topology, part: Part, group: Group) -> Iterator[range]:
    each = part.dp // len(group.nodes)
    for index, share in enumerate(group.nodes):
        if topology.engine == "sglang":
            yield range(index, index + 1)
        else:
            yield share.ranks or range(index * each, (index + 1) * each)


def _assign_devices(topology: Topology, role: RoleName, share: Share, ranks: int, nodes: int, free: int) -> range:
    if share.devices is not None:
        return share.devices
    part = topology.roles[role]
    if topology.engine == "sglang":
        # ServerArgs: with data-parallel attention, these ranks share the devices of tp; otherwise each rank has tp
        # devices.
        is_shared = topology.options_of(role).get("enable-dp-attention")
        count = -(-part.tp * (1 if is_shared else part.dp) // nodes)
    else:
        count = ranks * part.tp
    first = 0 if topology.launcher == "launch_online_dp" else free
    return range(first, first + count)


def _endpoint_ports(topology: Topology, port: int, index: int, ranks: int) -> range:
    if topology.launcher in ("launch_online_dp", "serve_ranks"):
        return range(port, port + ranks)
    return range(port, port + (index == 0))


# Ports of each node, and the processes that listen there. Pure.


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
class PortClaim:
    """The ports of a node that a process needs."""

    node: str
    what: str
    ports: range

    def __str__(self) -> str:
        first, last = self.ports.start, self.ports.stop - 1
        return f"{self.what} ({first if first == last else f'{first}-{last}'})"


def port_claims(plan: Plan) -> Iterator[PortClaim]:
    """Return the ports that all processes of the plan listen at."""
    topology = plan.topology
    for launch in plan.launches:
        where, label = launch.node_name, f"the API of {launch.name}"
        yield PortClaim(where, label, launch.endpoints)
        if topology.engine == "sglang":
            yield from _sglang_claims(launch)
            continue
        if has_group_address(plan, launch) and launch.node_name == launch.master:
            yield PortClaim(where, f"rpc_port of {launch.name}", range(launch.part.rpc_port, launch.part.rpc_port + 1))
        if launch.kv_port is not None:
            # MooncakeConnectorWorker: kv_port + data_parallel_rank * tensor_parallel_size + the number of the device.
            # NixlConnectorScheduler: the side channel's port + data_parallel_index.
            width = 1 if topology.engine == "vllm" else launch.part.tp
            first, last = (launch.kv_port + rank * width for rank in (launch.ranks.start, launch.ranks.stop))
            yield PortClaim(where, f"kv_port of {launch.name}", range(first, last))
        if topology.has_bootstrap_ports:
            yield from _bootstrap_claims(launch)
    if topology.engine == "vllm-ascend" and (topology.connector or "").startswith("Mooncake"):
        for name in dict.fromkeys(launch.node_name for launch in plan.launches):
            last = _TRANSPORT_FIRST + _TRANSPORT_PER_DEVICE * topology.nodes[name].devices
            yield PortClaim(name, TRANSPORT, range(_TRANSPORT_FIRST, last))
    if topology.gateway.node is not None:
        settings = Settings.model_validate(topology.gateway.settings)
        listens = {
            "the gateway": settings.listen.port,
            "the gateway's admin.port": settings.admin.port,
            "the gateway's admin.probe_port": settings.admin.probe_port,
        }
        for what, port in listens.items():
            if port:
                yield PortClaim(topology.gateway.node, what, range(port, port + 1))


def has_group_address(plan: Plan, launch: Launch) -> bool:
    """Return whether the ranks of the group get an address for their connections."""
    if plan.topology.launcher == "serve_nodes" or plan.topology.engine == "sglang":
        return launch.nodes > 1
    return launch.part.dp > 1


def _bootstrap_claims(launch: Launch) -> Iterator[PortClaim]:
    if launch.role == "prefill" and launch.endpoints:
        port = launch.part.bootstrap_port
        yield PortClaim(launch.node_name, f"bootstrap_port of {launch.name}", range(port, port + 1))


def _sglang_claims(launch: Launch) -> Iterator[PortClaim]:
    yield from _bootstrap_claims(launch)
    if launch.nodes > 1 and launch.index == 0:
        port = launch.part.rpc_port
        yield PortClaim(launch.node_name, f"rpc_port of {launch.name}", range(port, port + 1 + _SGLANG_BEHIND_MEETING))
