"""An attempt whose legs a coroutine sends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from proxy.connectors.attempt import Attempt
from proxy.connectors.concurrent import PrefillLeg
from proxy.connectors.legs import Leg, Pair, fail, finish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proxy.connectors.legs import Legs
    from proxy.upstream import Upstream

_Answer = TypeVar("_Answer")


@asynccontextmanager
async def opened(legs: Legs, upstream: Upstream) -> AsyncIterator[Attempt]:
    """Drive an attempt from a coroutine; see Connector.open."""
    beside: PrefillLeg | None = None
    try:
        step = next(legs)
        while not isinstance(step, Attempt):
            try:
                result: object
                if isinstance(step, Leg):
                    if step.then is not None:
                        upstream.preconnect(step.then)
                    result = await _sent(step, upstream.fetch if step.is_whole else upstream.open)
                elif isinstance(step, Pair):
                    beside = PrefillLeg.of(step, _prefilled(step, upstream))
                    result = await beside.race(_sent(step.decode, upstream.open))
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
    finally:
        if beside is not None:
            await beside.end()


async def _sent(leg: Leg, send: Callable[..., Awaitable[_Answer]]) -> _Answer:
    """What comes of a leg that is sent by Upstream.open or Upstream.fetch. Raises UpstreamError."""
    return await send(
        leg.backend,
        leg.path,
        leg.body,
        leg.headers,
        answer_seconds=leg.answer_seconds,
        resend_if_stale=leg.resend_if_stale,
    )


async def _prefilled(pair: Pair, upstream: Upstream) -> None:
    """Read the prefiller's answer to the end. Raises UpstreamError."""
    try:
        pair.read(*await _sent(pair.prefill, upstream.fetch))
    except Exception as error:
        pair.error = error
        raise
