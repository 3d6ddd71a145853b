"""Real engines for the tests in this directory, which only `scripts/test-real` runs.

Pytest does not collect them without PDPROXY_REAL_VENV, the virtual environment with vLLM.

Stacks run one after the other (`--stack` chooses), and the engines of each are started once. Tests of undisturbed
answers come first, then those of interrupted ones. The longest are about vLLM's decoders and run with NIXL only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.cluster import Cluster, count_sources
from tests.real.engines import Engines
from tests.real.programs import HOST, endpoints, start_gateway, stop
from tests.real.stacks import ELASTIC, NIXL, SIZES, STACKS, THINKING, Size, Stack

# Values of `resume.chats`: `auto` resumes chats of these engines as chats whose prompt is token ids, `completions` as
# completions whose text the gateway parses itself.
_CHATS = ("auto", "completions")

collect_ignore_glob = [] if os.environ.get("PDPROXY_REAL_VENV") else ["test_*.py"]


class Machine:
    """The engines of one stack at a time; there is no memory for more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: Engines | None = None

    def engines(self, stack: Stack) -> Engines:
        """Return the engines of this stack, after stopping those of another one."""
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


@pytest.hookimpl(trylast=True)  # after pytest's own grouping by session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the stacks that were asked for, and sort so that each cluster is started once."""
    if not os.environ.get("PDPROXY_REAL_VENV"):
        return  # pytest calls this hook with all the other tests, too
    chosen = config.getoption("--stack") or [stack.name for stack in STACKS]
    wanted = [item for item in items if _stack(item).name in chosen and _runs_with_stack(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=_position)


def _position(item: pytest.Item) -> tuple[int, int, str, int]:
    """Return the sort key: stack, cluster, file and line. Tests of other clusters come last, in pytest's order."""
    assert isinstance(item, pytest.Function)
    size = item.callspec.params.get("cluster") if hasattr(item, "callspec") else None
    if not isinstance(size, Size):
        return STACKS.index(_stack(item)), len(SIZES), "", 0
    file, line, _ = item.location
    return STACKS.index(size.stack), SIZES.index(size), file, line or 0


def _stack(item: pytest.Item) -> Stack:
    """Return the stack of a test: the parameter of `cluster` names it, and other fixtures have one stack each."""
    assert isinstance(item, pytest.Function)
    if "cluster" in item.fixturenames:
        size = item.callspec.params["cluster"]
        assert isinstance(size, Size)
        return size.stack
    if "elastic" in item.fixturenames:
        return ELASTIC
    return THINKING if "thinking" in item.fixturenames else NIXL


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the report which stack the test runs with."""
    stack = _stack(item)
    item.user_properties += [("stack", stack.name), ("venv", stack.family.venv_variable)]


def _runs_with_stack(item: pytest.Item) -> bool:
    """Whether the test runs with its stack: `@pytest.mark.only` names the stacks, without it all do."""
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


@pytest.fixture(scope="session")
def elastic(machine: Machine) -> Iterator[Cluster]:
    with _cluster(machine.engines(ELASTIC), "elastic-1P2D", 1, 2) as cluster:
        yield cluster


@contextmanager
def _cluster(engines: Engines, name: str, prefillers: int, decoders: int, chats: str = "auto") -> Iterator[Cluster]:
    print(f"{name}: starting engines and gateway", flush=True)
    began = time.monotonic()
    engines.need(prefillers, decoders)
    chosen = engines.prefillers[:prefillers], engines.decoders[:decoders]
    log = engines.directory / f"gateway-{name}-{chats}.log"
    variables = {**engines.stack.gateway, **({} if chats == "auto" else {"PROXY_RESUME__CHATS": chats})}
    words = ["--connector", engines.stack.connector, *endpoints(*chosen)]
    if engines.stack is ELASTIC:
        words += ["--elastic", *(f"http://{HOST}:{program.port}" for both in chosen for program in both)]
    gateway = start_gateway(next(engines.ports), log, *words, **variables)
    print(f"{name}: engines and gateway are ready after {time.monotonic() - began:.0f} s", flush=True)
    try:
        yield Cluster(engines, *chosen, gateway, count_sources(engines.stack, *chosen), chats)
    finally:
        stop([gateway])


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a text to the line of the test in the report."""
    return lambda text: record_property("seen", text)
