"""Requests leave no reference cycles, so the garbage collector has no work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.conftest import Deploy
from tests.deployment import Deployment


@contextmanager
def cycles_of_ours() -> Iterator[list[str]]:
    """Return the types of this program's objects in cycles at the end of the block."""
    found: list[str] = []
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        modules = ((type(each).__module__, type(each).__qualname__) for each in gc.garbage)
        found += [f"{module}.{name}" for module, name in modules if is_ours(module)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def settled(gateway: Deployment) -> None:
    """Wait until nothing is in flight."""
    await gateway.worker.drain_manager.wait_until_idle()
    await until(lambda: not gateway.leaks(), "quiet")


def is_ours(module: str) -> bool:
    return module.startswith("proxy.") and not module.startswith("proxy.sim")


@pytest.mark.parametrize("mode", ["exact", "restart-only"])
@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "max_tokens": 1},
        {"stream": True, "max_tokens": 40},
        {"max_tokens": 40},
        {"stream": True, "n": 2, "max_tokens": 4},
        {"n": 2, "max_tokens": 4},
    ],
    ids=str,
)
async def test_served_request_leaves_no_reference_cycles(deploy: Deploy, mode: str, fields: dict[str, Any]) -> None:
    gateway = await deploy(resume={"mode": mode})
    answer = await gateway.ask(request(Api.CHAT, **fields))  # opens connections, and fills what is kept
    assert answer.status == 200
    with cycles_of_ours() as found:
        for _ in range(3):
            await gateway.ask(request(Api.CHAT, **fields))
        await settled(gateway)
    assert found == []


async def test_closed_connection_leaves_no_reference_cycles(deploy: Deploy) -> None:
    gateway = await deploy()
    with cycles_of_ours() as found:
        await gateway.ask(request(Api.CHAT, stream=True, max_tokens=2))
        await settled(gateway)
        await gateway.end()
    assert not [name for name in found if name.startswith("proxy.upstream.connection")]
