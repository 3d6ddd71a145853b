"""SGLang on several nodes: one endpoint and one meeting place for each group."""

from __future__ import annotations

from proxy.tools.launch.command import render_files
from proxy.tools.launch.refusals import find_refusals
from tests.tools.launch.reading import engines, gateway_of, plan_of

GUIDE = "kimi-k2.6-sglang-1p1d"
TWO = {"nodes__d1": {"address": "141.0.0.3"}, "roles__decode__groups": [["d0", "d1"]], "roles__decode__rpc_port": 5000}


def test_group_of_two_nodes_meets_at_the_first_and_has_its_endpoint_there() -> None:
    files = render_files(plan_of(GUIDE, roles__decode__tp=32, **TWO))
    decoders = {node: command.flags for node, command in engines(files) if node.startswith("d")}
    names = ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size", "--port")
    assert {node: [flags[name] for name in names] for node, flags in decoders.items()} == {
        "d0": ["2", "0", "141.0.0.2:5000", "32", "8001"],
        "d1": ["2", "1", "141.0.0.2:5000", "32", "8001"],
    }
    assert gateway_of(files)["decode"] == ["141.0.0.2:8001"]


def test_ranks_share_the_devices_of_tp_only_with_data_parallel_attention() -> None:
    assert find_refusals(plan_of(GUIDE, roles__decode__dp=2)) == []
    (found,) = find_refusals(plan_of(GUIDE, roles__prefill__dp=2))
    assert (found.subject, found.words) == ("prefill p0", "wants devices 0-31, and the node has 16: dp 2, tp 16")


def test_prefiller_and_decoder_may_share_a_node() -> None:
    shared = {"nodes": {"p0": {"address": "141.0.0.1"}}, "roles__decode__groups": [["p0"]]}
    plan = plan_of(GUIDE, roles__prefill__tp=8, roles__decode__tp=8, **shared)
    assert find_refusals(plan) == []
    devices = [command.environment["ASCEND_RT_VISIBLE_DEVICES"] for _, command in engines(render_files(plan))]
    assert devices == ["0,1,2,3,4,5,6,7", "8,9,10,11,12,13,14,15"]


def test_ports_behind_the_meeting_place_are_taken() -> None:
    found = find_refusals(plan_of(GUIDE, roles__decode__tp=32, **TWO | {"roles__decode__rpc_port": 7997}))
    assert [each.words for each in found] == [
        "the API of decode-0 (8001) would collide with rpc_port of decode-0 (7997-8002)"
    ]


def test_bootstrap_server_has_a_separate_port() -> None:
    (found,) = find_refusals(plan_of(GUIDE, roles__prefill__bootstrap_port=8000))
    assert found.words == "the API of prefill-0 (8000) would collide with bootstrap_port of prefill-0 (8000)"
