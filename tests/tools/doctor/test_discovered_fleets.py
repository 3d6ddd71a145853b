"""The doctor looks at what sources of discovery name, and says which ones do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.findings import Severity
from tests.fleet.discovery.keepers import groups
from tests.tools.doctor.fleets import examine

if TYPE_CHECKING:
    from pathlib import Path


def of(*files: Path) -> Settings:
    options: dict[str, Any] = {"discovery": {"files": [str(file) for file in files]}}
    return Settings.model_validate(options)


async def test_instances_that_a_source_names_are_examined(tmp_path: Path) -> None:
    async with SimulatedEngine(role="prefill") as prefiller, SimulatedEngine(role="decode") as decoder:
        (tmp_path / "engines.yaml").write_text(groups(prefiller, decoder), encoding="utf-8")
        found = await examine(of(tmp_path / "engines.yaml"))
    assert [finding for finding in found if finding.severity > Severity.NOTE] == []
    assert any(f"{prefiller.port} → " in finding.subject for finding in found)


async def test_a_source_that_fails_and_one_that_names_nobody_are_told(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    (found,) = await examine(of(file))
    assert (found.check, found.subject, found.severity) == ("source", f"file:{file}", Severity.FAILURE)
    file.write_text("[]", encoding="utf-8")
    found_of_roles = await examine(of(file))
    assert [(finding.check, finding.subject) for finding in found_of_roles] == [
        ("source", "prefill"),
        ("source", "decode"),
    ]
