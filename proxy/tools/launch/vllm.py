"""Scripts for engines of vLLM and vLLM-Ascend: by `vllm serve` per rank or node, or by vLLM-Ascend's script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from proxy.tools.launch import shell
from proxy.tools.launch.plan import Launch, Plan, has_group_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.tools.launch.topology import Engine, RoleName

_KV_ROLES: Final[Mapping[RoleName, str]] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_TEMPLATE: Final = "run_dp_template.sh"
_VISIBLE: Final[Mapping[Engine, str]] = {
    "vllm": "CUDA_VISIBLE_DEVICES",
    "vllm-ascend": "ASCEND_RT_VISIBLE_DEVICES",
}
"""Variable that names the devices of a process."""
_OF_A_NETWORK: Final[Mapping[Engine, tuple[str, tuple[str, ...]]]] = {
    "vllm": ("VLLM_HOST_IP", ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")),
    "vllm-ascend": ("HCCL_IF_IP", ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")),
}
"""Variables for the node's address and its network interface."""


def make_files(plan: Plan, launch: Launch) -> Iterator[tuple[str, str]]:
    """Return the files that the node needs for this launch: texts by name."""
    match plan.topology.launcher:
        case "launch_online_dp":
            yield _TEMPLATE, _rank_script(plan, launch)
            yield f"{launch.name}.sh", _online_dp_script(launch)
        case "serve_ranks":
            yield f"{launch.name}.sh", _serve_ranks_script(plan, launch)
        case _:
            yield f"{launch.name}.sh", _serve_node_script(plan, launch)


def _rank_script(plan: Plan, launch: Launch) -> str:
    """Return the script that launch_online_dp.py runs for each rank, with seven arguments."""
    words = [
        "--port $2",
        "--data-parallel-size $3",
        "--data-parallel-rank $4",
        "--data-parallel-address $5",
        "--data-parallel-rpc-port $6",
        "--tensor-parallel-size $7",
    ]
    return shell.script_text(
        [f"{launch.subject}: one rank, as launch_online_dp.py starts it"],
        plan.topology.prepare,
        [*_export_lines(plan, launch), "export ASCEND_RT_VISIBLE_DEVICES=$1"],
        [_serve_command(plan, launch, words)],
    )


def _online_dp_script(launch: Launch) -> str:
    words = [
        shell.option_line("dp-size", launch.part.dp),
        shell.option_line("tp-size", launch.part.tp),
        shell.option_line("dp-size-local", len(launch.ranks)),
        shell.option_line("dp-rank-start", launch.ranks.start),
        shell.option_line("dp-address", launch.dp_address),
        shell.option_line("dp-rpc-port", launch.part.rpc_port),
        shell.option_line("vllm-start-port", launch.port),
    ]
    return shell.script_text(
        [
            _describe_launch(launch),
            f"Put launch_online_dp.py of vllm-ascend's examples/external_online_dp beside it and {_TEMPLATE}.",
        ],
        ['cd "$(dirname "$0")" || exit', f"exec python launch_online_dp.py {' '.join(words)}"],
    )


def _serve_ranks_script(plan: Plan, launch: Launch) -> str:
    commands = []
    for rank, port in zip(launch.ranks, launch.endpoints, strict=True):
        words = [shell.option_line("port", port), *_data_parallel_options(plan, launch, rank)]
        words.append(shell.option_line("tensor-parallel-size", launch.part.tp))
        devices = ",".join(map(str, launch.devices_of(rank)))
        commands.append(f"{_VISIBLE[plan.topology.engine]}={devices} {_serve_command(plan, launch, words)} &")
    return shell.script_text(
        [_describe_launch(launch)],
        plan.topology.prepare,
        _export_lines(plan, launch),
        commands,
        [
            "# Ranks work in step: when one ends, the others cannot go on.",
            "trap 'kill $(jobs -p)' EXIT",
            f"while running=($(jobs -rp)) && [ ${{#running[@]}} -eq {len(commands)} ]; do sleep 1; done",
            "exit 1",
        ],
    )


