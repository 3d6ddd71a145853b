"""Deployments for the tests of the gateway as a whole, on the event loop it runs on in production."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import uvloop

from proxy.sim.engine import SimulatedEngine
from tests.deployment import deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from tests.deployment import Deployment

_LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=_LOOPS, default="uvloop", help="event loop of asynchronous tests")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    name = config.getoption("--loop")
    return {name: _LOOPS[name]}


class Deploy(Protocol):
    """Starts engines and a gateway. Numbers of engines, options they have in common, sections of the settings."""

    async def __call__(
        self, prefillers: int = 1, decoders: int = 1, engine: Mapping[str, Any] | None = None, **sections: Any
    ) -> Deployment: ...


@pytest.fixture
async def deploy() -> AsyncIterator[Deploy]:
    """The only way to a gateway in these tests, so that what each of them leaves behind is looked at."""
    async with AsyncExitStack() as stack:

        async def start(
            prefillers: int = 1, decoders: int = 1, engine: Mapping[str, Any] | None = None, **sections: Any
        ) -> Deployment:
            options = engine or {}
            if sections.get("connector") == "plain":
                first, second = [], [SimulatedEngine(role="both", **options) for _ in range(decoders)]
            else:
                first = [SimulatedEngine(role="prefill", **options) for _ in range(prefillers)]
                second = [SimulatedEngine(role="decode", **options) for _ in range(decoders)]
            return await stack.enter_async_context(deployed(first, second, **sections))

        yield start


@pytest.fixture
async def gateway(deploy: Deploy) -> Deployment:
    """One prefiller, one decoder."""
    return await deploy()
