"""An attempt whose legs a coroutine sends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from proxy.connectors.attempt import Attempt
from proxy.connectors.concurrent import PrefillLeg
from proxy.connectors.legs import Leg, Pair, fail, finish
from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.connectors.legs import Legs
    from proxy.upstream import Response, Upstream


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
                    result = await _sent(step, upstream)
                elif isinstance(step, Pair):
                    beside = PrefillLeg.of(step, _prefilled(step, upstream))
                    result = await beside.race(_opened(step.decode, upstream))
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


async def _sent(leg: Leg, upstream: Upstream) -> object:
    """What comes of a leg. Raises UpstreamError."""
    if leg.then is not None:
        upstream.preconnect(leg.then)
    return await (_fetched if leg.is_whole else _opened)(leg, upstream)


async def _opened(leg: Leg, upstream: Upstream) -> Response:
    return await upstream.open(
        leg.backend,
        leg.path,
        leg.body,
        leg.headers,
        answer_seconds=leg.answer_seconds,
        resend_if_stale=leg.resend_if_stale,
    )


async def _fetched(leg: Leg, upstream: Upstream) -> tuple[Response, bytes]:
    return await upstream.fetch(
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
        pair.prefilled(*await _fetched(pair.prefill, upstream))
    except UpstreamError as error:
        pair.error = error
        raise
