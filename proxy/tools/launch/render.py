"""All files for a topology: scripts by node, and the gateway's configuration. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.tools.launch import sglang, vllm_ascend
from proxy.tools.launch.gateway import NAME, gateway_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.tools.launch.plan import Plan


def rendered(plan: Plan) -> dict[str, str]:
    """Return texts by path: p0/prefill-0.sh, …, gateway.yaml. Raises SettingsError."""
    engine = sglang if plan.topology.engine == "sglang" else vllm_ascend
    found = {
        f"{launch.node_name}/{name}": text for launch in plan.launches for name, text in engine.files(plan, launch)
    }
    return {**found, NAME: gateway_file(plan)}


def as_text(files: Mapping[str, str]) -> str:
    """Return all files as one text, each after its path, as `tail` shows several files."""
    return "\n".join(f"==> {path} <==\n{text}" for path, text in files.items())
