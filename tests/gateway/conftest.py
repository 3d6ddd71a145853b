"""Fixtures: the comparison of both HTTP readers, and the extension module that passes tokens on."""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import orjson
import pytest

from lab.common.compiled.pump import SOURCE, build_pump
from tests.gateway.roads import Roads


@pytest.fixture
def roads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roads:
    """Return an object that runs a conversation with both readers, and compares the results."""
    return Roads(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def pump_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the extension module, which is built here. See scripts/test-pump for PUMP_CFLAGS."""
    flags = os.environ.get("PUMP_CFLAGS", "").split()
    path = build_pump(Path(__file__).parents[2] / SOURCE, tmp_path_factory.mktemp("pump"), "-Werror", *flags)
    spec = spec_from_file_location("_pump", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pump(pump_module: Any) -> Any:
    """Return a Pump of the extension module."""
    return pump_module.Pump(orjson.loads)


@pytest.fixture
def pump_in_use(pump_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway use the extension module, as in the compiled build."""
    monkeypatch.setattr("proxy.upstream.pump._pump", pump_module)


@pytest.fixture(params=["python", "pump"])
def tokens_passed_on_by(request: pytest.FixtureRequest) -> None:
    """Run a test twice: tokens are passed on in Python, and in C."""
    if request.param == "pump":
        request.getfixturevalue("pump_in_use")
