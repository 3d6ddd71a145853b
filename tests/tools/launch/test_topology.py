"""The topology file: its valid content, and the sentence for an invalid one."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.__main__ import main
from proxy.tools.launch.topology import read_topology
from tests.tools.launch.reading import TOPOLOGIES

LEAST = """\
engine: vllm-ascend
launcher: serve_nodes
model: some/model
nodes:
  n0: {address: 10.0.0.1, devices: 8}
roles:
  both: {port: 8000, tp: 8, groups: [[n0]]}
"""
PLAIN = LEAST.replace("vllm-ascend", "vllm")
SPLIT = PLAIN.replace(
    "both: {port: 8000, tp: 8, groups: [[n0]]}",
    "prefill: {port: 1, groups: [[n0]]}\n  decode: {port: 2, groups: [[n0]]}",
)
SGLANG = LEAST.replace("vllm-ascend", "sglang").replace("launcher: serve_nodes\n", "")

MISTAKES = [
    ("", "must hold a topology"),
    (LEAST + "rolls: {}\n", "rolls is not an option of a topology"),
    (LEAST.replace("serve_nodes", "serve"), "launcher must be 'launch_online_dp', 'serve_ranks' or 'serve_nodes'"),
    (LEAST.replace("launcher: serve_nodes\n", ""), "launcher must be launch_online_dp, serve_ranks or serve_nodes"),
    (LEAST.replace("vllm-ascend", "sglang"), "launcher must be launch_online_dp, serve_ranks or serve_nodes"),
    (LEAST.replace("[[n0]]", "[[n1]]"), "there is no node 'n1': nodes has n0"),
    (LEAST.replace("n0", "../n0"), "'../n0' is not a valid node name"),
    (LEAST.replace("both", "prefill"), "roles must be prefill and decode, or both alone"),
    (LEAST.replace("tp: 8", "tp: 0"), "roles.both.tp must be greater than or equal to 1"),
    (LEAST.replace("tp: 8", "dp: 3").replace("[[n0]]", "[[n0, n0]]"), "3 ranks cannot be dealt out evenly to 2 nodes"),
    (LEAST.replace("[[n0]]", "[[{node: n0, ranks: 1-0}]]"), "must not end before it begins"),
    (LEAST.replace("[[n0]]", "[[{node: n0, ranks: all}]]"), "must be a number or a span like 0-7"),
    (LEAST + "connector: MooncakeConnectorV1\n", "engines of role both hand nothing over"),
    (LEAST + "options: {enable-expert-parallel: false}\n", "must not be false: leave it out"),
    (LEAST.replace("tp: 8", "bootstrap_port: 1"), "bootstrap_port has no effect for engine vllm-ascend"),
    (SGLANG.replace("[[n0]]", "[[{node: n0, ranks: 0-1}]]"), "ranks has no effect for engine sglang"),
    (SGLANG + "connector: MooncakeConnectorV1\n", "connector has no effect for engine sglang"),
    (
        LEAST + "gateway: {settings: {decode: [a:1]}}\n",
        "gateway.settings: decode follows from the rest of the topology",
    ),
    (LEAST + "options: {--seed: 1}\n", "'--seed' must be a flag without its dashes"),
    (LEAST + "options: {port: 1}\n", "--port follows from the rest of the file"),
    (LEAST + "environment: {ASCEND_RT_VISIBLE_DEVICES: 0}\n", "follows from the nodes and ports"),
    (PLAIN + "environment: {VLLM_NIXL_SIDE_CHANNEL_PORT: 1}\n", "follows from the nodes and ports"),
    (PLAIN.replace("serve_nodes", "launch_online_dp"), "launch_online_dp is a script of vllm-ascend"),
    (PLAIN.replace("tp: 8", "bootstrap_port: 1"), "bootstrap_port has no effect for engine vllm"),
    (PLAIN.replace("[[n0]]", "[[{node: n0, engine_id: 1}]]"), "engine_id has no effect for engine vllm"),
    (
        SPLIT + "connector: P2pNcclConnector\n",
        "connector must be NixlConnector, NixlPushConnector, MooncakeConnector or that of a KV store",
    ),
    (SPLIT + "connector: NixlConnector\n", "prefill needs a kv_port"),
    (
        SPLIT.replace("port: 1,", "port: 1, bootstrap_port: 3,") + "connector: NixlConnector\n",
        "bootstrap_port has no effect for engine vllm with connector NixlConnector",
    ),
    (
        SPLIT.replace("port: 1,", "port: 1, kv_port: 3,") + "connector: MooncakeConnector\n",
        "kv_port has no effect for engine vllm with connector MooncakeConnector",
    ),
    (
        SPLIT.replace("port: 1,", "port: 1, dp: 2,").replace("serve_nodes", "serve_ranks")
        + "connector: MooncakeConnector\n",
        "MooncakeConnector has one bootstrap port for all ranks of a node: take launcher serve_nodes",
    ),
    (LEAST + "environment: {A-B: 1}\n", "'A-B' is not a valid name of a variable"),
    (LEAST + 'prepare: ["a\\nb"]\n', "must be one line of text"),
    (LEAST + "gateway: {settings: {listen: {port: many}}}\n", "gateway.settings: listen.port must be a valid integer"),
    (LEAST + "gateway: {settings: {lisen: {}}}\n", "lisen"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistake_is_one_sentence(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    assert main(["launch", "render", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert len(told.err.splitlines()) == 1


def test_variables_are_what_is_written_and_not_what_yaml_makes_of_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(LEAST + "environment: {A: 4:8, B: off, C: 010, D: 1e3, E: null, F: '2'}\n")
    assert read_topology(file).environment == {"A": "4:8", "B": "off", "C": "010", "D": "1e3", "E": "null", "F": "2"}


def test_files_are_written_for_each_node_and_scripts_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "render", "--output", str(tmp_path), str(TOPOLOGIES / "kimi-k2.6-2p2d.yaml")]) == 0
    files = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o111 for path in tmp_path.rglob("*.*")}
    nodes = {"p0": "prefill-0", "p1": "prefill-1", "d0": "decode-0", "d1": "decode-0"}
    scripts = [f"{node}/{name}.sh" for node, its in nodes.items() for name in (its, "run_dp_template")]
    assert files == {**dict.fromkeys(scripts, 0o111), "gateway.yaml": 0}
    assert len(capsys.readouterr().out.splitlines()) == len(files)


def test_refused_topology_writes_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(LEAST.replace("devices: 8", "devices: 4"))
    assert main(["launch", "render", "--output", str(tmp_path / "out"), str(file)]) == 2
    assert not (tmp_path / "out").exists()
    error = "pdproxy launch: error: both n0: wants devices 0-7, and the node has 4: dp 1, tp 8 "
    assert capsys.readouterr().err.startswith(error)
