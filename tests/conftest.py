"""Fixtures: deployments of a whole gateway, on the event loop of production."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest
import pytest_asyncio
import uvloop
from aiohttp import web_app

import proxy.balancer.lease
from proxy.observe.logs.handler import LineHandler
from proxy.sim.engine import SimulatedEngine
from tests.certificates import Certificates
from tests.clock import Clock
from tests.deployment import Deployment, Engine, deployed, engine_options

IS_COMPILED = not proxy.balancer.lease.__file__.endswith(".py")
"""Whether the gateway is the compiled build."""
collect_ignore = ["gateway/test_cost.py"] if IS_COMPILED else []

pytest_plugins = ["tests.faults.plugin", "tests.conformance.plugin", "tests.selection.plugin"]

_LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


# Durations of examples say nothing on a busy machine.
hypothesis.settings.register_profile(
    "pdproxy",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "100")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("pdproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=_LOOPS, default="uvloop", help="event loop of asynchronous tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See the marker `interpreted`."""
    if IS_COMPILED:
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.skip("the gateway is compiled"))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    name = config.getoption("--loop")
    return {name: _LOOPS[name]}


@pytest.fixture(autouse=True)
def nothing_runs_on(request: pytest.FixtureRequest) -> None:
    """Check for remaining tasks after every test with an event loop, and create none for other tests."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("no_task_is_left")


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    """Check that no task remains on the loop of a test after its other fixtures.

    Free its applications, too. aiohttp caches handlers, and with them the parts of hundreds of gateways and engines,
    which the garbage collector would scan repeatedly.
    """
    yield
    web_app._cached_build_middleware.cache_clear()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"


@pytest.fixture
def clock() -> Clock:
    """Return a clock that the test advances."""
    return Clock()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Return an authority whose certificates are in the directory of the test."""
    return Certificates(tmp_path)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Close the handlers that the test has added, and restore the levels."""
    root, ours = logging.getLogger(), logging.getLogger("proxy")
    before = root.handlers[:], root.level, ours.level
    yield
    for handler in root.handlers:
        if isinstance(handler, LineHandler):
            handler.close()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


class Deploy(Protocol):
    """Starts engines that speak the connector's protocol, and a gateway.

    `engine` are options of all engines, `prefiller` and `decoder` those of a role. Given engines are used unchanged.
    Other arguments are those of `deployed`.
    """

    async def __call__(
        self,
        prefillers: int | Sequence[Engine] = 1,
        decoders: int | Sequence[Engine] = 1,
        *,
        engine: Mapping[str, Any] | None = None,
        prefiller: Mapping[str, Any] | None = None,
        decoder: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> Deployment: ...


@pytest.fixture
async def deploy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deploy]:
    """Return the function that starts gateways in these tests, so that every one is checked for leaks."""
    store = cache(lambda: tmp_path_factory.mktemp("store"))
    async with AsyncExitStack() as stack:

        async def start(
            prefillers: int | Sequence[Engine] = 1,
            decoders: int | Sequence[Engine] = 1,
            *,
            engine: Mapping[str, Any] | None = None,
            prefiller: Mapping[str, Any] | None = None,
            decoder: Mapping[str, Any] | None = None,
            **sections: Any,
        ) -> Deployment:
            connector = sections.get("connector", "")
            is_plain = connector == "plain"
            common = {**engine_options(connector, store), **(engine or {})}
            return await stack.enter_async_context(
                deployed(
                    _engines(0 if is_plain else prefillers, **{"role": "prefill", **common, **(prefiller or {})}),
                    _engines(decoders, **{"role": "both" if is_plain else "decode", **common, **(decoder or {})}),
                    **sections,
                )
            )

        yield start


def _engines(engines: int | Sequence[Engine], **options: Any) -> list[Engine]:
    return [SimulatedEngine(**options) for _ in range(engines)] if isinstance(engines, int) else list(engines)


@pytest.fixture
async def gateway(deploy: Deploy) -> Deployment:
    """Return a gateway with one prefiller and one decoder."""
    return await deploy()
