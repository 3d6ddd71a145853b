"""Scripts that `pdproxy launch` renders start real engines, which hand KV cache over through the rendered gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.tools.launch.command import render_files
from proxy.tools.launch.plan import make_plan
from proxy.tools.launch.refusals import find_refusals
from proxy.tools.launch.topology import parse_topology
from tests.real.cluster import Cluster
from tests.real.programs import HOST, MODEL, Program, stop
from tests.real.report import Show
from tests.real.stacks import Place
from tests.real.test_pairs import doctor
from tests.reference_pages.compatibility import kv_transfer
from tests.test_engine_flags import TRIED
from tests.tools.launch.reading import tree_of

# Options of this machine's engines that the rest of a topology determines, or that a topology has in other units.
_OWN = {"--served-model-name", "--kv-transfer-config", "--scheduler-cls", "--tensor-parallel-size"}


def topology(cluster: Cluster, directory: Path) -> dict[str, Any]:
    """Return the topology of docs/engines/ for the stack of this cluster, with addresses and sizes of this machine."""
    (name,) = (name for name, stack in TRIED.items() if stack == cluster.stack.name)
    family, ports, tree = cluster.stack.family, cluster.engines.ports, tree_of(name)
    options = cluster.stack.options(Place("decode", 1, next(ports), directory))
    tree |= {"model": str(cluster.engines.model), "served_model_name": MODEL}
    tree["nodes"] = {"n0": {"address": HOST, "devices": 2}}
    flags = family.options.flags.items()
    tree["options"] |= {flag.removeprefix("--"): value or True for flag, value in flags if flag not in _OWN}
    tree["environment"] = {
        **tree.get("environment", {}),
        **family.options.environment,
        **{name: value for name, value in options.environment.items() if name.startswith("UCX")},
    }
    extra = kv_transfer(options.flags).get("kv_connector_extra_config", {})
    if extra := {name: value for name, value in extra.items() if not name.endswith("_port")}:
        tree["connector_options"] = extra
    for part in tree["roles"].values():
        part |= {"groups": [["n0"]], "tp": 1, "options": {}} | {
            port: next(ports) for port in ("port", "kv_port", "bootstrap_port") if port in part
        }
    tree["gateway"] = {"settings": {"listen": {"host": HOST, "port": next(ports)}}}
    return tree


def start(cluster: Cluster, files: Mapping[str, str], role: str, directory: Path) -> Program:
    """Start the script of a role."""
    (text,) = (text for path, text in files.items() if f"/{role}-" in path)
    script = directory / f"{role}.sh"
    # The CPU build takes an empty name of a GPU for a mistake.
    script.write_text("".join(line for line in text.splitlines(keepends=True) if "VISIBLE_DEVICES" not in line))
    port = int(text.partition("--port ")[2].split()[0])
    bootstrap = text.partition("BOOTSTRAP_PORT=")[2]
    environment = cluster.engines.environment(cluster.stack.family.venv_variable, {})
    per_start = cluster.stack.options(Place("decode", 1, 2, directory)).per_start
    log = directory / f"{role}.log"
    bootstrap_port = int(bootstrap.split()[0]) if bootstrap else None
    return Program(role, port, ["bash", script], log, environment, bootstrap_port, per_start)


@pytest.mark.only("nixl", "mooncake")
def test_engines_of_rendered_scripts_hand_over(cluster: Cluster, tmp_path: Path, show: Show) -> None:
    if len(cluster.prefillers) > 1:
        pytest.skip("the smallest cluster suffices, and leaves memory for two more engines")
    plan = make_plan(parse_topology(topology(cluster, cluster.engines.directory), "topology"))
    assert find_refusals(plan) == []
    files = render_files(plan)
    programs: list[Program] = []
    try:
        programs += (start(cluster, files, role, tmp_path) for role in ("prefill", "decode"))
        for program in programs:
            program.wait_until_ready("/health")
        prefiller, decoder = programs
        found = doctor(cluster.stack.connector, [prefiller], [decoder])
    finally:
        stop(programs)
    assert [finding for finding in found if finding["severity"] in ("warning", "failure")] == []
    (pair,) = (finding for finding in found if finding["check"] == "kv")
    show(pair["words"])
