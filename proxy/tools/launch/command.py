"""The sub-command: its flags, output and exit code."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proxy.observe import logs
from proxy.settings import SettingsError
from proxy.settings.mistakes import Parser
from proxy.tools.doctor.command import ProgressLine, print_findings
from proxy.tools.doctor.findings import Severity
from proxy.tools.launch import sglang, vllm
from proxy.tools.launch.fleet import compare_with_engines, load_gateway
from proxy.tools.launch.gateway import NAME, gateway_file
from proxy.tools.launch.plan import Plan, make_plan
from proxy.tools.launch.refusals import find_refusals
from proxy.tools.launch.topology import read_topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_DESCRIPTION: Final = """\
Render the commands of every node and the gateway's configuration from one description of a fleet, the topology.
pdproxy rejects a topology that cannot work, with the reason. configs/topologies has topologies for published guides."""
_EPILOG: Final = """\
The exit code of render is 2 if the topology is refused. check, or render --check, compares the fleet that runs with it:
the exit code is 0 without findings, 1 with warnings, and 2 with failures."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the sub-command and return its exit code. Raises SettingsError."""
    flags = read_flags(argv)
    plan = make_plan(read_topology(flags.topology))
    if not _is_plan_accepted(plan):
        return 2
    if flags.action == "check":
        return _check_plan(plan, flags, environ)
    files = render_files(plan)
    if flags.output is None:
        print(files_as_text(files), end="")
    else:
        _write_files(flags.output, files)
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of the sub-command. Raises SettingsError."""
    parser = Parser(
        prog="pdproxy launch",
        usage="pdproxy launch {render,check} TOPOLOGY.yaml [--output DIR] [--check] [--json]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "action",
        choices=("render", "check"),
        help="render: write scripts and configuration. check: compare the running fleet with the topology.",
    )
    add("topology", type=Path, metavar="TOPOLOGY.yaml", help="File that describes the fleet.")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="Directory for the files, with one directory for each node. Default: print the files.",
    )
    add("--check", action="store_true", help="With render: the same as check.")
    add("--json", action="store_true", help="With check: print JSON instead of a table.")
    flags = parser.parse_args(argv)
    flags.action = "check" if flags.check else flags.action
    if flags.action == "render" and flags.json:
        raise SettingsError("launch render prints no JSON: leave out --json")
    if flags.action == "check" and flags.output is not None:
        raise SettingsError("launch check writes nothing: leave out --output")
    return flags


def _is_plan_accepted(plan: Plan) -> bool:
    """Print the problems of the topology, and return whether it is accepted."""
    found = find_refusals(plan)
    for finding in found:
        word = "error" if finding.severity is Severity.FAILURE else "warning"
        hint = f" ({finding.hint})" if finding.hint else ""
        print(f"pdproxy launch: {word}: {finding.subject}: {finding.words}{hint}", file=sys.stderr)
    return all(finding.severity is not Severity.FAILURE for finding in found)


def _check_plan(plan: Plan, flags: argparse.Namespace, environ: Mapping[str, str]) -> int:
    loaded = load_gateway(plan, environ, flags.topology.absolute().parent)
    progress = ProgressLine()
    try:
        with logs.silence_log():  # the findings contain everything from the doctor's parts that matters here
            found = asyncio.run(compare_with_engines(plan, loaded, progress=progress.show))
    finally:
        progress.clear()
    return print_findings(found, environ, is_json=flags.json)


def _write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files; scripts become executable. Raises SettingsError."""
    try:
        for path, text in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            if file.suffix == ".sh":
                file.chmod(0o755)
            print(file)
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be written: {(error.strerror or str(error)).lower()}") from None


# All files for a topology: scripts by node, and the gateway's configuration. Pure.


def render_files(plan: Plan) -> dict[str, str]:
    """Return texts by path: p0/prefill-0.sh, …, gateway.yaml. Raises SettingsError."""
    engine = sglang if plan.topology.engine == "sglang" else vllm
    found = {
        f"{launch.node_name}/{name}": text for launch in plan.launches for name, text in engine.make_files(plan, launch)
    }
    return {**found, NAME: gateway_file(plan)}


def files_as_text(files: Mapping[str, str]) -> str:
    """Return all files as one text, each after its path, as `tail` shows several files."""
    return "\n".join(f"==> {path} <==\n{text}" for path, text in files.items())