def _serve_node_script(plan: Plan, launch: Launch) -> str:
    words = [shell.option_line("port", launch.port)]
    part = launch.part
    if part.dp > 1:
        words.append(shell.option_line("data-parallel-size", part.dp))
    if launch.nodes > 1:
        words.append(shell.option_line("data-parallel-size-local", len(launch.ranks)))
        if not launch.endpoints:
            words += ["--headless", shell.option_line("data-parallel-start-rank", launch.ranks.start)]
        words.append(shell.option_line("data-parallel-address", launch.dp_address))
        words.append(shell.option_line("data-parallel-rpc-port", part.rpc_port))
    words.append(shell.option_line("tensor-parallel-size", part.tp))
    exports = list(_export_lines(plan, launch))
    if len(launch.devices) < launch.node.devices:
        exports.append(f"export {_VISIBLE[plan.topology.engine]}={','.join(map(str, launch.devices))}")
    return shell.script_text(
        [_describe_launch(launch)], plan.topology.prepare, exports, [f"exec {_serve_command(plan, launch, words)}"]
    )


def _data_parallel_options(plan: Plan, launch: Launch, rank: int) -> Iterator[str]:
    if has_group_address(plan, launch):
        yield shell.option_line("data-parallel-size", launch.part.dp)
        yield shell.option_line("data-parallel-rank", rank)
        yield shell.option_line("data-parallel-address", launch.dp_address)
        yield shell.option_line("data-parallel-rpc-port", launch.part.rpc_port)


def _serve_command(plan: Plan, launch: Launch, words: list[str]) -> str:
    topology = plan.topology
    if topology.served_model_name is not None:
        words.append(shell.option_line("served-model-name", topology.served_model_name))
    words += shell.option_lines(topology.options_of(launch.role))
    if topology.connector is not None:
        words.append(shell.option_line("kv-transfer-config", json.dumps(_kv_transfer_config(plan, launch))))
    return shell.command_text(f"vllm serve {shell.shell_word(topology.model)}", words)


def _kv_transfer_config(plan: Plan, launch: Launch) -> dict[str, object]:
    """Return `--kv-transfer-config`, from which vLLM-Ascend's connectors read the sizes of both sides.

    See MooncakeConnectorWorker._get_prefill_decode_size. vLLM's connectors learn them in their handshakes. Both roles
    read and write a store of vLLM. When an engine dies, its part of a store is lost, and decoders compute it again.
    Decoders remember a prefiller by its `engine_id`, which must be new after each start, as it is if none is written.
    """
    topology = plan.topology
    if topology.engine == "vllm":
        role: dict[str, object] = {"kv_role": _KV_ROLES[launch.role]}
        if topology.has_store:
            role = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        options = topology.connector_options
        if topology.connector == "MooncakeStoreConnector":
            # Part of the name of a socket (get_zmq_rpc_path_lookup). Engines of one node would share it otherwise.
            options = {"lookup_rpc_port": launch.port, **options}
        more = {"kv_connector_extra_config": options} if options else {}
        return {"kv_connector": topology.connector, **role, **more}
    sizes: dict[str, object] = {role: {"dp_size": part.dp, "tp_size": part.tp} for role, part in topology.roles.items()}
    return {
        "kv_connector": topology.connector,
        "kv_role": _KV_ROLES[launch.role],
        **({} if launch.kv_port is None else {"kv_port": str(launch.kv_port)}),
        **({} if launch.engine_id is None else {"engine_id": launch.engine_id}),
        "kv_connector_extra_config": {**topology.connector_options, **sizes},
    }


def _export_lines(plan: Plan, launch: Launch) -> Iterator[str]:
    network: dict[str, str] = {}
    engine, address = plan.topology.engine, launch.node.address
    if (nic := launch.node.nic) is not None:
        of_address, of_interface = _OF_A_NETWORK[engine]
        network = {of_address: address, **dict.fromkeys(of_interface, nic)}
    if engine == "vllm" and launch.kv_port is not None:
        network |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(launch.kv_port)}
    if engine == "vllm" and plan.topology.has_bootstrap_ports and launch.role == "prefill":
        network["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(launch.part.bootstrap_port)
    return shell.export_lines({**network, **plan.topology.environment, **launch.part.environment})


def _describe_launch(launch: Launch) -> str:
    first, last = launch.ranks.start, launch.ranks.stop - 1
    which = f"rank {first}" if first == last else f"ranks {first} to {last}"
    ports = list(launch.endpoints)
    where = (
        ("ports {0} to {1}" if len(ports) > 1 else "port {0}").format(ports[0], ports[-1]) if ports else "no endpoint"
    )
    return f"{launch.subject}, {launch.node.address}: data-parallel {which} of {launch.part.dp}, {where}"
