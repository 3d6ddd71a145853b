"""Plain vLLM: ports, devices and ranks from one host to several, and refusals, for each of its connectors."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from proxy.settings import Settings
from proxy.tools.doctor.findings import Severity
from proxy.tools.launch.command import render_files
from proxy.tools.launch.refusals import find_refusals
from tests.tools.launch.reading import engines, files_of, gateway_of, plan_of

SMALL, GUIDE, LARGE = "vllm-nixl-1p1d", "vllm-nixl-2p2d", "vllm-nixl-4p8d"
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
# Decoders with four ranks on two hosts.
WIDE: dict[str, Any] = {"roles__decode__groups": [["d0", "d1"]], "roles__decode__dp": 4, "roles__decode__tp": 4}


@pytest.mark.parametrize(("name", "prefillers", "decoders"), [(SMALL, 1, 1), (GUIDE, 2, 2), (LARGE, 4, 8)])
def test_every_engine_has_its_side_channel_devices_and_endpoint(name: str, prefillers: int, decoders: int) -> None:
    plan, files = plan_of(name), files_of(name)
    found: dict[str, list[Any]] = defaultdict(list)
    devices: dict[str, list[str]] = defaultdict(list)
    for node, command in engines(files):
        assert command.environment[HOST] == plan.topology.nodes[node].address
        found[node] += [command.environment[PORT], command.flags["--port"]]
        every = ",".join(map(str, range(plan.topology.nodes[node].devices)))
        devices[node] += command.environment.get("CUDA_VISIBLE_DEVICES", every).split(",")
    assert [ports for ports in found.values() if len(ports) != len({*ports})] == []
    for node, used in devices.items():
        assert sorted(map(int, used)) == [*range(plan.topology.nodes[node].devices)]
    settings = Settings.model_validate(gateway_of(files))
    assert (settings.connector, len(settings.prefill), len(settings.decode)) == ("vllm_pull", prefillers, decoders)


def test_roles_and_extra_options_are_in_the_transfer_config() -> None:
    transfers = {node: command.flags["--kv-transfer-config"] for node, command in engines(files_of(LARGE))}
    assert transfers["p0"] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    assert transfers["d3"]["kv_role"] == "kv_consumer"


def test_ranks_of_a_group_on_two_hosts_have_one_endpoint() -> None:
    files = render_files(plan_of(GUIDE, **WIDE))
    found = {node: command for node, command in engines(files) if node.startswith("d")}
    flags = ("--data-parallel-size", "--data-parallel-size-local", "--data-parallel-address", "--tensor-parallel-size")
    values = [[command.flags[flag] for flag in flags] for command in found.values()]
    assert values == [["4", "2", "10.0.0.3", "4"]] * 2
    assert ("--headless" in found["d0"].flags, "--headless" in found["d1"].flags) == (False, True)
    assert [found[node].environment[HOST] for node in ("d0", "d1")] == ["10.0.0.3", "10.0.0.4"]
    assert gateway_of(files)["decode"] == ["10.0.0.3:8000"]


def test_gateway_names_the_ranks_of_prefillers_that_push() -> None:
    wide = {"connector": "NixlPushConnector", "roles__prefill__dp": 2, "roles__prefill__tp": 4}
    files = render_files(plan_of(GUIDE, **wide))
    assert {command.flags["--kv-transfer-config"]["kv_connector"] for _, command in engines(files)} == {
        "NixlPushConnector"
    }
    assert all(command.environment[PORT] for _, command in engines(files))
    gateway = gateway_of(files)
    assert (gateway["connector"], gateway["balance"]) == ("nixl_push", {"prefill_dp_ranks": 2})
    assert "balance" not in gateway_of(render_files(plan_of(GUIDE, launcher="serve_ranks", **wide)))


def test_rank_with_a_separate_endpoint_sees_its_devices() -> None:
    files = render_files(plan_of(GUIDE, launcher="serve_ranks", **WIDE))
    found = [
        (command.environment["CUDA_VISIBLE_DEVICES"], command.flags["--port"], command.flags["--data-parallel-rank"])
        for node, command in engines(files)
        if node == "d1"
    ]
    assert found == [("0,1,2,3", "8000", "2"), ("4,5,6,7", "8001", "3")]
    assert gateway_of(files)["decode"] == ["10.0.0.3:8000-8001", "10.0.0.4:8000-8001"]


def test_interface_and_address_are_those_of_the_node() -> None:
    (command,) = [command for node, command in engines(files_of(LARGE)) if node == "d2"][:1]
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [command.environment[name] for name in names] == ["10.0.0.5", "eth0", "eth0"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        SMALL,
        {"roles__decode__kv_port": 5600},
        "node n0",
        "kv_port of prefill-0 (5600) would collide with kv_port of decode-0 (5600)",
    ),
    (
        GUIDE,
        {"launcher": "serve_ranks", "roles__decode__kv_port": 7999, **WIDE},
        "node d0",
        "the API of decode-0 (8000-8001) would collide with kv_port of decode-0 (7999-8000)",
    ),
    (SMALL, {"nodes__n0__devices": 1}, "decode n0", "wants devices 1, and the node has 1: dp 1, tp 1"),
    (GUIDE, {"roles__prefill__tp": 16}, "prefill p0", "wants devices 0-15, and the node has 8: dp 1, tp 16"),
    (
        GUIDE,
        {"roles__prefill__tp": 6, "roles__decode__tp": 4},
        "fleet",
        "NixlConnector cannot join prefillers with tp 6 and decoders with tp 4",
    ),
    (
        GUIDE,
        {"roles__prefill__options__dtype": "float16"},
        "fleet",
        "--dtype is float16 for prefillers and not set for decoders: NixlConnector rejects the handoff between them",
    ),
    (
        SMALL,
        {"roles__decode__options__max-model-len": 8192},
        "fleet",
        "--max-model-len is 32768 for prefillers and 8192 for decoders: what fits one side is refused by the other",
    ),
]


@pytest.mark.parametrize(("name", "changes", "subject", "words"), REFUSED, ids=[row[3] for row in REFUSED])
def test_topology_that_cannot_work_is_refused(name: str, changes: dict[str, Any], subject: str, words: str) -> None:
    found = [(each.severity, each.subject, each.words) for each in find_refusals(plan_of(name, **changes))]
    assert (Severity.FAILURE, subject, words) in found


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 4), (8, 8)])
def test_tensor_parallel_sizes_may_be_multiples_in_both_directions(prefill: int, decode: int) -> None:
    assert find_refusals(plan_of(GUIDE, roles__prefill__tp=prefill, roles__decode__tp=decode)) == []


def without_kv_ports(connector: str, **changes: Any) -> dict[str, Any]:
    """Return the changes to SMALL for a connector without side channels."""
    return {"connector": connector, "roles__prefill__kv_port": ..., "roles__decode__kv_port": ..., **changes}


def test_prefillers_with_mooncake_have_a_bootstrap_port_that_the_gateway_knows() -> None:
    files = render_files(plan_of(SMALL, **without_kv_ports("MooncakeConnector", roles__prefill__bootstrap_port=8999)))
    prefill, decode = (command for _, command in engines(files))
    assert prefill.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8999"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in decode.environment
    assert {HOST, PORT}.isdisjoint(prefill.environment)
    tree = gateway_of(files)
    assert (tree["connector"], tree["prefill"]) == ("mooncake_bootstrap", ["10.0.0.1:8100 8999"])
    assert Settings.model_validate(tree).prefill[0].bootstrap_port == 8999


def test_bootstrap_port_of_a_prefiller_collides_with_that_of_another() -> None:
    changes = without_kv_ports("MooncakeConnector", nodes__n0__devices=3)
    groups = [["n0"], [{"node": "n0", "port": 8101}]]
    found = [finding.words for finding in find_refusals(plan_of(SMALL, roles__prefill__groups=groups, **changes))]
    assert "bootstrap_port of prefill-0 (8998) would collide with bootstrap_port of prefill-1 (8998)" in found


def test_both_roles_read_and_write_a_store() -> None:
    files = render_files(plan_of(SMALL, **without_kv_ports("MooncakeStoreConnector")))
    transfers = [command.flags["--kv-transfer-config"] for _, command in engines(files)]
    sockets = [transfer.pop("kv_connector_extra_config") for transfer in transfers]
    assert sockets == [{"lookup_rpc_port": 8100}, {"lookup_rpc_port": 8200}]
    assert transfers == 2 * [
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ]
    assert gateway_of(files)["connector"] == "vllm_store"


def test_different_tensor_parallel_sizes_need_a_common_layout_of_mooncakes_store() -> None:
    changes = without_kv_ports(
        "MooncakeStoreConnector", nodes__n0__devices=6, roles__prefill__tp=4, roles__decode__tp=2
    )
    (found,) = find_refusals(plan_of(SMALL, **changes))
    assert (found.severity, found.hint) == (Severity.WARNING, "set connector_options: {store_tp_size: 4}")
    assert "prefillers have tp 4, decoders tp 2" in found.words
    assert find_refusals(plan_of(SMALL, **changes, connector_options={"store_tp_size": 4})) == []
