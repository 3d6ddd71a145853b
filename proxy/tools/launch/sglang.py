"""Scripts for engines of SGLang: one `sglang.launch_server` per node, one endpoint per group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.tools.launch import shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.tools.launch.plan import Launch, Plan


def make_files(plan: Plan, launch: Launch) -> Iterator[tuple[str, str]]:
    """Return the files that the node needs for this launch: texts by name."""
    topology, part = plan.topology, launch.part
    words = [shell.option_line("model-path", topology.model)]
    if topology.served_model_name is not None:
        words.append(shell.option_line("served-model-name", topology.served_model_name))
    words += [shell.option_line("host", launch.node.address), shell.option_line("port", launch.port)]
    if launch.role != "both":
        words.append(shell.option_line("disaggregation-mode", launch.role))
    if launch.role == "prefill":
        words.append(shell.option_line("disaggregation-bootstrap-port", part.bootstrap_port))
    words.append(shell.option_line("tp-size", part.tp))
    if part.dp > 1:
        words.append(shell.option_line("dp-size", part.dp))
    if launch.nodes > 1:
        words.append(shell.option_line("nnodes", launch.nodes))
        words.append(shell.option_line("node-rank", launch.index))
        words.append(shell.option_line("dist-init-addr", f"{_host_in_url(launch.dp_address)}:{part.rpc_port}"))
    words += shell.option_lines(topology.options_of(launch.role))
    serve = shell.command_text("exec python -m sglang.launch_server", words)
    told = f"{launch.subject}, {launch.node.address}: node {launch.index} of {launch.nodes}"
    yield f"{launch.name}.sh", shell.script_text([told], topology.prepare, _export_lines(plan, launch), [serve])


def _export_lines(plan: Plan, launch: Launch) -> Iterator[str]:
    nic = launch.node.nic
    network = {} if nic is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), nic)
    devices = {}
    if len(launch.devices) < launch.node.devices:
        devices["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, launch.devices))
    return shell.export_lines({**network, **plan.topology.environment, **launch.part.environment, **devices})


def _host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
