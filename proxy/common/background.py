"""Background tasks that end with their owner, log their errors, and are restarted if they must not end."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Coroutine, Iterable
    from types import TracebackType

    from prometheus_client import Counter

T = TypeVar("T")

RESTART_SECONDS: Final = 1.0
MAX_SLICE_SECONDS: Final = 0.001
"""Time for which a long piece of work holds the event loop before other tasks run."""
_MAX_RESTART_SECONDS: Final = 60.0


async def run_in_slices(steps: Iterable[T]) -> list[T]:
    """Take all steps, and return their results. Other tasks run after each MAX_SLICE_SECONDS."""
    clock = asyncio.get_running_loop().time
    ends_at = clock() + MAX_SLICE_SECONDS
    results: list[T] = []
    for result in steps:
        results.append(result)
        if clock() >= ends_at:
            await asyncio.sleep(0)
            ends_at = clock() + MAX_SLICE_SECONDS
    return results


class BackgroundTasks:
    """The tasks of one owner. Leaving its `async with` block cancels running tasks and waits for them."""

    def __init__(self, logger: logging.Logger, noun: str, *, grace_seconds: float = 0.0) -> None:
        """Create an owner of background tasks that has no tasks yet.

        Args:
            logger: Logs the errors of tasks.
            noun: Name of a task in log lines.
            grace_seconds: Time for running tasks to end before they are cancelled.
        """
        self._logger = logger
        self._noun = noun
        self._grace_seconds = grace_seconds
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks and self._grace_seconds:
            await asyncio.wait(self._tasks, timeout=self._grace_seconds)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        """Return the number of running background tasks."""
        return len(self._tasks)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a background task. An error is logged, and is raised in callers that await the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def keep_running(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        loop_name: str,
        restarts: Counter,
        *,
        restart_seconds: float = RESTART_SECONDS,
    ) -> asyncio.Task[None]:
        """Run a background loop that must not end, and start it again when an exception ends it.

        Args:
            work: Makes the coroutine of one run. The loop is over when a run returns.
            loop_name: The label of the counter, and the name in the log.
            restarts: A counter with the label `loop`; each exception adds 1.
            restart_seconds: The first pause before a restart. It doubles up to a minute for each exception in a row,
                and is the first one again after a run of more than a minute.

        The first exception in a row is logged with its traceback, the others are only counted.
        """
        return self.start_task(self._run_and_restart(work, loop_name, restarts, restart_seconds))

    async def _run_and_restart(
        self, work: Callable[[], Coroutine[Any, Any, None]], loop_name: str, restarts: Counter, restart_seconds: float
    ) -> None:
        clock, failures = asyncio.get_running_loop().time, 0
        while True:
            began = clock()
            try:
                return await work()
            except Exception:
                if clock() - began > _MAX_RESTART_SECONDS:
                    failures = 0
                failures += 1
                restarts.labels(loop_name).inc()
                if failures == 1:
                    self._logger.exception("background: loop failed, restarting: %s", loop_name)
            pause_seconds = min(_MAX_RESTART_SECONDS, restart_seconds * 2 ** min(failures - 1, 10))
            await asyncio.sleep(random.uniform(0.8, 1.0) * pause_seconds)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("background: task failed: %s", self._noun, exc_info=error)


class BackgroundOwner:
    """Base of classes with background tasks in `self._background`. Leaving the `async with` block ends the tasks."""

    _background: BackgroundTasks

    def _begin(self) -> None:
        """Run at the beginning of the owner's `async with` block, for example to start a task."""

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.__aexit__(kind, error, trace)
