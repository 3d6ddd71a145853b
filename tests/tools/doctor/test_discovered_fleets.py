"""The doctor examines instances of discovery sources, and reports failed and empty sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.findings import Severity
from tests.fleet.discovery.keepers import groups
from tests.tools.doctor.fleets import examine


def settings_with(*files: Path) -> Settings:
    options: dict[str, Any] = {"discovery": {"files": [str(file) for file in files]}}
    return Settings.model_validate(options)


async def test_doctor_examines_the_instances_of_a_source(tmp_path: Path) -> None:
    async with SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        (tmp_path / "engines.yaml").write_text(groups(prefiller, decoder), encoding="utf-8")
        found = await examine(settings_with(tmp_path / "engines.yaml"))
    assert [finding for finding in found if finding.severity > Severity.NOTE] == []
    assert any(f"{prefiller.port} → " in finding.subject for finding in found)


async def test_doctor_reports_failed_and_empty_sources(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    (found,) = await examine(settings_with(file))
    assert (found.check, found.subject, found.severity) == ("source", f"file:{file}", Severity.FAILURE)
    file.write_text("[]", encoding="utf-8")
    found_of_roles = await examine(settings_with(file))
    assert [(finding.check, finding.subject) for finding in found_of_roles] == [
        ("source", "prefill"),
        ("source", "decode"),
    ]
