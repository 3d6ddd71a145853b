"""The topologies of published guides give the guides' own commands, but for mistakes of theirs, which are listed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import Settings, load_settings
from proxy.tools.launch.command import files_as_text
from proxy.tools.launch.refusals import find_refusals
from tests.tools.launch.reading import TOPOLOGIES, commands, engines, files_of, flags_of, gateway_of, plan_of

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))
GUIDES = sorted(path.stem for path in (HERE / "guides").glob("*.yaml"))

# By guide: node, place, what the guide says, what is right; None: nothing. The topology files say why.
_PORTS = [
    ("p0", "serve --kv-transfer-config kv_port", "30000", "36000"),
    ("p1", "serve --kv-transfer-config kv_port", "30100", "36100"),
    ("d0", "serve --kv-transfer-config kv_port", "30200", "36200"),
    ("d1", "serve --kv-transfer-config kv_port", "30200", "36200"),
    ("p0", "serve --kv-transfer-config engine_id", "0", None),
    ("p1", "serve --kv-transfer-config engine_id", "1", None),
    ("d0", "serve --kv-transfer-config engine_id", "2", None),
    ("d1", "serve --kv-transfer-config engine_id", "2", None),
    ("p0", "serve --speculative-config num_speculative_tokens", 3, 1),
    ("p1", "serve --speculative-config num_speculative_tokens", 3, 1),
    ("p0", "serve --additional-config", {"recompute_scheduler_enable": True}, None),
    ("p1", "serve --additional-config", {"recompute_scheduler_enable": True}, None),
]
CORRECTIONS: dict[str, list[tuple[str, str, Any, Any]]] = {
    "kimi-k2.5-2p2d": _PORTS,
    "kimi-k2.6-2p2d": [
        *_PORTS,
        ("d0", "launcher --dp-size-local", "8", "4"),
        ("d1", "launcher --dp-size-local", "8", "4"),
        ("d1", "launcher --dp-rank-start", "8", "4"),
        ("d1", "serve --max-num-batched-tokens", "4", "32"),
        ("d1", "environment HCCL_BUFFSIZE", "1100", "800"),
    ],
    "vllm-nixl-2p2d": [
        correction
        for node in ("p0", "p1", "d0", "d1")
        for correction in (
            (node, "serve --kv-transfer-config kv_load_failure_policy", "fail", None),
            (node, "serve --enable-prompt-tokens-details", None, True),
        )
    ],
    "kimi-k2.6-sglang-1p1d": [
        ("p0", "serve --node-rank", "0", None),
        ("p0", "serve --nnodes", "1", None),
        ("d0", "serve --node-rank", "0", None),
        ("d0", "serve --nnodes", "1", None),
        ("d0", "serve --dist-init-addr", "141.0.0.2:5000", None),
        ("d0", "serve --dp-size", "1", None),
        ("p0", "serve --context-length", None, "68000"),
        ("d0", "serve --context-length", None, "68000"),
        ("p0", "serve --served-model-name", None, "kimi_k26"),
        ("d0", "serve --served-model-name", None, "kimi_k26"),
    ],
}


def guide_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the facts of the guide about each node, corrected."""
    told = yaml.safe_load((HERE / "guides" / f"{name}.yaml").read_text())
    found = {node: _facts(its) for node, its in told.items() if node != "proxy"}
    for node, place, wrong, right in CORRECTIONS.get(name, []):
        *parents, last = place.split()
        branch = found[node]
        for parent in parents:
            branch = branch[parent]
        assert branch.pop(last, None) == wrong, f"{name}, {node}: the guide does not say {place} {wrong}"
        branch |= {} if right is None else {last: right}
    return found


def _facts(told: Mapping[str, Any]) -> dict[str, Any]:
    words = [word for flag, value in told["serve"].items() for word in (flag, value) if word is not True]
    launcher = {"launcher": flags_of(told["online_dp"].split())} if "online_dp" in told else {}
    model: dict[str, Any] = {"model": told["model"]} if "model" in told else {}
    return {**model, "serve": flags_of(words), "environment": told["environment"], **launcher}


def rendered_for(name: str) -> dict[str, dict[str, Any]]:
    """Return the same facts about the rendered files."""
    found: dict[str, dict[str, Any]] = {}
    for path, text in files_of(name).items():
        node, _, file = path.partition("/")
        for command in commands(text) if file else ():
            if command.is_engine:
                facts: dict[str, Any] = {"serve": command.flags, "environment": dict(command.environment)}
                facts |= {"model": command.words[2]} if command.words[0] == "vllm" else {}
            else:
                facts = {"launcher": command.flags}
            found.setdefault(node, {}).update(facts)
    return found


@pytest.mark.parametrize("name", GUIDES)
def test_topology_gives_the_guides_own_commands(name: str) -> None:
    assert rendered_for(name) == guide_of(name)


@pytest.mark.parametrize("name", [name for name in GUIDES if "2p2d" in name])
def test_gateway_has_the_engines_of_the_guides_proxy_line(name: str) -> None:
    line = yaml.safe_load((HERE / "guides" / f"{name}.yaml").read_text())["proxy"]
    theirs, ours = load_settings(line.split(), {}).settings, Settings.model_validate(gateway_of(files_of(name)))
    assert (ours.prefill, ours.decode, ours.listen) == (theirs.prefill, theirs.decode, theirs.listen)


# Where a guide has a table and no commands: tp, dp and --max-model-len, by node.
TABLES = {
    "kimi-k2.6-1p1d": {"p0": (8, 2, 16384), "d0": (8, 2, 16384)},
    "kimi-k2.6-1p1d-multimodal": {"p0": (8, 2, 16384), "d0": (1, 16, 16384)},
}


@pytest.mark.parametrize("name", TABLES)
def test_topology_has_the_sizes_of_the_guides_table(name: str) -> None:
    found: dict[str, set[tuple[int, ...]]] = {}
    devices: dict[str, list[str]] = {}
    for node, command in engines(files_of(name)):
        flags = ("--tensor-parallel-size", "--data-parallel-size", "--max-model-len")
        found.setdefault(node, set()).add(tuple(int(command.flags[flag]) for flag in flags))
        devices.setdefault(node, []).extend(command.environment["ASCEND_RT_VISIBLE_DEVICES"].split(","))
        assert command.flags["--speculative-config"]["num_speculative_tokens"] == (3 if node == "d0" else 1)
    assert found == {node: {sizes} for node, sizes in TABLES[name].items()}
    assert devices == {node: [str(device) for device in range(16)] for node in ("p0", "d0")}


# Examples of this project. Tests of docs/engines/ compare them with real engines.
OWN = {
    *("sglang-1p1d", "vllm-ascend-1p1d", "vllm-mooncake-1p1d", "vllm-nixl-1p1d", "vllm-nixl-4p8d"),
    *("vllm-nixl-push-1p1d", "vllm-store-1p1d"),
}


def test_every_topology_is_held_against_its_guide() -> None:
    assert {*NAMES} == {*GUIDES, *TABLES, *OWN}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_topology_is_not_refused_and_nothing_is_to_be_said_of_it(name: str) -> None:
    assert find_refusals(plan_of(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_rendered_files_equal_the_recorded_ones(name: str) -> None:
    """After a change that is meant: `pdproxy launch render configs/topologies/X.yaml > golden/X.txt`."""
    assert files_as_text(files_of(name)) == (HERE / "golden" / f"{name}.txt").read_text()
