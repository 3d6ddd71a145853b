"""An attempt whose legs a coroutine sends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.connectors.attempt import Attempt
from proxy.connectors.legs import Leg, fail, finish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.connectors.legs import Legs
    from proxy.upstream import Upstream


@asynccontextmanager
async def opened(legs: Legs, upstream: Upstream) -> AsyncIterator[Attempt]:
    """Drive an attempt from a coroutine; see Connector.open."""
    step = next(legs)
    while not isinstance(step, Attempt):
        try:
            if isinstance(step, Leg):
                if step.then is not None:
                    upstream.preconnect(step.then)
                send = upstream.fetch if step.is_whole else upstream.open
                result: object = await send(
                    step.backend,
                    step.path,
                    step.body,
                    step.headers,
                    answer_seconds=step.answer_seconds,
                    resend_if_stale=step.resend_if_stale,
                )
            else:
                result = await step.read()
        except BaseException as error:
            step = legs.throw(error)
        else:
            step = legs.send(result)
    try:
        yield step
    except BaseException as error:
        fail(legs, error)
    else:
        finish(legs)
