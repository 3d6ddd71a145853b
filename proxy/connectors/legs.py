"""The legs of an attempt that come one after the other, as a generator: what is to be done next, and no IO.

A protocol writes the order of its steps once. Its driver sends what it asks for: `opened` does so from a
coroutine, the fast path from the callbacks of its connections.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.connectors.attempt import Attempt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Mapping

    from proxy.backend import Backend
    from proxy.upstream import Response, Upstream
    from proxy.wire.document import Body


@dataclass(slots=True)
class Leg:
    """One request to one engine; see Upstream.open."""

    backend: Backend
    path: str
    body: Body
    headers: Mapping[str, str]
    """Lower-case names."""
    answer_seconds: float
    resend_if_stale: bool = False
    is_whole: bool = False
    """What is wanted is the whole answer; see Legs."""


if TYPE_CHECKING:
    Legs = Generator[Leg | Response | Attempt, Any, None]
    """Yields what is to be done, and is sent what came of it, or has the UpstreamError thrown in:

    - a Leg is sent; what comes of it is its Response, once the headers are there; or, if it is to be whole, the
      answer and its body, and then its connection has been given back;
    - a Response is read; what comes of it is its whole body, as bytes;
    - the Attempt, at last, is for the driver: its answer is to be taken. Then the generator is resumed once more,
      or has the error thrown in that the answer ended with. It gives every lease and connection back, and ends.

    Closing it early, or throwing anything else in, gives everything back, too.
    """


@asynccontextmanager
async def opened(legs: Legs, upstream: Upstream) -> AsyncIterator[Attempt]:
    """Drive an attempt from a coroutine; see Connector.open."""
    step = next(legs)
    while not isinstance(step, Attempt):
        try:
            if isinstance(step, Leg):
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


def finish(legs: Legs) -> None:
    """The answer was taken: let the attempt end."""
    if next(legs, None) is not None:  # no exception has to be made and caught
        raise RuntimeError("an attempt goes on behind its answer")


def fail(legs: Legs, error: BaseException) -> None:
    """The answer, or what was under way, ended with this error: let the attempt end. Raises the error."""
    try:
        legs.throw(error)
    except StopIteration:
        raise error from None
    raise RuntimeError("an attempt goes on behind its failure")
