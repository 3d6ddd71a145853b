"""The sub-command: its flags, what it prints and its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from proxy.doctor.findings import Severity
from proxy.launch.plan import planned
from proxy.launch.refusals import refusals
from proxy.launch.render import as_text, rendered
from proxy.launch.topology import read_topology
from proxy.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.launch.plan import Plan

_DESCRIPTION: Final = """\
One description of a fleet, the topology, gives the commands of every node and the gateway's configuration. What would
not work is refused in words. configs/topologies has topologies for published guides."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code. Raises SettingsError."""
    flags = read_flags(argv)
    plan = planned(read_topology(flags.topology))
    files = rendered(plan)
    if not _is_good(plan):
        return 2
    if flags.output is None:
        print(as_text(files), end="")
    else:
        _write(flags.output, files)
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """What follows the sub-command. Raises SettingsError."""
    parser = _Parser(prog="pdproxy launch", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("action", choices=("render",), help="print the scripts of each node, and the gateway's configuration")
    add("topology", type=Path, metavar="TOPOLOGY.yaml")
    add("--output", type=Path, metavar="DIR", help="write them there, a directory for each node, instead of printing")
    return parser.parse_args(argv)


def _is_good(plan: Plan) -> bool:
    """Tell what is the matter with the topology; False: it is refused."""
    found = refusals(plan)
    for finding in found:
        word = "error" if finding.severity is Severity.FAILURE else "warning"
        hint = f" ({finding.hint})" if finding.hint else ""
        print(f"pdproxy launch: {word}: {finding.subject}: {finding.words}{hint}", file=sys.stderr)
    return all(finding.severity is not Severity.FAILURE for finding in found)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    """Scripts can be run. Raises SettingsError."""
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
