"""The legs of an attempt that come one after the other, as a generator: what is to be done next, and no IO.

A protocol writes the order of its steps once. Its driver sends what it asks for: `driver.opened` does so from a
coroutine, the fast path from the callbacks of its connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from proxy.backend import Backend
    from proxy.connectors.attempt import Attempt
    from proxy.upstream import Response
    from proxy.wire.document import Body


@dataclass(slots=True, eq=False)
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
    then: Backend | None = None
    """Whom the next leg will go to, for all that is known: a connection can be opened meanwhile."""


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
