"""A fleet of simulated engines, started by the rendered commands, is compared with its topology."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.__main__ import main
from proxy.balancer.engines import EngineFacts, EngineIdentity, EngineSetup
from proxy.common.backend import Backend, Role
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.examined import Examined
from proxy.tools.doctor.findings import Finding, Severity, exit_code
from proxy.tools.launch.command import render_files
from proxy.tools.launch.fleet import check_ranks, check_version, compare_with_engines, load_gateway
from proxy.tools.launch.plan import Plan, make_plan
from proxy.tools.launch.topology import parse_topology
from tests.tools.doctor.fleets import examine
from tests.tools.launch.reading import Command, engines, plan_of, tree_of

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", None: "both"}


def on_loopback(name: str, **changes: Any) -> Plan:
    """Return the plan of a topology whose nodes have addresses of this host, in 127.0.0.0/8."""
    tree = tree_of(name, **changes)
    pid = os.getpid()
    for number, node in enumerate(tree["nodes"].values(), start=1):
        node["address"] = f"127.{1 + pid // 256 % 250}.{pid % 256}.{number}"
    tree["gateway"] = {}
    return make_plan(parse_topology(tree, name))


def options_of(command: Command) -> dict[str, Any]:
    """Return the options of a simulated engine for the command of a real one."""
    flags = command.flags
    if "sglang.launch_server" in command.words:
        return {
            "role": flags.get("--disaggregation-mode", "both"),
            "profile_name": "sglang",
            "model": flags.get("--served-model-name", flags["--model-path"]),
            "port": int(flags["--port"]),
            "max_model_len": int(flags["--context-length"]),
            "bootstrap_port": int(flags.get("--disaggregation-bootstrap-port", 0)),
        }
    transfer = flags.get("--kv-transfer-config", {})
    role = _ROLES[transfer.get("kv_role")]
    nixl = {"connector_name": "nixl"} if transfer.get("kv_connector") == "NixlConnector" else {}
    return {
        "role": role,
        "profile_name": "v0.23",
        "model": flags.get("--served-model-name", command.words[2]),
        "port": int(flags["--port"]),
        **{
            name: int(flags[flag])
            for name, flag in (("max_model_len", "--max-model-len"), ("max_num_seqs", "--max-num-seqs"))
            if flag in flags
        },
        "dev_mode": True,
        **nixl,
        **({"protocol": "none"} if role == "both" else {}),
    }


@dataclass
class Looked:
    """The result of the comparison of a fleet."""

    fleet: list[SimulatedEngine]
    findings: list[Finding]

    def told(self, least: Severity = Severity.WARNING) -> list[tuple[str, str]]:
        return sorted((each.check, each.words) for each in self.findings if each.severity >= least)


@asynccontextmanager
async def started(plan: Plan, change: Change = lambda node, options: options) -> AsyncIterator[list[SimulatedEngine]]:
    """Start the engines of the rendered commands with changed options, and none where the options become None."""
    async with AsyncExitStack() as stack:
        fleet = []
        for node, command in engines(render_files(plan)):
            if "--headless" in command.words or int(command.flags.get("--node-rank", 0)) > 0:
                continue
            options = change(node, options_of(command))
            if options is not None:
                engine = SimulatedEngine(host=plan.topology.nodes[node].address, **options)
                fleet.append(await stack.enter_async_context(engine))
        yield fleet


async def looked_at(plan: Plan, change: Change = lambda node, options: options) -> Looked:
    """Return the comparison of a plan with its started engines."""
    async with started(plan, change) as fleet:
        return Looked(fleet, await compare_with_engines(plan, load_gateway(plan, {}, Path()), idle_seconds=0.05))


FLEET = (
    "engine: vllm-ascend\nlauncher: serve_nodes\nmodel: m\nnodes: {n0: {address: 127.0.0.1}}\n"
    "roles: {both: {port: 9, tp: 16, groups: [[n0]]}}\n"
)
"""A node that is not there."""

# By topology: engines by role, where another node's endpoint stands for those that have none.
FLEETS = {
    "kimi-k2-thinking": ["both"],
    "kimi-k2.5-two-nodes": ["both"],
    "kimi-k2.6-1p1d-multimodal": ["prefill"] * 2 + ["decode"] * 16,
    "kimi-k2.6-2p2d": ["prefill"] * 8 + ["decode"] * 8,
    "kimi-k2.6-sglang-1p1d": ["prefill", "decode"],
    "vllm-nixl-1p1d": ["prefill", "decode"],
    "vllm-nixl-4p8d": ["prefill"] * 4 + ["decode"] * 8,
}


@pytest.mark.parametrize("name", FLEETS)
async def test_fleet_that_was_started_by_its_scripts_is_as_its_topology_says(name: str) -> None:
    looked = await looked_at(on_loopback(name))
    assert [engine.options.role for engine in looked.fleet] == FLEETS[name]
    assert looked.told() == []
    well = [each.subject for each in looked.findings if each.severity is Severity.OK]
    roles = [Role.PREFILL if engine.options.role == "prefill" else Role.DECODE for engine in looked.fleet]
    assert well == [f"{role} {each.host}:{each.port}" for role, each in zip(roles, looked.fleet, strict=True)]
    assert exit_code(looked.findings) == 0


@pytest.mark.parametrize("name", ["kimi-k2.6-1p1d", "kimi-k2.6-sglang-1p1d", "vllm-nixl-1p1d"])
async def test_rendered_gateway_hands_over_between_the_rendered_engines(name: str) -> None:
    plan = on_loopback(name)
    async with started(plan) as fleet:
        found = await examine(load_gateway(plan, {}, Path()).settings)
    prefillers, decoders = ([e for e in fleet if e.options.role == role] for role in ("prefill", "decode"))
    pairs = {f"{p.host}:{p.port} → {d.host}:{d.port}" for p in prefillers for d in decoders}
    assert {each.subject for each in found if each.check == "kv"} == pairs
    assert exit_code(found) == 0


def _changed(node: str, port: int, **changes: Any) -> Change:
    """One engine is started with other options."""
    return lambda its, options: options | changes if (its, options["port"]) == (node, port) else options


# How one engine of the fleet differs, and what is said.
DRIFTS: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "another model": (
        _changed("d0", 7100, model="kimi_k25"),
        [("model", "serves 'kimi_k25', and the topology says 'kimi_k26'")],
    ),
    "another length": (
        _changed("p0", 7101, max_model_len=4096),
        [("length", "takes 4096 tokens, and the topology says 16384")],
    ),
    "a longer one": (
        _changed("d0", 7100, max_model_len=32768),
        [("length", "takes 32768 tokens, and the topology says 16384")],
    ),
    "another connector": (
        _changed("d0", 7101, connector_name="nixl"),
        [("connector", "runs NixlConnector, and the topology says MooncakeConnectorV1")],
    ),
    "another role": (_changed("d0", 7100, role="prefill"), [("role", "")]),
    "not started": (
        lambda node, options: None if (node, options["port"]) == ("p0", 7101) else options,
        [("connect", "cannot connect (connection refused)")],
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
async def test_engine_that_differs_is_named(name: str) -> None:
    change, expected = DRIFTS[name]
    looked = await looked_at(on_loopback("kimi-k2.6-1p1d"), change)
    for check, words in expected:
        assert any(check == its and words in said for its, said in looked.told()), looked.told()
    assert len({each.subject for each in looked.findings if each.severity >= Severity.WARNING}) == 1


async def test_engines_that_do_not_tell_their_role_are_a_note() -> None:
    looked = await looked_at(on_loopback("kimi-k2.6-1p1d"), lambda _, options: options | {"dev_mode": False})
    assert looked.told() == []
    notes = looked.told(Severity.NOTE)  # on a busy machine, engines may differ in pace, too
    assert [note for note in notes if note[0] == "role"] == [("role", "4 of 4 engines do not tell role and connector")]


async def test_engines_that_hand_nothing_over_need_not_tell_their_role() -> None:
    looked = await looked_at(on_loopback("kimi-k2-thinking"), lambda _, options: options | {"dev_mode": False})
    assert looked.told(Severity.NOTE) == []


def examined(port: int, **told: Any) -> Examined:
    """Return an engine of the K2.6 topology that has reported this."""
    facts = EngineFacts(identity=EngineIdentity(engine_setup=told.pop("setup", None)))
    return Examined(backend=Backend(Role.DECODE, "141.0.0.3", port, slot=0), facts=facts, **told)


def test_rank_of_another_group_is_named() -> None:
    plan = plan_of("kimi-k2.6-2p2d")
    launch = plan.of("decode")[0]
    found = [
        each.words
        for dp_size in (1, 8, 16)
        for each in check_ranks(examined(7100, setup=EngineSetup(dp_size=dp_size)), launch, plan)
    ]
    assert found == ["is one of 16 data-parallel ranks, and the topology says 8"]


@pytest.mark.parametrize(
    ("version", "is_right"),
    [("0.20.0", True), ("v0.20.1rc1", True), ("0.20", True), ("0.201.0", False), ("0.21.0", False), ("1.0.20", False)],
)
def test_version_is_that_of_the_topology_or_a_patch_of_it(version: str, is_right: bool) -> None:
    plan = plan_of("kimi-k2.6-2p2d", version="0.20")
    assert (not list(check_version(examined(7100, version=version), plan.of("decode")[0], plan))) is is_right


@pytest.mark.parametrize("words", [["check"], ["render", "--check"]], ids=" ".join)
def test_fleet_that_is_not_there_is_a_table_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    assert main(["launch", *words, str(file)]) == 2
    assert "✗ decode 127.0.0.1:9  cannot connect" in capsys.readouterr().out


def test_keys_are_where_the_topology_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET + "gateway: {settings: {auth: {engine_api_key_file: keys/engines}}}\n")
    assert main(["launch", "check", str(file)]) == 2
    assert f"auth.engine_api_key_file {tmp_path}/keys/engines cannot be read: no such file" in capsys.readouterr().err
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "engines").write_text("secret")
    assert main(["launch", "check", str(file)]) == 2
    assert "✗ decode 127.0.0.1:9  cannot connect" in capsys.readouterr().out


def test_refusals_are_reported_before_rendering_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.replace("tp: 16", "tp: 17") + "gateway: {settings: {decode: ['h:1']}}\n")
    for action in ("check", "render"):
        assert main(["launch", action, str(file)]) == 2
        assert "wants devices 0-16, and the node has 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["render", "--json"], "launch render prints no JSON"),
        (["check", "--output", "d"], "launch check writes nothing"),
        (["start"], "invalid choice: 'start'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, "configs/topologies/kimi-k2.6-2p2d.yaml"]) == 2
    assert said in capsys.readouterr().err
