"""The legs of an attempt, one after the other or two at a time, as a generator: what is to be done next, and no IO.

A protocol writes the order of its steps once. `leg_driver.LegDriver` sends what it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from proxy.common.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping
    from types import TracebackType

    from proxy.common.backend import Backend
    from proxy.connectors.attempt import Attempt
    from proxy.upstream import Response
    from proxy.upstream.response import EngineResponse
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
    wants_whole: bool = False
    """Whether the whole answer is wanted, and not its stream; see Legs."""
    preconnect_to: Backend | None = None
    """Backend to connect to while this leg runs, because the next leg is likely to go there."""


class Pair:
    """Two legs at the same time: the prefiller's answer is read beside the decoder's, and if one fails both end.

    `with` it around all that the decode leg is needed for, and yield it first; see Legs.

    Left before the prefill leg has ended, that leg is given up. An UpstreamError with which it is left gives way to
    that of the prefill leg, if there is one: a decoder whose KV cache does not come is not to blame for what it says.
    """

    __slots__ = ("_legs", "ended", "error", "read", "stop")

    def __init__(self, prefill: Leg, decode: Leg, read: Callable[[EngineResponse, bytes], None]) -> None:
        self._legs: tuple[Leg, Leg] | None = prefill, decode
        self.error: Exception | None = None
        """Why the prefill leg has failed: an UpstreamError unless the program has a mistake. A driver says so."""
        self.stop: Callable[[], object] | None = None
        """Gives the prefill leg up if it is under way. A driver sets it, which may wait for that."""
        self.ended: Callable[[], Awaitable[None]] | None = None
        """Waits for the end of the prefill leg, and raises its UpstreamError. None: the driver waits for nothing."""
        self.read = read
        """Takes the prefiller's answer and its body. Raises UpstreamError if it has failed."""

    def take_legs(self) -> tuple[Leg, Leg]:
        """Return the prefill leg and the decode leg, once. The pair would keep their bodies as long as the answer."""
        legs, self._legs = self._legs, None
        assert legs is not None
        return legs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stop is not None:
            self.stop()
        if self.error is not None and error is not self.error and isinstance(error, UpstreamError):
            raise self.error from error


if TYPE_CHECKING:
    Legs = Generator[Leg | Pair | Response | Attempt, Any, None]
    """Yields what is to be done, and is sent what came of it, or has the UpstreamError thrown in:

    - a Leg is sent; what comes of it is its Response, once the headers are there; or, if it is to be whole, the
      answer and its body, and then its connection has been given back;
    - of a Pair both legs are sent; what comes of it is the Response of the second, once its headers are there. The
      first one's whole answer is told to the pair when it comes; if it fails, so does the second, whatever it does;
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
