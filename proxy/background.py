"""Tasks that run beside whatever else goes on: they end with their owner, and what goes wrong in one is logged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    import logging
    from collections.abc import Coroutine
    from types import TracebackType

T = TypeVar("T")


class Background:
    """The tasks of one owner. `async with` it: those that still run at the end are cancelled and waited for."""

    def __init__(self, logger: logging.Logger, noun: str, *, grace_seconds: float = 0.0) -> None:
        """`noun`: what a task is called in the line about an error. `grace_seconds`: what they are granted at the end
        before they are cancelled.
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
        """How many have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it. An error that it raises is logged here, and raised where the task is waited for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("%s failed unexpectedly", self._noun, exc_info=error)


class BackgroundOwner:
    """The base of a part that has tasks of its own, in `self._background`. `async with` it: leaving ends them."""

    _background: Background

    def _begin(self) -> None:
        """What the part does at the beginning of the block, such as starting a task."""

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.__aexit__(kind, error, trace)
