"""Problems that starting the fleet by this topology would cause. Pure.

A FAILURE refuses the topology; a WARNING is printed.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from proxy.common.endpoints import canonical_host, is_ip_address, is_loopback_host
from proxy.tools.doctor.findings import Finding, Severity
from proxy.tools.launch.plan import TRANSPORT, Plan, has_group_address, port_claims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from proxy.tools.launch.topology import RoleName, Topology

_REFUSED: Final = Severity.FAILURE
_RECOMPUTE: Final = "recompute_scheduler_enable"

_ALIKE: Final = {
    "max-model-len": "what fits one side is refused by the other",
    "context-length": "what fits one side is refused by the other",
    "block-size": "the KV cache travels in blocks",
    "page-size": "the KV cache travels in pages",
    "kv-cache-dtype": "the KV cache would be read as what it is not",
}
"""Options that must be equal on prefillers and decoders, with the reason."""
# compute_nixl_compatibility_hash
_ALIKE_FOR_NIXL: Final = dict.fromkeys(
    ("dtype", "attention-backend", "disable-hybrid-kv-cache-manager"),
    "NixlConnector rejects the handoff between them",
)


def find_refusals(plan: Plan) -> list[Finding]:
    """Return the findings of all checks, the most severe last."""
    return sorted((found for check in CHECKS for found in check(plan)), key=lambda found: found.severity)


def check_nodes(plan: Plan) -> Iterator[Finding]:
    """Check that nodes are different hosts, and that each starts something."""
    busy = {launch.node_name for launch in plan.launches} | {plan.topology.gateway.node}
    places: dict[str, str] = {}
    # HCCL_IF_IP, which is the address if there is a nic, accepts only IPv4 and IPv6 addresses (CANN's documentation).
    needs_addresses = plan.topology.engine == "vllm-ascend"
    for name, node in plan.topology.nodes.items():
        place = canonical_host(node.address)
        if (first := places.setdefault(place, name)) != name:
            words = f"has the address of node {first}, {node.address}"
            yield Finding(_REFUSED, "address", f"node {name}", words, "nodes must have different addresses")
        if needs_addresses and node.nic is not None and not is_ip_address(node.address):
            words = f"has a nic and the address {node.address}, which HCCL takes only as an IP address"
            yield Finding(_REFUSED, "address", f"node {name}", words, "write the IP address")
        if name not in busy:
            yield Finding(Severity.WARNING, "idle", f"node {name}", "starts nothing", "name it in a group")


def check_ranks(plan: Plan) -> Iterator[Finding]:
    """Check that every rank of a group is started once."""
    for group in plan.groups() if plan.topology.engine != "sglang" else ():
        dp, owners = group[0].part.dp, defaultdict(list)
        for launch in group:
            for rank in launch.ranks:
                owners[rank].append(launch.node_name)
        label = f"{group[0].role} group {group[0].group}"
        twice = {rank: nodes for rank, nodes in owners.items() if len(nodes) > 1}
        if twice:
            words = f"{_format_ranks(twice)} would be started twice, on {' and '.join(next(iter(twice.values())))}"
            yield Finding(_REFUSED, "ranks", label, words, "give every node different ranks")
        if beyond := [rank for rank in owners if rank >= dp]:
            words = (
                f"{_format_ranks(beyond)} would be started on {owners[beyond[0]][0]}, and there are 0 to "
                f"{dp - 1} with dp {dp}"
            )
            yield Finding(_REFUSED, "ranks", label, words, "raise dp, or start fewer ranks on each node")
        if missing := [rank for rank in range(dp) if rank not in owners]:
            words = f"{_format_ranks(missing)} of {dp} would not be started, and the others wait for all"
            yield Finding(_REFUSED, "ranks", label, words, "give every rank to a node")


def check_single_ranks(plan: Plan) -> Iterator[Finding]:
    """VLLM refuses the rank number of launch_online_dp.py for a single rank (ParallelConfig)."""
    for role, part in plan.topology.roles.items() if plan.topology.launcher == "launch_online_dp" else ():
        if part.dp == 1:
            words = "dp is 1, with which launch_online_dp.py starts nothing: vLLM takes no --data-parallel-rank then"
            yield Finding(_REFUSED, "ranks", role, words, "take launcher serve_ranks")


def check_dp_addresses(plan: Plan) -> Iterator[Finding]:
    """Check that the ranks of a group connect to each other at its rank 0."""
    for launch in plan.launches:
        if not launch.master or not has_group_address(plan, launch):
            continue
        right = plan.topology.nodes[launch.master].address
        if canonical_host(launch.dp_address) != canonical_host(right):
            words = f"dp_address is {launch.dp_address}, and rank 0 of the group is on node {launch.master}, {right}"
            yield Finding(_REFUSED, "dp_address", launch.subject, words, "leave it out: it is the address of rank 0")
        elif is_loopback_host(right) and not is_loopback_host(launch.node.address):
            words = f"the ranks would meet at {right}, which is every node's own"
            yield Finding(_REFUSED, "dp_address", launch.subject, words, "give the node its address in the network")


def check_devices(plan: Plan) -> Iterator[Finding]:
    """Check that devices exist, suffice, and belong to one launch each."""
    for launch in plan.launches:
        has, wants = launch.node.devices, launch.devices
        if wants.stop > has:
            words = (
                f"wants devices {_format_span(wants)}, and the node has {has}: "
                f"{_format_shape(launch.part.dp, launch.part.tp)}"
            )
            yield Finding(_REFUSED, "devices", launch.subject, words, "start fewer ranks there, or lower tp")
        needs = len(launch.ranks) * launch.part.tp
        if plan.topology.engine != "sglang" and len(wants) != needs:
            words = f"has {len(wants)} devices, and {len(launch.ranks)} ranks with tp {launch.part.tp} need {needs}"
            yield Finding(_REFUSED, "devices", launch.subject, words, "correct devices, or leave it out")
        if plan.topology.launcher == "launch_online_dp" and wants.start:
            words = f"is to have devices {_format_span(wants)}, and launch_online_dp.py always begins with device 0"
            yield Finding(_REFUSED, "devices", launch.subject, words, "take launcher serve_ranks")
    for one, other in combinations(plan.launches, 2):
        common = {*one.devices} & {*other.devices}
        if one.node_name == other.node_name and common:
            words = (
                f"wants devices {_format_span(other.devices)}, and {one.name} has "
                f"{_format_span(one.devices)} of that node"
            )
            hint = "put them on different nodes, or take launcher serve_ranks"
            yield Finding(_REFUSED, "devices", other.subject, words, hint)


def check_ports(plan: Plan) -> Iterator[Finding]:
    """Check that no port of a node is used twice."""
    claimed = [*port_claims(plan)]
    for one, other in combinations(claimed, 2):
        if one.node == other.node and max(one.ports.start, other.ports.start) < min(one.ports.stop, other.ports.stop):
            hint = "move one of them"
            if other.what == TRANSPORT:
                hint = f"begin at {other.ports.stop} or above"
            yield Finding(_REFUSED, "ports", f"node {one.node}", f"{one} would collide with {other}", hint)
    for claim in claimed:
        if claim.ports.stop > 65536:
            yield Finding(_REFUSED, "ports", f"node {claim.node}", f"{claim} ends behind 65535", "begin lower")


def check_tp(plan: Plan) -> Iterator[Finding]:
    """Check that the connector can combine the tensor-parallel sizes."""
    connector, roles = plan.topology.connector, plan.topology.roles
    if connector is None or not connector.startswith(("Mooncake", "Nixl")):
        return
    prefill, decode = roles["prefill"].tp, roles["decode"].tp
    if plan.topology.has_store:
        # resolve_store_tp_size of vLLM's mooncake/store/worker.py
        has_common_layout = plan.topology.connector_options.keys() & {"store_tp_size", "enable_store_tp_lcm"}
        if connector == "MooncakeStoreConnector" and prefill != decode and not has_common_layout:
            words = (
                f"{connector} keeps the KV cache of each rank, and prefillers have tp {prefill}, decoders tp {decode}"
            )
            hint = f"set connector_options: {{store_tp_size: {lcm(prefill, decode)}}}"
            yield Finding(Severity.WARNING, "tp", "fleet", words, hint)
        return
    if plan.topology.engine == "vllm":
        # TransferTopology.tp_ratio, and _get_tp_ratio of mooncake_connector.py, which raise an error
        if prefill % decode and decode % prefill:
            words = f"{connector} cannot join prefillers with tp {prefill} and decoders with tp {decode}"
            yield Finding(_REFUSED, "tp", "fleet", words, "one of them must be a multiple of the other")
        return
    # disaggregated_prefill.md of vllm-ascend, and MooncakeConnectorWorker.__init__, which raises an error
    if prefill % decode:
        words = f"{connector} cannot join prefillers with tp {prefill} and decoders with tp {decode}"
        yield Finding(_REFUSED, "tp", "fleet", words, "tp of prefillers must be a multiple of that of decoders")


def check_alike(plan: Plan) -> Iterator[Finding]:
    """Check that both sides have equal lengths and blocks."""
    if "both" in plan.topology.roles:
        return
    prefill, decode = (plan.topology.options_of(role) for role in ("prefill", "decode"))
    alike = _ALIKE | (_ALIKE_FOR_NIXL if plan.topology.has_side_channels and plan.topology.engine == "vllm" else {})
    for flag, reason in alike.items():
        one, other = prefill.get(flag), decode.get(flag)
        if one != other:
            words = f"--{flag} is {_format_value(one)} for prefillers and {_format_value(other)} for decoders: {reason}"
            yield Finding(_REFUSED, "alike", "fleet", words, "write it once, in the common options")


def check_batches(plan: Plan) -> Iterator[Finding]:
    """Check that a batch has room for a token of each sequence; otherwise vLLM does not start (SchedulerConfig)."""
    for role in plan.topology.roles:
        options = plan.topology.options_of(role)
        tokens, sequences = options.get("max-num-batched-tokens"), options.get("max-num-seqs")
        if isinstance(tokens, int) and isinstance(sequences, int) and tokens < sequences:
            words = f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}, with which none starts"
            yield Finding(_REFUSED, "batch", role, words, "allow a token for each sequence, with speculation several")


def check_recompute(plan: Plan) -> Iterator[Finding]:
    """Check that the gateway continues answers if decoders interrupt them to recompute."""
    topology = plan.topology
    for role in topology.roles:
        if not _connector_member(topology, role, "additional-config", _RECOMPUTE):
            continue
        if role == "both":
            words = f"{_RECOMPUTE} is for decoders: vLLM-Ascend does not start with it in other roles"
            yield Finding(_REFUSED, "recompute", role, words, "take it out of additional-config")
        elif role == "prefill":
            # vllm-project/vllm-ascend#11265, #11537
            words = f"{_RECOMPUTE} is for decoders: older prefillers are less accurate with it, newer ones ignore it"
            yield Finding(Severity.WARNING, "recompute", role, words, "take it out of additional-config")
        elif (mode := _resume_mode(topology)) != "exact":
            words = f"with {_RECOMPUTE} decoders break answers off, and resume.mode {mode} does not continue them"
            yield Finding(_REFUSED, "recompute", role, words, "take resume.mode out of gateway.settings")


def check_speculation(plan: Plan) -> Iterator[Finding]:
    """Check that prefillers do not speculate, because they generate one token."""
    if "prefill" not in plan.topology.roles:
        return
    guesses = _connector_member(plan.topology, "prefill", "speculative-config", "num_speculative_tokens")
    if isinstance(guesses, int) and guesses > 1:
        words = f"num_speculative_tokens is {guesses} for prefillers, which make one token"
        hint = "1 is enough there, except for hybrid models with Mamba layers, which need that of decoders"
        yield Finding(Severity.WARNING, "speculation", "prefill", words, hint)


CHECKS: Final[tuple[Callable[[Plan], Iterable[Finding]], ...]] = (
    check_nodes,
    check_ranks,
    check_single_ranks,
    check_dp_addresses,
    check_devices,
    check_ports,
    check_tp,
    check_alike,
    check_batches,
    check_recompute,
    check_speculation,
)


def _connector_member(topology: Topology, role: RoleName, flag: str, name: str) -> Any:
    value = topology.options_of(role).get(flag)
    return value.get(name) if isinstance(value, dict) else None


def _resume_mode(topology: Topology) -> object:
    resume = topology.gateway.settings.get("resume")
    return resume.get("mode", "exact") if isinstance(resume, dict) else "exact"


def _format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0 to 3`, or `ranks 0, 2 to 4 and 7`, for at least one rank."""
    spans: list[range] = []
    for rank in sorted(ranks):
        if spans and spans[-1].stop == rank:
            spans[-1] = range(spans[-1].start, rank + 1)
        else:
            spans.append(range(rank, rank + 1))
    *others, last = (f"{span.start} to {span[-1]}" if len(span) > 1 else str(span.start) for span in spans)
    told = f"{', '.join(others)} and {last}" if others else last
    return f"rank{'' if told.isdecimal() else 's'} {told}"


def _format_span(span: range) -> str:
    return f"{span.start}-{span.stop - 1}" if len(span) > 1 else str(span.start)


def _format_shape(dp: int, tp: int) -> str:
    return f"dp {dp}, tp {tp}"


def _format_value(value: object) -> str:
    return "not set" if value is None else str(value)
