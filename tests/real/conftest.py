"""Real engines for the tests in this directory, which only `scripts/test-real` runs: without PDPROXY_REAL_VENV, the
virtual environment that vLLM is installed in, pytest does not even find them.

One stack after the other (`--stack`), and engines are started once for each. Tests of what works come first, then those
of what is interrupted; the longest of these are about vLLM's decoders and run with NIXL only.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.real.cluster import Cluster
from tests.real.engines import Engines
from tests.real.programs import endpoints, start_gateway, stop
from tests.real.stacks import NIXL, SIZES, STACKS, THINKING, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.stacks import Stack

# How the gateway resumes chats: as chats whose prompt is token ids, which is its own choice with these engines, or as
# completions, whose text it parses itself.
_CHATS = ("auto", "completions")

collect_ignore_glob = [] if os.environ.get("PDPROXY_REAL_VENV") else ["test_*.py"]


class Machine:
    """The engines of one stack at a time: there is no room for more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: Engines | None = None

    def engines(self, stack: Stack) -> Engines:
        """Of this stack; those of another one are stopped."""
        if self._engines is None or self._engines.stack is not stack:
            self.stop()
            directory = self._directory / stack.name
            directory.mkdir()
            print(f"{stack.name}: logs of the engines and the gateway: {directory}", flush=True)
            self._engines = Engines(stack, directory)
        return self._engines

    def stop(self) -> None:
        if self._engines is not None:
            self._engines.stop()
            self._engines = None


@pytest.hookimpl(trylast=True)  # pytest itself groups what shares a fixture before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the stacks that were asked for, one after the other, and each cluster once."""
    if not os.environ.get("PDPROXY_REAL_VENV"):
        return  # a run of all the other tests, which come by here, too
    chosen = config.getoption("--stack") or [stack.name for stack in STACKS]
    wanted = [item for item in items if _stack(item).name in chosen and _is_meant(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=_place)


def _place(item: pytest.Item) -> tuple[int, int, str, int]:
    """By stack, then by cluster as the files have it; what needs another cluster comes last, as pytest has it."""
    assert isinstance(item, pytest.Function)
    size = item.callspec.params.get("cluster")
    if not isinstance(size, Size):
        return STACKS.index(_stack(item)), len(SIZES), "", 0
    file, line, _ = item.location
    return STACKS.index(size.stack), SIZES.index(size), file, line or 0


def _stack(item: pytest.Item) -> Stack:
    """`cluster` says it by its parameter, and the other fixtures are of one stack each."""
    assert isinstance(item, pytest.Function)
    if "cluster" in item.fixturenames:
        size = item.callspec.params["cluster"]
        assert isinstance(size, Size)
        return size.stack
    return THINKING if "thinking" in item.fixturenames else NIXL


def _is_meant(item: pytest.Item) -> bool:
    """`@pytest.mark.only` names the stacks that a test is about; without it all are."""
    marker = item.get_closest_marker("only")
    return marker is None or _stack(item).name in marker.args


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("engines"))
    try:
        yield machine
    finally:
        machine.stop()


@pytest.fixture(scope="session", params=SIZES, ids=str)
def cluster(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Cluster]:
    size = request.param
    with _cluster(machine.engines(size.stack), str(size), size.prefillers, size.decoders) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=_CHATS)
def resuming(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Cluster]:
    with _cluster(machine.engines(NIXL), "nixl-1P2D", 1, 2, request.param) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=_CHATS)
def thinking(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Cluster]:
    with _cluster(machine.engines(THINKING), "thinking-1P2D", 1, 2, request.param) as cluster:
        yield cluster


@contextmanager
def _cluster(engines: Engines, name: str, prefillers: int, decoders: int, chats: str = "auto") -> Iterator[Cluster]:
    print(f"{name}: starting what it needs", flush=True)
    began = time.monotonic()
    engines.need(prefillers, decoders)
    chosen = engines.prefillers[:prefillers], engines.decoders[:decoders]
    log = engines.directory / f"gateway-{name}-{chats}.log"
    variables = {} if chats == "auto" else {"PROXY_RESUME__CHATS": chats}
    words = ("--connector", engines.stack.connector, *endpoints(*chosen))
    gateway = start_gateway(next(engines.ports), log, *words, **variables)
    print(f"{name}: engines and gateway are ready after {time.monotonic() - began:.0f} s", flush=True)
    try:
        yield Cluster(engines, *chosen, gateway, chats)
    finally:
        stop([gateway])


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Says what a test has seen, in the line it gets in the report."""
    return lambda text: record_property("seen", text)
