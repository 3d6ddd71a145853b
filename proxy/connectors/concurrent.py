"""Runs the prefill leg beside the decode leg. If one leg fails, the other leg ends, too.

The first failure is raised. If both legs have failed, the prefiller's is raised, because a missing KV cache explains
whatever the decoder reports.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from proxy.common.errors import UpstreamError
from proxy.connectors.leg_driver import abort_decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from proxy.upstream import Response


@asynccontextmanager
async def run_prefill_beside(leg: Coroutine[Any, Any, None]) -> AsyncIterator[BackgroundPrefill]:
    """Run the prefill leg beside the block. At the end of the block, cancel the leg and wait for it.

    The error of the leg is raised where the block waits for the leg. It is an UpstreamError unless the program has a
    defect. If the block ends with an UpstreamError, the error of the leg replaces it.
    """
    task = _start_task(leg)
    try:
        yield BackgroundPrefill(task)
    except UpstreamError as error:
        cause = _task_error(task) if task.done() else None
        if cause is None or cause is error:
            raise
        raise cause from error
    finally:
        await _cancel_task(task)


class BackgroundPrefill:
    """A prefill leg that runs beside a decode leg."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def await_first_result(
        self, opening: Coroutine[Any, Any, Response], is_served: Callable[[], bool] = lambda: False
    ) -> Response:
        """Open the decode leg while the prefill leg runs. The caller must enter the response at once.

        Raises the error of the leg that fails first, and cancels the decode leg. If the prefill leg fails later, its
        error aborts the response, unless `is_served` then returns True: the decoder no longer needs the prefiller. It
        is called only then, because the decoder's first output may arrive at the same time.
        """
        decode = asyncio.create_task(opening)
        try:
            await asyncio.wait((decode, self._task), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
                await asyncio.wait([decode])
            response = decode.result()
        except BaseException:
            # The response may arrive during this wait, and the wait may be cancelled: the callback handles both.
            decode.add_done_callback(_drop_response)
            await _cancel_task(decode)
            raise
        self._task.add_done_callback(lambda task: None if is_served() else _abort_if_failed(task, response))
        return response


def _start_task(leg: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(leg)
    task.add_done_callback(_task_error)  # retrieves an error that nothing waits for
    return task


async def _cancel_task(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def _task_error(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a prefill task that is done; None if the task succeeded or was cancelled."""
    return None if task.cancelled() else task.exception()


def _drop_response(decode: asyncio.Task[Response]) -> None:
    """Close the response of a decode leg that was given up."""
    if not decode.cancelled() and decode.exception() is None:
        with decode.result():
            pass


def _abort_if_failed(task: asyncio.Task[None], response: Response) -> None:
    error = _task_error(task)
    if error is not None:
        abort_decode(response, error)
