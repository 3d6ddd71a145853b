"""Reads rendered scripts as the programs that they start would, and is the mock launcher of simulated engines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxy.settings.yaml_file import read_yaml
from proxy.tools.launch.command import render_files
from proxy.tools.launch.plan import Plan, make_plan
from proxy.tools.launch.topology import parse_topology

ROOT = Path(__file__).parents[3]
TOPOLOGIES = ROOT / "configs" / "topologies"

Flags = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A program with its words, and the variables that it finds."""

    words: list[str]
    environment: Mapping[str, str]

    @property
    def is_engine(self) -> bool:
        return self.words[:2] == ["vllm", "serve"] or "sglang.launch_server" in self.words

    @property
    def flags(self) -> Flags:
        """The flags behind the program and what it serves."""
        first = next((i for i, word in enumerate(self.words) if word.startswith("--")), len(self.words))
        return flags_of(self.words[first:])


def flags_of(words: list[str]) -> Flags:
    """Return the value of each flag: True, a text, several texts, or parsed JSON."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return {flag: _value(values) for flag, values in found.items()}


def _value(values: list[str]) -> Any:
    if not values:
        return True
    if len(values) > 1:
        return values
    return json.loads(values[0]) if values[0].startswith("{") else values[0]


def commands(script: str) -> list[Command]:
    """Return the engines and launchers that a script starts."""
    environment: dict[str, str] = {}
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        if match := re.fullmatch(r"export (\w+)=(.*)", line):
            (environment[match[1]],) = shlex.split(match[2])
        elif re.match(r"(exec |\w+=\S+ )*(vllm|python) ", line):
            words = [word for word in shlex.split(line) if word not in ("exec", "&")]
            own = {}
            while match := re.fullmatch(r"(\w+)=(.*)", words[0]):
                own[match[1]] = match[2]
                del words[0]
            found.append(Command(words, {**environment, **own}))
    return found


def engines(files: Mapping[str, str]) -> Iterator[tuple[str, Command]]:
    """Every engine's command with the node it is started on, those of launch_online_dp.py included, as that does it."""
    for path, text in files.items():
        node = path.partition("/")[0]
        if path.endswith("run_dp_template.sh") or not path.endswith(".sh"):
            continue
        for command in commands(text):
            if command.is_engine:
                yield node, command
                continue
            assert command.words[:2] == ["python", "launch_online_dp.py"]
            its = command.flags
            for i in range(int(its["--dp-size-local"])):
                tp = int(its["--tp-size"])
                words = [
                    ",".join(str(device) for device in range(i * tp, (i + 1) * tp)),
                    str(int(its["--vllm-start-port"]) + i),
                    its["--dp-size"],
                    str(int(its["--dp-rank-start"]) + i),
                    its["--dp-address"],
                    its["--dp-rpc-port"],
                    its["--tp-size"],
                ]
                (rank,) = commands(_with_words(files[f"{node}/run_dp_template.sh"], words))
                yield node, rank


def _with_words(template: str, words: list[str]) -> str:
    return re.sub(r"\$(\d)", lambda match: words[int(match[1]) - 1], template)


def plan_of(name: str, **changes: Any) -> Plan:
    """Return the plan of a topology of configs/topologies, with changed members: `roles__decode__tp=8`."""
    return make_plan(parse_topology(tree_of(name, **changes), name))


def tree_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the topology as the tree in its file, with changed members. `...` removes a member."""
    tree: dict[str, Any] = read_yaml(TOPOLOGIES / f"{name}.yaml", texts="environment")
    for place, value in changes.items():
        *parents, last = place.split("__")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        if value is ...:
            del branch[last]
        else:
            branch[last] = value
    return tree


def files_of(name: str) -> dict[str, str]:
    """Return the rendered files of a topology of configs/topologies."""
    return render_files(plan_of(name))


def gateway_of(files: Mapping[str, str]) -> dict[str, Any]:
    """Return the rendered configuration of the gateway."""
    tree = yaml.safe_load(files["gateway.yaml"])
    assert isinstance(tree, dict)
    return tree
