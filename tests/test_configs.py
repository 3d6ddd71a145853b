"""The example configurations load and serve, and `full.yaml` equals the settings model."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import yaml
from jsonschema import Draft202012Validator

from proxy.__main__ import main
from proxy.process.configuration import FIXED
from proxy.settings import OPTIONS, Settings, load_settings
from proxy.settings.reference import make_json_schema
from proxy.sim.engine import SimulatedEngine
from proxy.sim.options import SimRole
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, request
from tests.deployment import generations
from tests.scenarios.program import gateway

CONFIGS = Path(__file__).parent.parent / "configs"
# Examples name instances, which have no default.
WITHOUT_DEFAULT = {"prefill", "decode"}


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Draft202012Validator:
    """Return a validator with the schema that the program prints."""
    assert main(["print-config", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    return Draft202012Validator(printed)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_configuration_loads(path: Path) -> None:
    load_settings(["--config", str(path)], {})


def test_full_configuration_has_every_option_with_its_default() -> None:
    full = load_settings(["--config", str(CONFIGS / "full.yaml")], {})
    assert [option for option in OPTIONS if full.origins[option] == "default"] == []
    assert full.settings.model_dump(exclude=WITHOUT_DEFAULT) == Settings().model_dump(exclude=WITHOUT_DEFAULT)


def test_full_configuration_is_the_one_that_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print-config", "--full"]) == 0
    file = (CONFIGS / "full.yaml").read_text(encoding="utf-8")
    assert file == capsys.readouterr().out, "write it again: pdproxy print-config --full > configs/full.yaml"


@pytest.mark.parametrize(
    "path",
    sorted({*CONFIGS.glob("*.yaml"), *(CONFIGS / "kubernetes").rglob("pdproxy.yaml")}),
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_schema_accepts_configuration(path: Path, schema: Draft202012Validator) -> None:
    schema.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "prefill: 10.0.0.1:7100",
        "decode: [{host: a, port: 1}]",
        "wrokers: 1",
        "workers: 0",
        "workers: many",
        "listen: {port: 65536}",
        "listen: {prot: 1}",
        "retry: {budget_share: 1.5}",
        "timeouts: {idle_seconds: 0}",
        "balance: {decode_policy: best}",
        "kv: {on_missing: maybe}",
        "log: {level: LOUD}",
        "admin: {port: null, trust_local: 3}",
    ],
)
def test_schema_rejects_mistake(text: str, schema: Draft202012Validator) -> None:
    assert not schema.is_valid(yaml.safe_load(text))


def test_schema_accepts_other_spellings(schema: Draft202012Validator) -> None:
    text = "{connector: NixlConnector, workers: auto, listen: null, admin: {port: null}, log: {level: DEBUG}}"
    schema.validate(yaml.safe_load(text))


def test_schema_has_every_option_with_its_help() -> None:
    properties = make_json_schema()["properties"]
    for option, field in OPTIONS.items():
        section, _, name = option.rpartition(".")
        part = (properties[section]["properties"] if section else properties)[name]
        assert part["description"] == " ".join((field.description or "").split())


def test_document_flag_takes_no_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print-config", "--port", "1", "--full"]) == 2
    assert capsys.readouterr().err == "pdproxy: error: print-config --full takes no other flags\n"


def test_options_that_cannot_be_reloaded_are_documented_as_requiring_a_restart() -> None:
    assert [
        name for name in FIXED if "Requires a restart." not in " ".join((OPTIONS[name].description or "").split())
    ] == []


# Prefillers and decoders, one for each data-parallel rank that has an endpoint.
DEPLOYMENTS = {
    "kimi-k2.5-4p32d": ("vllm_pull", 4, 32),
    "kimi-k2.6-2p4d": ("vllm_pull", 2, 4),
    "kimi-k2.6-8p8d": ("vllm_pull", 8, 8),
    "kimi-k2.6-sglang-1p2d": ("sglang_bootstrap", 1, 2),
    "kimi-k2-thinking": ("plain", 0, 1),
    "single-node": ("plain", 0, 2),
}


def test_every_example_configuration_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*DEPLOYMENTS, "full"}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployment_configuration_has_its_instances(name: str) -> None:
    settings = load_settings(["--config", str(CONFIGS / f"{name}.yaml")], {}).settings
    assert (settings.connector, len(settings.prefill), len(settings.decode)) == DEPLOYMENTS[name]


def address(engine: SimulatedEngine) -> str:
    """Return an engine's address in a configuration, with the bootstrap port of a prefiller."""
    return " ".join(str(part) for part in (f"127.0.0.1:{engine.port}", engine.bootstrap_port) if part is not None)


@pytest.mark.parametrize("name", DEPLOYMENTS)
async def test_deployment_starts_and_serves(name: str, tmp_path: Path) -> None:
    """The file as it is, with simulated engines at other addresses."""
    connector, prefillers, decoders = DEPLOYMENTS[name]
    profile = "sglang" if connector == "sglang_bootstrap" else "v0.23"
    async with AsyncExitStack() as stack:

        async def engines(count: int, role: SimRole) -> list[SimulatedEngine]:
            new = (SimulatedEngine(role=role, profile_name=profile) for _ in range(count))
            return [await stack.enter_async_context(engine) for engine in new]

        started = {
            "prefill": await engines(prefillers, "prefill"),
            "decode": await engines(decoders, "both" if connector == "plain" else "decode"),
        }
        options = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
        given = {role: [address(engine) for engine in found] for role, found in started.items() if found}
        assert given.keys() == options.keys() & started.keys()
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(options | given), encoding="utf-8")
        program = await stack.enter_async_context(gateway("--config", str(file), "--host", "127.0.0.1"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        body = request(Api.CHAT, max_tokens=3, stream=True)
        answer = await ask(session, program.url, body)
        assert (answer.status, answer.text) == (200, await answer_alone(body))
        asked = {role: len(generations(*found)) for role, found in started.items()}
        assert asked == {"prefill": min(prefillers, 1), "decode": 1}
