"""Real engines for the tests in this directory, which only `scripts/test-real` runs: without PDPROXY_REAL_VENV, the
virtual environment that vLLM is installed in, pytest does not even find them.

Engines are started once; every test runs first with one prefiller and one decoder, then with two of each.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real.cluster import Cluster
from tests.real.engines import Engines, start_gateway, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_VENV = os.environ.get("PDPROXY_REAL_VENV")

collect_ignore_glob = [] if _VENV else ["test_*.py"]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    assert _VENV
    directory = tmp_path_factory.mktemp("engines")
    print(f"logs of the engines and the gateway: {directory}", flush=True)
    engines = Engines(Path(_VENV).absolute(), directory)
    try:
        engines.make_model()
        yield engines
    finally:
        engines.stop()


@pytest.fixture(scope="session", params=["1P1D", "2P2D"])
def cluster(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Cluster]:
    size = int(request.param[0])
    print(f"{request.param}: starting the engines it needs", flush=True)
    began = time.monotonic()
    engines.need(prefillers=size, decoders=size)
    prefillers, decoders = engines.prefillers[:size], engines.decoders[:size]
    log = engines.model.with_name(f"gateway-{request.param}.log")
    gateway = start_gateway(next(engines.ports), prefillers, decoders, log)
    print(f"{request.param}: engines and gateway are ready after {time.monotonic() - began:.0f} s", flush=True)
    try:
        yield Cluster(engines, prefillers, decoders, gateway)
    finally:
        stop([gateway])


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Says what a test has seen, in the line it gets in the report."""
    return lambda text: record_property("seen", text)
