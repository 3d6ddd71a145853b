"""Healthy fleets: the doctor reports no problem, and leaves nothing behind."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.findings import Severity, exit_code, findings_as_json, findings_as_table
from tests.deployment import generations
from tests.tools.doctor.fleets import Mistake, examine, examined

TWO: tuple[dict[str, Any], ...] = ({}, {})


@pytest.mark.parametrize("dev_mode", [False, True])
@pytest.mark.parametrize("connector", [*CONNECTORS, "auto"])
async def test_healthy_fleet_has_no_findings(
    connector: str, dev_mode: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fleet = Mistake(
        "none",
        "",
        "",
        connector=connector,
        prefillers=() if connector == "plain" else TWO,
        decoders=TWO,
        engine={"dev_mode": dev_mode, "api_key": "sk-engine"},
        settings={"auth": {"engine_api_key": "sk-engine"}},
    )
    found = await examined(fleet, cache(lambda: tmp_path_factory.mktemp("store")))
    assert found.subjects(Severity.WARNING) == set()
    assert exit_code(found.findings) == 0
    fetched = {found.short(f.subject) for f in found.findings if f.check == "kv" and f.severity is Severity.OK}
    assert fetched == (set() if connector == "plain" else {f"P{p} → D{d}" for p in range(2) for d in range(2)})


async def test_instances_of_two_models_are_examined_separately() -> None:
    a, b = {"model": "a"}, {"model": "b", "max_model_len": 4096, "profile_name": "v0.33"}
    found = await examined(Mistake("none", "", "", prefillers=(a, b), decoders=(a, b, b)), Path)
    assert found.subjects(Severity.WARNING) == set()
    fetched = {found.short(f.subject) for f in found.findings if f.check == "kv" and f.severity is Severity.OK}
    assert fetched == {"P0 → D0", "P1 → D1", "P1 → D2"}


@pytest.mark.parametrize("profile", ["v0.18", "v0.23", "v0.27", "v0.30", "v0.33"])
async def test_no_engine_version_causes_a_warning(profile: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    fleet = Mistake("none", "", "", engine={"profile_name": profile}, decoders=TWO)
    found = await examined(fleet, cache(lambda: tmp_path_factory.mktemp("store")))
    assert found.subjects(Severity.WARNING) == set()


async def test_pairs_decoders_alone_and_prefillers_again_get_one_canary_and_one_chat() -> None:
    async with (
        SimulatedEngine(role="prefill", api_key="sk-of-the-engines") as one,
        SimulatedEngine(role="prefill", api_key="sk-of-the-engines") as two,
        SimulatedEngine(role="decode", api_key="sk-of-the-engines") as decoder,
    ):
        progress: list[tuple[str, int, int]] = []
        settings = _settings([one, two], [decoder])
        found = await examine(settings, progress=lambda *step: progress.append(step))
        assert progress == [
            *(("instances asked", done, 3) for done in (1, 2, 3)),
            *(("canaries", done, 5) for done in (1, 2, 3, 4, 5)),
            ("chats", 3, 3),
        ]
        assert [len(generations(engine)) for engine in (one, two, decoder)] == [3, 3, 6]
        assert not one.pins
        assert not two.pins
        prompts = [seen.body["prompt"] for seen in generations(decoder) if "prompt" in seen.body]
    report = findings_as_json(found).decode() + findings_as_table(found, 100, coloured=False)
    first, second, *_ = prompts[0].split()
    assert f"{first} {second}" not in report
    assert "sk-of-the-engines" not in report
    assert len(set(prompts)) == 1


@pytest.mark.parametrize("is_reported", [True, False])
async def test_prefiller_without_cache_reports_is_a_note(is_reported: bool) -> None:
    fleet = Mistake("none", "", "", prefillers=({"prompt_tokens_details": is_reported}, {}), decoders=TWO)
    found = await examined(fleet, Path)
    assert found.subjects(Severity.WARNING) == set()
    notes = [finding for finding in found.findings if finding.check == "cache-report"]
    assert {(found.short(note.subject), note.severity) for note in notes} == (
        set() if is_reported else {("P0", Severity.NOTE)}
    )
    assert all("--enable-prompt-tokens-details" in note.hint for note in notes)


async def test_engines_generate_nothing_without_canaries() -> None:
    async with SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        found = await examine(_settings([prefiller], [decoder]), canaries_per_pair=0)
        assert not generations(prefiller, decoder)
    assert [finding.check for finding in found] == ["engine", "engine"]


def _settings(prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine]) -> Settings:
    return Settings.model_validate(
        {
            "prefill": [f"127.0.0.1:{engine.port}" for engine in prefillers],
            "decode": [f"127.0.0.1:{engine.port}" for engine in decoders],
            "auth": {"engine_api_key": "sk-of-the-engines"},
        }
    )
