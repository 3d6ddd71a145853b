"""Rendered options of single nodes and roles, which the guides do not have."""

from __future__ import annotations

from typing import Any

from proxy.settings import Settings
from proxy.tools.launch.command import render_files
from proxy.tools.launch.refusals import find_refusals
from tests.tools.launch.reading import Flags, engines, gateway_of, plan_of

GUIDE = "kimi-k2.6-2p2d"


def flags_on(node: str, name: str, **changes: Any) -> list[Flags]:
    """Return the options of the engines that a node starts."""
    files = render_files(plan_of(name, **changes))
    return [command.flags for its, command in engines(files) if its == node]


def test_node_has_its_own_ports_before_those_of_its_role() -> None:
    d1 = {"node": "d1", "ranks": "4-7", "port": 8100, "kv_port": 40000}
    groups = [[{"node": "d0", "ranks": "0-3"}, d1]]
    engines_of = {node: flags_on(node, GUIDE, roles__decode__groups=groups) for node in ("d0", "d1")}
    assert {node: [flags["--port"] for flags in its] for node, its in engines_of.items()} == {
        "d0": ["7100", "7101", "7102", "7103"],
        "d1": ["8100", "8101", "8102", "8103"],
    }
    assert [its[0]["--kv-transfer-config"]["kv_port"] for its in engines_of.values()] == ["36200", "40000"]
    tree = gateway_of(render_files(plan_of(GUIDE, roles__decode__groups=groups)))
    assert tree["decode"] == ["141.0.0.3:7100-7103", "141.0.0.4:8100-8103"]


def test_role_takes_a_common_option_away_with_null() -> None:
    changes = {"roles__decode__options__seed": None, "roles__prefill__options__seed": 7}
    assert [flags_on(node, GUIDE, **changes)[0].get("--seed") for node in ("p0", "d0")] == ["7", None]


def test_single_rank_has_no_address_for_other_ranks() -> None:
    changes: dict[str, Any] = {"launcher": "serve_ranks", "roles__prefill__dp": 1, "roles__prefill__tp": 16}
    (flags,) = flags_on("p0", GUIDE, **changes)
    assert [flag for flag in flags if "data-parallel" in flag] == []
    assert flags["--kv-transfer-config"]["kv_connector_extra_config"]["prefill"] == {"dp_size": 1, "tp_size": 16}


def test_engines_of_one_node_each_have_their_devices() -> None:
    groups = [["n0"], [{"node": "n0", "port": 8001}]]
    plan = plan_of("kimi-k2-thinking", roles__both__tp=8, roles__both__groups=groups)
    assert find_refusals(plan) == []
    found = [
        (command.environment["ASCEND_RT_VISIBLE_DEVICES"], command.flags["--port"])
        for _, command in engines(render_files(plan))
    ]
    assert found == [("0,1,2,3,4,5,6,7", "8000"), ("8,9,10,11,12,13,14,15", "8001")]
    assert gateway_of(render_files(plan))["decode"] == ["141.0.0.1:8000", "141.0.0.1:8001"]


def test_ipv6_address_is_in_brackets_where_a_port_follows() -> None:
    nodes = {"p0": {"address": "2001:db8::1"}, "d0": {"address": "2001:db8::2"}, "d1": {"address": "2001:db8::3"}}
    more: dict[str, Any] = {"roles__decode__groups": [["d0", "d1"]], "roles__decode__tp": 32}
    files = render_files(plan_of("kimi-k2.6-sglang-1p1d", nodes=nodes, **more))
    settings = Settings.model_validate(gateway_of(files))
    assert [endpoint.host for endpoint in (*settings.prefill, *settings.decode)] == ["2001:db8::1", "2001:db8::2"]
    meeting = [command.flags.get("--dist-init-addr") for _, command in engines(files)]
    assert meeting == [None, "[2001:db8::2]:12321", "[2001:db8::2]:12321"]
