"""Mistakes of operators, each in an otherwise healthy fleet: the doctor reports each of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from proxy import SERVER
from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Backend, Role
from proxy.observe.metrics import Metrics
from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.engine import check_engines
from proxy.tools.doctor.examination import EngineAsker
from proxy.tools.doctor.examined import Fleet
from proxy.tools.doctor.findings import Severity
from proxy.upstream import AddressRules, EngineClient, HostNames
from tests.tools.doctor.fleets import Mistake, examine, examined, web_server

WARNING = Severity.WARNING


def fault(action: str, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"faults": [{"action": action, "path": path, **more}]}


def _at(role: str, *addresses: str) -> Any:
    """Configure these addresses for a role, instead of the engines."""
    return lambda prefillers, decoders: {role: list(addresses)}


def _by_two_addresses(prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine]) -> dict[str, Any]:
    return {"prefill": [f"127.0.0.{number}:{prefillers[0].port}" for number in (1, 2)]}


_WITHOUT_TOOLS = fault(
    "refuse_status",
    "/v1/chat",
    status=400,
    body={
        "error": {"message": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'}
    },
    times=1,
)
"""The answer of vLLM to a chat with tools."""


def _wrong_bootstrap(prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine]) -> dict[str, Any]:
    return {"prefill": [f"127.0.0.1:{prefillers[0].port} 9"]}


MISTAKES = [
    # Of single engines
    Mistake(
        "a host name that does not exist", "name", "nowhere.invalid:7100", places=_at("prefill", "nowhere.invalid:7100")
    ),
    Mistake("nothing listens there", "connect", "127.0.0.1:9", places=_at("decode", "127.0.0.1:9")),
    Mistake("a dead engine core", "health", "D0", decoders=[fault("refuse_status", "/health", status=503)]),
    Mistake(
        "an engine that hangs",
        "health",
        "P0",
        prefillers=[fault("hang_before_headers", "/health")],
        settings={"health": {"timeout_seconds": 0.2}},
    ),
    Mistake("another health path", "health", "P0", settings={"health": {"path": "/healthy"}}),
    Mistake("no key for the engines", "key", "D0", WARNING, decoders=[{"api_key": "sk-engine"}]),
    Mistake(
        "a wrong key for the engines",
        "key",
        "P0",
        prefillers=[{"api_key": "sk-engine"}],
        settings={"auth": {"engine_api_key": "sk-other"}},
    ),
    Mistake("models are not listed", "models", "D0", decoders=[fault("refuse_status", "/v1/models", status=500)]),
    Mistake("no model is listed", "models", "D0", decoders=[fault("refuse_status", "/v1/models", status=200, body={})]),
    Mistake("SGLang behind vLLM's connector", "connector", "D0", decoders=[{"profile_name": "sglang"}]),
    Mistake(
        "vLLM behind SGLang's connector",
        "connector",
        "P0",
        connector="sglang_bootstrap",
        prefillers=[{"profile_name": "v0.30"}],
    ),
    Mistake("a prefiller without KV connector", "connector", "P0", prefillers=[{"protocol": "none", "dev_mode": True}]),
    Mistake(
        "an unsupported KV connector",
        "connector",
        "D0",
        decoders=[{"protocol": "layerwise", "dev_mode": True}],
    ),
    Mistake("a decoder given as a prefiller", "role", "P0", prefillers=[{"role": "decode", "dev_mode": True}]),
    Mistake(
        "SGLang's decoder given as a prefiller",
        "role",
        "P0",
        connector="sglang_bootstrap",
        prefillers=[{"role": "decode"}],
    ),
    Mistake(
        "a wrong bootstrap port of SGLang", "bootstrap", "P0", connector="sglang_bootstrap", places=_wrong_bootstrap
    ),
    Mistake(
        "a wrong bootstrap port of Mooncake", "bootstrap", "P0", connector="mooncake_bootstrap", places=_wrong_bootstrap
    ),
    Mistake("a clock that goes wrong", "clock", "D0", WARNING, decoders=[{"clock_offset_seconds": 90.0}]),
    Mistake("connections are closed at once", "keep-alive", "P0", WARNING, prefillers=[{"keep_alive_seconds": 0.01}]),
    Mistake("no metrics", "metrics", "D0", WARNING, decoders=[fault("refuse_status", "/metrics", status=404)]),
    Mistake(
        "the version is not reported",
        "version",
        "D0",
        WARNING,
        decoders=[fault("refuse_status", "/version", status=404)],
    ),
    Mistake(
        "a limit above that of the engine",
        "limit",
        "D0",
        WARNING,
        decoders=[{"dev_mode": True, "max_num_seqs": 16}],
        settings={"admission": {"max_running_decode": 64}},
    ),
    Mistake(
        "kv.pin_seconds is longer than the lease",
        "lease",
        "P0",
        engine={"connector_name": "nixl", "dev_mode": True},
        prefillers=[{"pin_seconds": 20.0}],
        settings={"kv": {"pin_seconds": 480}},
    ),
    Mistake(
        "the lease is shorter than the default",
        "lease",
        "P0",
        WARNING,
        engine={"profile_name": "v0.33", "dev_mode": True},
        prefillers=[{"pin_seconds": 20.0}],
    ),
    Mistake(
        "answers are kept for prefillers",
        "read-back",
        "D0",
        WARNING,
        engine={"profile_name": "v0.33", "dev_mode": True},
        decoders=[{"bidirectional_kv_xfer": True}],
    ),
    # Of engines beside each other
    Mistake("another model", "model", "D0", decoders=[{"model": "other"}]),
    Mistake("another --max-model-len", "length", "D1", WARNING, decoders=[{}, {"max_model_len": 8192}]),
    Mistake(
        "another version",
        "version",
        "D1",
        WARNING,
        decoders=[{}, {"profile_name": "v0.33", "connector_name": "mooncake"}],
    ),
    Mistake(
        "NIXL here and Mooncake there",
        "connector",
        "D1",
        engine={"dev_mode": True},
        decoders=[{}, {"connector_name": "nixl"}],
    ),
    Mistake(
        "one engine by two addresses",
        "duplicate",
        "P0 by another address",
        engine={"dev_mode": True},
        prefillers=[{"host": "0.0.0.0"}],
        places=_by_two_addresses,
    ),
    Mistake(
        "one engine by two addresses, without development mode",
        "duplicate",
        "P0 by another address",
        Severity.NOTE,
        prefillers=[{"host": "0.0.0.0"}],
        places=_by_two_addresses,
    ),
    Mistake(
        "another limit in one role",
        "options",
        "D1",
        WARNING,
        engine={"dev_mode": True},
        decoders=[{}, {"max_num_seqs": 4}, {}],
    ),
    Mistake(
        "a decoder without a reasoning parser",
        "options",
        "D0",
        WARNING,
        engine={"dev_mode": True},
        decoders=[{"reasoning_parser": ""}, {}, {}],
    ),
    Mistake(
        "a decoder of SGLang without a parser of tool calls",
        "options",
        "D2",
        WARNING,
        connector="sglang_bootstrap",
        engine={"tool_call_parser": "kimi_k2"},
        decoders=[{}, {}, {"tool_call_parser": ""}],
    ),
    Mistake(
        "a prefiller without a parser of tool calls", "parsers", "P1", WARNING, prefillers=[{}, _WITHOUT_TOOLS, {}]
    ),
    Mistake("a decoder without a parser of tool calls", "parsers", "D0", WARNING, decoders=[_WITHOUT_TOOLS, {}, {}]),
    Mistake(
        "a decoder without a reasoning parser, without development mode",
        "parsers",
        "D0",
        WARNING,
        decoders=[{"reasoning_parser": ""}, {}, {}],
    ),
    Mistake(
        "ranks that get no requests",
        "ranks",
        "P0",
        WARNING,
        prefillers=[{"dp_size": 4}],
        settings={"balance": {"prefill_dp_ranks": 2}},
    ),
    Mistake("ranks that do not exist", "ranks", "D0", settings={"balance": {"decode_dp_ranks": 4}}),
    Mistake(
        "bodies shorter than the context",
        "body",
        "D0",
        WARNING,
        decoders=[{"max_model_len": 131_072}],
        prefillers=[{"max_model_len": 4096}],
        settings={"listen": {"max_body_bytes": 20_000}},
    ),
    Mistake(
        "an alias for a model that no engine serves",
        "alias",
        "gateway",
        settings={"models": {"aliases": ["claude-*=kimi"]}},
    ),
    # Of pairs
    Mistake("a decoder that fetches nothing", "kv_not_fetched", "D1", decoders=[{}, {"protocol": "none"}]),
    Mistake("answers without KV parameters", "no_kv_params", "P1", prefillers=[{}, fault("missing_kv_params")]),
    Mistake(
        "a KV address that decoders do not reach",
        "handover",
        "P1",
        prefillers=[{}, {"kv_host": "127.0.0.9"}],
        decoders=[{}, {}],
    ),
    Mistake(
        "engines without a KV connector",
        "kv_not_fetched",
        "all pairs",
        prefillers=[{}, {}],
        decoders=[{"protocol": "none"}, {"protocol": "none"}],
    ),
    Mistake(
        "a decoder that computes what it cannot fetch",
        "kv_not_fetched",
        "D1",
        decoders=[{}, {"kv_load_failure_policy": "recompute", **fault("load_failure")}],
    ),
    Mistake("damaged KV", "corrupt", "D1", decoders=[{}, fault("corrupt_kv")]),
    Mistake("another tokenizer", "tokenizer", "P0 → D1", decoders=[{}, fault("other_tokenizer")]),
    Mistake(
        "a prefiller that generates nothing",
        "answer",
        "P0",
        prefillers=[fault("hang_before_headers")],
        canary_seconds=0.3,
    ),
    Mistake("a decoder that generates nothing", "answer", "D0", decoders=[fault("refuse_status", status=500)]),
    Mistake(
        "KV that expires before it is fetched",
        "handover",
        "D0",
        prefillers=[{"pin_seconds": 0.01}],
        decoders=[fault("slow_load", seconds=0.1)],
    ),
    Mistake(
        "hand-overs that take too long",
        "slow",
        "P0 → D0",
        WARNING,
        decoders=[fault("slow_load", seconds=0.3)],
        settings={"timeouts": {"handoff_seconds": 0.5}},
    ),
    Mistake(
        "a decoder that recomputes, without counters",
        "kv_not_fetched",
        "D0",
        WARNING,
        decoders=[
            {"protocol": "none", "prefill_ms_per_1k_tokens": 300.0, **fault("refuse_status", "/metrics", status=404)}
        ],
    ),
    Mistake(
        "a slow prefiller",
        "pace",
        "P1",
        WARNING,
        prefillers=[{}, {"prefill_ms_per_1k_tokens": 4000.0}, {}],
        canary_seconds=30.0,
    ),
    Mistake("a slow decoder", "pace", "D0", WARNING, decoders=[{"decode_step_ms": 300.0}, {}, {}], canary_seconds=30.0),
    Mistake(
        "a deadline that the longest prompt misses",
        "deadline",
        "P0",
        WARNING,
        prefillers=[{"prefill_ms_per_1k_tokens": 400.0}],
        settings={"timeouts": {"prefill_seconds": 10.0, "prefill_seconds_per_1k_tokens": 0.0}},
        canary_tokens=2048,
    ),
    Mistake(
        "a prefiller without a prefix cache",
        "prefix-cache",
        "P0",
        Severity.NOTE,
        prefillers=[{"block_size": 8192}],
        canary_tokens=2048,
    ),
    Mistake("a store that is not shared", "kv_not_fetched", "D0", connector="vllm_store", decoders=[{"store": None}]),
    Mistake(
        "SGLang's KV is damaged",
        "corrupt",
        "D1",
        connector="sglang_bootstrap",
        prefillers=[{}, {}],
        decoders=[{}, fault("corrupt_kv"), {}],
    ),
    Mistake(
        "engines of two kinds with auto",
        "connector",
        "gateway",
        connector="auto",
        decoders=[{"profile_name": "sglang"}],
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
async def test_doctor_reports_the_mistake(mistake: Mistake, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = await examined(mistake, cache(lambda: tmp_path_factory.mktemp("store")))
    named = [f for f in found.findings if (found.short(f.subject), f.check) == (mistake.subject, mistake.check)]
    assert [f.severity for f in named] == [mistake.severity], found.findings
    assert all(f.hint for f in named)


@pytest.mark.parametrize(
    ("path", "check", "begin"),
    [((), "answer", "the engine answered"), (("/v1/models",), "models", "/v1/models answered")],
)
async def test_finding_has_the_words_of_the_engine(path: tuple[str, ...], check: str, begin: str) -> None:
    words = "CUDA error: an illegal memory access was encountered"
    broken = fault("refuse_status", *path, status=500, body={"error": {"message": words}})
    found = await examined(Mistake("", check, "D0", decoders=[broken, {}]), Path)
    [finding] = [each for each in found.findings if each.check == check]
    assert f"{begin} with status 500: {words}" in finding.words


def test_every_check_is_in_operating() -> None:
    doctor = Path("docs/operate/doctor.md").read_text()
    assert [mistake.check for mistake in MISTAKES if f"`{mistake.check}`" not in doctor] == []


async def test_pair_without_a_connection_is_reported() -> None:
    async with SimulatedEngine(role="prefill") as far, SimulatedEngine(role="prefill") as near:
        options: dict[str, Any] = {"kv_load_failure_policy": "recompute", "unreachable_ports": frozenset({far.port})}
        async with SimulatedEngine(role="decode", **options) as cut_off, SimulatedEngine(role="decode") as other:
            found = await examine(_between([far, near], [cut_off, other]))
    bad = [finding for finding in found if finding.severity > Severity.NOTE]
    assert [(finding.check, finding.subject) for finding in bad] == [
        ("kv_not_fetched", f"127.0.0.1:{far.port} → 127.0.0.1:{cut_off.port}")
    ]


@pytest.mark.parametrize(("headers", "check"), [({}, "models"), ({"Server": SERVER}, "gateway")])
async def test_web_server_instead_of_an_engine_is_reported(headers: dict[str, str], check: str) -> None:
    server = TestServer(web_server(**headers))
    async with server, SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        settings = _between([prefiller], [decoder], f"127.0.0.1:{server.port}")
        found = await examine(settings)
        bad = {(finding.check, finding.subject) for finding in found if finding.severity is Severity.FAILURE}
        assert bad == {(check, f"decode 127.0.0.1:{server.port}")}


async def test_dead_address_of_a_host_name_is_reported() -> None:
    async with SimulatedEngine(role="decode") as decoder:
        settings = _between([], [decoder], connector="plain")
        backend = Backend(Role.DECODE, "decoders.internal", decoder.port)

        def look_up(host: str) -> tuple[str, ...]:
            return ("127.0.0.9", "127.0.0.1")

        rules = AddressRules(settings.admin.networks)
        async with HostNames(rules, {backend.host}, Metrics(), look_up=look_up) as names, EngineClient(names) as client:
            told = await EngineAsker(names, client, EngineKeys(None), settings, idle_seconds=0.01).examine(backend)
    fleet = Fleet(settings=settings, keys=EngineKeys(None), engines=[told])
    (found,) = check_engines(fleet)
    assert (found.check, found.severity) == ("address", Severity.WARNING)
    assert "127.0.0.9 is dead (connection refused)" in found.words


def _between(
    prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine], *more: str, connector: str = "vllm_pull"
) -> Settings:
    return Settings.model_validate(
        {
            "connector": connector,
            "prefill": [f"{engine.host}:{engine.port}" for engine in prefillers],
            "decode": [*(f"{engine.host}:{engine.port}" for engine in decoders), *more],
        }
    )
