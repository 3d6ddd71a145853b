"""Tasks beside everything else end with their owner, and an error of theirs is one line."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.common.background import BackgroundTasks
from proxy.observe.metrics import Metrics

logger = logging.getLogger("proxy.test")


async def test_background_cancels_and_awaits_running_tasks_at_the_end() -> None:
    never, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await never.wait()
        finally:
            ended.append("cleaned up")

    async with BackgroundTasks(logger, "a test") as background:
        task = background.start_task(work())
        await asyncio.sleep(0)
        assert len(background) == 1
    assert (task.cancelled(), ended, len(background)) == (True, ["cleaned up"], 0)


async def test_background_lets_tasks_end_within_the_grace_time() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async with BackgroundTasks(logger, "a test", grace_seconds=5.0) as background:
        task = background.start_task(work())
    assert task.result() == "done"


async def test_background_logs_a_task_error_once_and_raises_it_to_awaiters(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("out of luck")

    async with BackgroundTasks(logger, "a test") as background:
        with pytest.raises(RuntimeError, match="out of luck"):
            await background.start_task(work())
        background.start_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not background
    assert [record.getMessage() for record in caplog.records] == ["background: task failed: a test"] * 2


async def test_background_restarts_a_failed_loop_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    restarts, lives, runs = Metrics().background_restarts_total, asyncio.Event(), 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs <= 3:
            raise RuntimeError("out of luck")
        lives.set()
        await asyncio.Event().wait()

    async with BackgroundTasks(logger, "a test") as background:
        background.keep_running(work, "canaries", restarts, restart_seconds=0.0)
        await lives.wait()
    assert restarts.labels("canaries")._value.get() == 3
    assert [record.getMessage() for record in caplog.records] == ["background: loop failed, restarting: canaries"]


async def test_background_does_not_restart_a_loop_that_returns() -> None:
    async def work() -> None:
        pass

    async with BackgroundTasks(logger, "a test") as background:
        await background.keep_running(work, "canaries", Metrics().background_restarts_total)
        assert not background
