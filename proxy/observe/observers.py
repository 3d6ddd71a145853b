"""Who is told of generation requests: each listener is registered in assembly, and knows of no other.

What a request comes to is counted and written after it has ended, together with others that ended in the same moment:
done for many at once it costs a fraction. Whoever asks in between, by a scrape or by a line of the log, has it done
first.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import Context
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from proxy.observe.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


logger = logging.getLogger(__name__)

_MOMENT_SECONDS: Final = 0.2
# So many are told at once at most, however soon they have come: that takes some 2 ms, in which no token passes.
_MOST: Final = 128
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class RequestListener:
    """Hears of what happens to requests. Each method does nothing unless it is overridden, must not wait, and costs
    nothing where it is not. What it raises is logged, and concerns nobody else.
    """

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """A request has come. `headers`: its own, of any letter case that `get` does not mind, with those that say who
        it is to others who trace it.
        """

    def request_ended(self, record: RequestRecord) -> None:
        """A request is over, however it ended, since `record.ended`: at most a moment. It is closed."""

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        """The requests of a moment at once, each in the order in which that happened: those that have come, and those
        that are over, which are closed. A short one is in both.
        """


class Observers:
    """The listeners of one worker."""

    def __init__(self, listeners: Sequence[RequestListener] = ()) -> None:
        self._at_begin: tuple[RequestListener, ...] = ()
        self._at_end: tuple[RequestListener, ...] = ()
        self._at_settle: tuple[RequestListener, ...] = ()
        self._began: list[RequestRecord] = []
        self._ended: list[RequestRecord] = []
        self._call_later: Callable[..., object] | None = None
        self._will_settle = False
        for listener in listeners:
            self.add(listener)

    def add(self, listener: RequestListener) -> None:
        """Let it hear of the requests that come from now on."""
        if _overrides(listener, "request_began"):
            self._at_begin += (listener,)
        if _overrides(listener, "settle"):
            self._at_settle += (listener,)
        if _overrides(listener, "request_ended"):
            self._at_end += (listener,)

    @contextmanager
    def in_batches(self, call_later: Callable[..., object]) -> Iterator[None]:
        """In this context ends may wait a moment for others, otherwise they are told at once. `call_later` is an event
        loop's. Leaving it tells what waits.
        """
        self._call_later = call_later
        try:
            yield
        finally:
            self._call_later, self._will_settle = None, False
            self.settle()

    def begin(
        self, label: str, request_id: str, headers: Mapping[str, str] = _NO_HEADERS, since: float | None = None
    ) -> RequestRecord:
        """A request has come to a route whose dialect has this label. `headers`: see RequestListener. `since`: when it
        came, in seconds of its record's clock (time.monotonic); None: just now.
        """
        record = RequestRecord(label, request_id, monotonic, since)
        for listener in self._at_begin:
            _tell(listener.request_began, record, headers)
        self._began.append(record)
        if not self._will_settle:
            self._settle_soon()
        return record

    def end(self, record: RequestRecord) -> None:
        """The request is over."""
        record.ended = record.clock()
        self._ended.append(record)
        if not self._will_settle:
            self._settle_soon()
        elif len(self._ended) == _MOST:
            self._call(0, self.settle)

    def settle(self) -> None:
        """Tell now what waits to be told. May be called at any time, on the event loop's thread."""
        # Nothing may come between a look at a list and its replacement, not even a collection of garbage.
        next_began: list[RequestRecord] = []
        next_ended: list[RequestRecord] = []
        began, self._began = self._began, next_began
        over, self._ended = self._ended, next_ended
        if not began and not over:
            return
        ended: list[RequestRecord] = []
        for record in over:
            # A mistake in what is made of one request concerns no other.
            try:
                record.close()
            except Exception:
                logger.exception("what a request came to could not be told: %s", record.request_id)
            else:
                ended.append(record)
        for listener in self._at_settle:
            _tell(listener.settle, began, ended)
        for listener in self._at_end:
            for record in ended:
                _tell(listener.request_ended, record)

    def _settle_soon(self) -> None:
        if self._call_later is None:
            self.settle()
            return
        self._will_settle = True
        self._call(_MOMENT_SECONDS, self._on_time)

    def _call(self, seconds: float, what: Callable[[], None]) -> None:
        """Call it later, where ends may wait."""
        assert self._call_later is not None
        # In a context of its own, because what is logged then does not belong to the request of now.
        self._call_later(seconds, what, context=Context())

    def _on_time(self) -> None:
        self._will_settle = False
        self.settle()


def _tell(tell: Callable[..., None], *what: Any) -> None:
    """A mistake in a listener is not held against the request, and others hear of it all the same."""
    try:
        tell(*what)
    except Exception:
        logger.exception("a listener to requests failed: %s", tell.__qualname__)


def _overrides(listener: RequestListener, method: str) -> bool:
    return getattr(type(listener), method) is not getattr(RequestListener, method)
