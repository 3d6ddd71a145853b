"""The event loop in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from lab.replay.virtual_time import Deadlock, VirtualLoop, run


def test_virtual_hours_pass_at_once_and_in_order() -> None:
    events: list[tuple[str, float]] = []

    async def course() -> None:
        loop = asyncio.get_running_loop()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            events.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 3600.0))

    began = time.monotonic()
    run(course(), VirtualLoop())
    assert [name for name, _ in events] == ["early", "late"]
    assert [at for _, at in events] == pytest.approx([3600.0, 7200.0])
    assert time.monotonic() - began < 600


def test_deadlock_is_reported() -> None:
    async def course() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(course(), VirtualLoop())
