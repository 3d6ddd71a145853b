"""The gateway's configuration for a topology."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import ValidationError

from proxy.settings import CONNECTOR_TRAITS, Settings, SettingsError
from proxy.settings.mistakes import explain_mistakes

if TYPE_CHECKING:
    from proxy.tools.launch.plan import Launch, Plan
    from proxy.tools.launch.topology import Topology

NAME: Final = "gateway.yaml"


def gateway_tree(plan: Plan) -> dict[str, Any]:
    """Return the gateway's options. Raises SettingsError."""
    topology = plan.topology
    tree: dict[str, Any] = {"connector": connector_of(topology)}
    for role in topology.roles:
        # Engines that do both stages are decoders for a gateway.
        tree["prefill" if role == "prefill" else "decode"] = [
            told for each in plan.of(role) if (told := _endpoints_text(plan, each))
        ]
    for name in tree.keys() & topology.gateway.settings.keys():
        raise SettingsError(f"gateway.settings: {name} follows from the rest of the topology: leave it out")
    tree |= topology.gateway.settings
    if (ranks := _prefill_ranks(plan)) > 1 and CONNECTOR_TRAITS[tree["connector"]].names_prefill_ranks:
        tree["balance"] = {"prefill_dp_ranks": ranks, **tree.get("balance", {})}
    try:
        Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(explain_mistakes(error, lambda option: f"gateway.settings: {option}", ())) from None
    return tree


def _prefill_ranks(plan: Plan) -> int:
    """Return the number of data-parallel ranks behind each address of a prefiller."""
    part = plan.topology.roles.get("prefill")
    return 1 if part is None or plan.topology.launcher != "serve_nodes" else part.dp


def gateway_file(plan: Plan) -> str:
    """Return the text of the file for `pdproxy --config`. Raises SettingsError."""
    where = plan.topology.gateway.node
    comment = f"# pdproxy --config {NAME}{f', on node {where}' if where is not None else ''}\n"
    return comment + yaml.safe_dump(gateway_tree(plan), sort_keys=False)


def connector_of(topology: Topology) -> str:
    """Return the gateway's name for the connector of the engines. Raises SettingsError."""
    if "both" in topology.roles:
        return "plain"
    if topology.engine == "sglang":
        return "sglang_bootstrap"
    served = {engines: name for name, traits in CONNECTOR_TRAITS.items() for engines in traits.kv_connectors}
    if topology.connector not in served:
        raise SettingsError(
            f"connector {topology.connector!r} is not among those that the gateway serves: {', '.join(served)}"
        )
    return served[topology.connector]


def _endpoints_text(plan: Plan, launch: Launch) -> str:
    """Return endpoints in the form of the configuration; empty if another node of the group has them."""
    if not launch.endpoints:
        return ""
    host = f"[{launch.node.address}]" if ":" in launch.node.address else launch.node.address
    first, last = launch.endpoints.start, launch.endpoints.stop - 1
    told = f"{host}:{first}" if first == last else f"{host}:{first}-{last}"
    has_bootstrap = plan.topology.has_bootstrap_ports and launch.role == "prefill"
    return f"{told} {launch.part.bootstrap_port}" if has_bootstrap else told
