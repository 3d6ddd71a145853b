"""Two legs at the same time: the prefill leg runs beside the decode leg, and neither outlives the other's failure.

The failure that is raised is the one that came first, or the prefiller's where both are known: a decoder whose KV cache
does not come is not to blame for what it says.
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
async def running(leg: Coroutine[Any, Any, None]) -> AsyncIterator[PrefillLeg]:
    """Run the prefill leg until the end of the block at the latest; left before, it is cancelled and waited for.

    What the leg raises, an UpstreamError unless the program has a mistake, is raised where the block waits for it, and
    takes the place of an UpstreamError with which the block is left.
    """
    task = _begun(leg)
    try:
        yield PrefillLeg(task)
    except UpstreamError as error:
        cause = _error(task) if task.done() else None
        if cause is None or cause is error:
            raise
        raise cause from error
    finally:
        await _end(task)


class PrefillLeg:
    """A prefill leg under way."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def race(
        self, opening: Coroutine[Any, Any, Response], is_served: Callable[[], bool] = lambda: False
    ) -> Response:
        """Open the decode leg meanwhile; the response is the caller's to enter at once, as from `Upstream.open`.

        Raises what either leg raises, whichever fails first; the decode leg is cancelled then. When the prefill leg
        fails later, the response is aborted with its error, unless the decoder no longer needs the prefiller:
        `is_served`, which is asked in that moment, as the decoder's first words may come in the same one.
        """
        decode = asyncio.create_task(opening)
        try:
            await asyncio.wait((decode, self._task), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
                await asyncio.wait([decode])
            response = decode.result()
        except BaseException:
            # Also for a response that comes in this very moment, and also when this wait is cancelled once more.
            decode.add_done_callback(_give_back)
            await _end(decode)
            raise
        self._task.add_done_callback(lambda task: None if is_served() else _abort_if_failed(task, response))
        return response


def _begun(leg: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(leg)
    task.add_done_callback(_error)  # its error may not be waited for any more
    return task


async def _end(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    """The error of a task that is done; None when it has not failed, or was cancelled."""
    return None if task.cancelled() else task.exception()


def _give_back(decode: asyncio.Task[Response]) -> None:
    """Drop the response of a leg that was given up."""
    if not decode.cancelled() and decode.exception() is None:
        with decode.result():
            pass


def _abort_if_failed(task: asyncio.Task[None], response: Response) -> None:
    error = _error(task)
    if error is not None:
        abort_decode(response, error)
