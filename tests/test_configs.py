"""The example configurations: every one loads, and `full.yaml` says exactly what the settings model says."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.settings import OPTIONS, Settings, load

CONFIGS = Path(__file__).parent.parent / "configs"
# An example has to name instances, which have no default.
WITHOUT_DEFAULT = {"prefill", "decode"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configuration_loads(path: Path) -> None:
    load(["--config", str(path)], {})


def test_the_full_configuration_holds_every_option_with_its_default() -> None:
    full = load(["--config", str(CONFIGS / "full.yaml")], {})
    assert [option for option in OPTIONS if full.origins[option] == "default"] == []
    assert full.settings.model_dump(exclude=WITHOUT_DEFAULT) == Settings().model_dump(exclude=WITHOUT_DEFAULT)


def test_the_full_configuration_says_of_every_option_what_the_model_says() -> None:
    lines = (CONFIGS / "full.yaml").read_text(encoding="utf-8").splitlines()
    said = " ".join(line.strip().removeprefix("#").strip() for line in lines)
    descriptions = [" ".join((field.description or "").split()) for field in OPTIONS.values()]
    assert [description for description in descriptions if description not in said] == []


@pytest.mark.parametrize(
    ("name", "prefillers", "decoders"), [("kimi-k2.6-8p8d", 8, 8), ("kimi-k2.5-4p32d", 4, 32), ("single-node", 0, 2)]
)
def test_a_deployments_configuration_has_its_instances(name: str, prefillers: int, decoders: int) -> None:
    settings = load(["--config", str(CONFIGS / f"{name}.yaml")], {}).settings
    assert (len(settings.prefill), len(settings.decode)) == (prefillers, decoders)
