"""Topologies that would not work, each one change away from one that does, and the sentence that refuses it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.tools.doctor.findings import Severity
from proxy.tools.launch.refusals import find_refusals
from tests.tools.launch.reading import plan_of

GUIDE = "kimi-k2.6-2p2d"
DECODE = "roles__decode__"
DECODERS = f"{DECODE}groups"
BOTH = [{"node": "d0", "ranks": "0-3"}, {"node": "d1", "ranks": "4-7"}]

# The changes, who is refused, and what is said.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "the guide's own lines: eight ranks on a node that has room for four",
        {DECODERS: [[{"node": "d0", "ranks": "0-7"}, {"node": "d1", "ranks": "8-15"}]]},
        "decode d0",
        "wants devices 0-31, and the node has 16: dp 8, tp 4",
    ),
    (
        "the guide's own lines: ranks that do not exist",
        {DECODERS: [[{"node": "d0", "ranks": "0-7"}, {"node": "d1", "ranks": "8-15"}]]},
        "decode group 0",
        "ranks 8 to 15 would be started on d1, and there are 0 to 7 with dp 8",
    ),
    (
        "a node that lacks one device",
        {"nodes__d0__devices": 15},
        "decode d0",
        "wants devices 0-15, and the node has 15: dp 8, tp 4",
    ),
    (
        "ranks that start twice",
        {DECODERS: [[{"node": "d0", "ranks": "0-3"}, {"node": "d1", "ranks": "3-6"}]]},
        "decode group 0",
        "rank 3 would be started twice, on d0 and d1",
    ),
    (
        "a rank that no node starts",
        {DECODERS: [[{"node": "d0", "ranks": "0-3"}, {"node": "d1", "ranks": "4-6"}]]},
        "decode group 0",
        "rank 7 of 8 would not be started, and the others wait for all",
    ),
    (
        "ranks that no node starts, not all of them neighbours",
        {DECODERS: [[{"node": "d0", "ranks": "1-2"}, {"node": "d1", "ranks": "4-4"}]]},
        "decode group 0",
        "ranks 0, 3 and 5 to 7 of 8 would not be started, and the others wait for all",
    ),
    (
        "another address than that of rank 0",
        {DECODERS: [{"nodes": BOTH, "dp_address": "141.0.0.4"}]},
        "decode d0",
        "dp_address is 141.0.0.4, and rank 0 of the group is on node d0, 141.0.0.3",
    ),
    (
        "a meeting place that every node takes for itself",
        {"nodes__d0__address": "127.0.0.1"},
        "decode d1",
        "the ranks would meet at 127.0.0.1, which is every node's own",
    ),
    (
        "a place of the guide that is not filled in",
        {"nodes__d1__address": "141.xx.xx.4"},
        "node d1",
        "has a nic and the address 141.xx.xx.4, which HCCL takes only as an IP address",
    ),
    (
        "launch_online_dp.py for a single rank",
        {"roles__prefill__dp": 1},
        "prefill",
        "dp is 1, with which launch_online_dp.py starts nothing: vLLM takes no --data-parallel-rank then",
    ),
    (
        "two nodes with one address",
        {"nodes__d1__address": "141.0.0.3"},
        "node d1",
        "has the address of node d0, 141.0.0.3",
    ),
    (
        "two groups on the same devices",
        {DECODERS: [["d0", "p1"]]},
        "decode p1",
        "wants devices 0-15, and prefill-1 has 0-15 of that node",
    ),
    (
        "devices that do not suffice",
        {DECODERS: [[{**BOTH[0], "devices": "0-7"}, BOTH[1]]], "launcher": "serve_ranks"},
        "decode d0",
        "has 8 devices, and 4 ranks with tp 4 need 16",
    ),
    (
        "devices that launch_online_dp.py does not take",
        {"nodes__d0__devices": 32, DECODERS: [[{**BOTH[0], "devices": "16-31"}, BOTH[1]]]},
        "decode d0",
        "is to have devices 16-31, and launch_online_dp.py always begins with device 0",
    ),
    (
        "the guide's own lines: a kv_port among those that Mooncake takes",
        {f"{DECODE}kv_port": 30200},
        "node d0",
        "kv_port of decode-0 (30200-30215) would collide with Mooncake's own ports, taken at random (20000-35999)",
    ),
    (
        "a kv_port that reaches into the endpoints",
        {f"{DECODE}kv_port": 7090},
        "node d0",
        "the API of decode-0 (7100-7103) would collide with kv_port of decode-0 (7090-7105)",
    ),
    (
        "a gateway where ranks meet",
        {"gateway__settings": {"listen": {"port": 12321}}},
        "node p0",
        "rpc_port of prefill-0 (12321) would collide with the gateway (12321)",
    ),
    (
        "probes where there is an engine",
        {"gateway__settings": {"admin": {"probe_port": 7102}}},
        "node p0",
        "the API of prefill-0 (7100-7103) would collide with the gateway's admin.probe_port (7102)",
    ),
    (
        "an endpoint of one node where its ranks meet",
        {DECODERS: [[{**BOTH[0], "port": 12320}, BOTH[1]]]},
        "node d0",
        "the API of decode-0 (12320-12323) would collide with rpc_port of decode-0 (12321)",
    ),
    (
        "ports past the end",
        {f"{DECODE}kv_port": 65530},
        "node d0",
        "kv_port of decode-0 (65530-65545) ends behind 65535",
    ),
    (
        "tensor parallel sizes that cannot be joined",
        {f"{DECODE}dp": 4, f"{DECODE}tp": 8},
        "fleet",
        "MooncakeConnectorV1 cannot join prefillers with tp 4 and decoders with tp 8",
    ),
    (
        "tensor parallel sizes of which one is no multiple of the other",
        {f"{DECODE}tp": 3},
        "fleet",
        "MooncakeConnectorV1 cannot join prefillers with tp 4 and decoders with tp 3",
    ),
    (
        "lengths that differ",
        {f"{DECODE}options__max-model-len": 16384},
        "fleet",
        "--max-model-len is 32768 for prefillers and 16384 for decoders: what fits one side is refused by the other",
    ),
    (
        "block sizes that differ",
        {"roles__prefill__options__block-size": 128, f"{DECODE}options__block-size": 64},
        "fleet",
        "--block-size is 128 for prefillers and 64 for decoders: the KV cache travels in blocks",
    ),
    (
        "the guide's own lines: a batch that has no room for its sequences",
        {f"{DECODE}options__max-num-batched-tokens": 4},
        "decode",
        "--max-num-batched-tokens 4 is less than --max-num-seqs 8, with which none starts",
    ),
    (
        "recomputation without a gateway that understands it",
        {"gateway__settings": {"resume": {"mode": "off"}}},
        "decode",
        "with recompute_scheduler_enable decoders break answers off, and resume.mode off does not continue them",
    ),
]


@pytest.mark.parametrize(("changes", "subject", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_topologies_that_cannot_work_are_refused(changes: dict[str, Any], subject: str, words: str) -> None:
    found = find_refusals(plan_of(GUIDE, **changes))
    assert (Severity.FAILURE, subject, words) in [(each.severity, each.subject, each.words) for each in found]
    assert all(each.hint for each in found)


# The changes, and what is said: it works, and not as it should.
WARNED: list[tuple[str, dict[str, Any], str]] = [
    ("a node without work", {"nodes__d2": {"address": "141.0.0.5"}}, "starts nothing"),
    (
        "the guide's own lines: prefillers that guess",
        {"roles__prefill__options__speculative-config": {"num_speculative_tokens": 3}},
        "num_speculative_tokens is 3 for prefillers, which make one token",
    ),
    (
        "the guide's own lines: prefillers with the scheduler of decoders",
        {"roles__prefill__options__additional-config": {"recompute_scheduler_enable": True}},
        "recompute_scheduler_enable is for decoders: older prefillers are less accurate with it, newer ones ignore it",
    ),
]


@pytest.mark.parametrize(("changes", "words"), [row[1:] for row in WARNED], ids=[row[0] for row in WARNED])
def test_topology_that_works_badly_is_a_warning(changes: dict[str, Any], words: str) -> None:
    assert [(each.severity, each.words) for each in find_refusals(plan_of(GUIDE, **changes))] == [
        (Severity.WARNING, words)
    ]


def test_decoder_with_fewer_devices_for_each_rank_is_joined() -> None:
    assert (
        find_refusals(plan_of(GUIDE, roles__decode__dp=16, roles__decode__tp=2, roles__decode__groups=[["d0", "d1"]]))
        == []
    )


# The same of topologies in which every engine does both stages: the topology, the changes, and what is said.
MIXED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "kimi-k2.5-two-nodes",
        {"nodes__n0__address": "::1", "nodes__n1__address": "::2"},
        [
            "the ranks would meet at ::1, which is every node's own",
        ],
    ),
    (
        "kimi-k2.5-two-nodes",
        {"roles__both__groups": [{"nodes": ["n0", "n1"], "dp_address": "141.0.0.9"}]},
        [
            "dp_address is 141.0.0.9, and rank 0 of the group is on node n0, 141.0.0.1",
        ]
        * 2,
    ),
    (
        "kimi-k2.5-two-nodes",
        {"roles__both__rpc_port": 1999},
        [
            "rpc_port of both-0 (1999) would collide with the gateway (1999)",
        ],
    ),
    (
        "kimi-k2-thinking",
        {"options__additional-config": {"recompute_scheduler_enable": True}},
        [
            "recompute_scheduler_enable is for decoders: vLLM-Ascend does not start with it in other roles",
        ],
    ),
    ("kimi-k2-thinking", {"nodes__n0__address": "n0.cluster"}, []),
    ("kimi-k2-thinking", {"nodes__n0__address": "127.0.0.1", "roles__both__dp": 4, "roles__both__tp": 4}, []),
]


@pytest.mark.parametrize(("name", "changes", "words"), MIXED)
def test_fleet_that_hands_nothing_over_is_looked_at_too(name: str, changes: dict[str, Any], words: list[str]) -> None:
    assert [each.words for each in find_refusals(plan_of(name, **changes))] == words
