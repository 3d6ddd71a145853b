"""Listeners of generation requests, which `assembly` registers and which do not know each other.

Requests are counted and logged after their end, together with others that ended at the same moment, because a batch
costs a fraction. A scrape, or another log line, settles the batch first.
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

_BATCH_SECONDS: Final = 0.2
# Maximum number of requests in a batch, however fast they come. A batch of this size takes about 2 ms, in which no
# token passes.
_MAX_BATCH: Final = 128
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class RequestListener:
    """A listener that receives the events of requests.

    Methods do nothing by default. They must not wait. Their exceptions are logged and do not affect the request or
    other listeners.
    """

    def request_began(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Handle the beginning of a new request.

        `headers`: the request's headers, with any letter case that `get` accepts. The trace context is added to them.
        """

    def request_ended(self, record: RequestRecord) -> None:
        """Take a request that has ended, at most a moment ago: at `record.ended`. The record is closed."""

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        """Take the requests of a batch, each list in the order of the events.

        `began`: new requests. `ended`: finished requests, whose records are closed. A short request is in both.
        """


class RequestObservers:
    """The listeners to the requests of one worker."""

    def __init__(self, listeners: Sequence[RequestListener] = ()) -> None:
        self._begin_listeners: tuple[RequestListener, ...] = ()
        self._end_listeners: tuple[RequestListener, ...] = ()
        self._batch_listeners: tuple[RequestListener, ...] = ()
        self._begun_records: list[RequestRecord] = []
        self._ended_records: list[RequestRecord] = []
        self._call_later: Callable[..., object] | None = None
        self._will_settle = False
        for listener in listeners:
            self.add_listener(listener)

    def add_listener(self, listener: RequestListener) -> None:
        """Register a listener for requests that begin from now on."""
        if _overrides_method(listener, "request_began"):
            self._begin_listeners += (listener,)
        if _overrides_method(listener, "handle_batch"):
            self._batch_listeners += (listener,)
        if _overrides_method(listener, "request_ended"):
            self._end_listeners += (listener,)

    @contextmanager
    def collect_in_batches(self, call_later: Callable[..., object]) -> Iterator[None]:
        """Collect the ends of requests in batches inside this context.

        Outside it, each end is passed on at once. Leaving passes on the rest. `call_later`: method of the event loop.
        """
        self._call_later = call_later
        try:
            yield
        finally:
            self._call_later, self._will_settle = None, False
            self.flush_batch()

    def begin_record(
        self, api_label: str, request_id: str, headers: Mapping[str, str] = _NO_HEADERS, started_at: float | None = None
    ) -> RequestRecord:
        """Create the record of a new request.

        Args:
            api_label: Label of the route's dialect.
            headers: See RequestListener.
            started_at: Start of the request in seconds of the record's clock (time.monotonic); None: now.
        """
        record = RequestRecord(api_label, request_id, monotonic, started_at)
        for listener in self._begin_listeners:
            _notify_listener(listener.request_began, record, headers)
        self._begun_records.append(record)
        if not self._will_settle:
            self._schedule_flush()
        return record

    def end_record(self, record: RequestRecord) -> None:
        """Record the end of a request, and tell the listeners."""
        record.ended = record.clock()
        self._ended_records.append(record)
        if not self._will_settle:
            self._schedule_flush()
        elif len(self._ended_records) == _MAX_BATCH:
            self._call_after(0, self.flush_batch)

    def flush_batch(self) -> None:
        """Pass on the current batch. May be called at any time in the event loop's thread."""
        # No code may run between the read of a list and its replacement, not even garbage collection.
        next_began: list[RequestRecord] = []
        next_ended: list[RequestRecord] = []
        began, self._begun_records = self._begun_records, next_began
        pending, self._ended_records = self._ended_records, next_ended
        if not began and not pending:
            return
        ended: list[RequestRecord] = []
        for record in pending:
            # An exception for one request does not affect the others.
            try:
                record.close_record()
            except Exception:
                logger.exception("requests: the end of a request was not recorded: %s", record.request_id)
            else:
                ended.append(record)
        for listener in self._batch_listeners:
            _notify_listener(listener.handle_batch, began, ended)
        for listener in self._end_listeners:
            for record in ended:
                _notify_listener(listener.request_ended, record)

    def _schedule_flush(self) -> None:
        if self._call_later is None:
            self.flush_batch()
            return
        self._will_settle = True
        self._call_after(_BATCH_SECONDS, self._on_timer)

    def _call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function later, where ends are collected in batches."""
        assert self._call_later is not None
        # In an empty context, because log lines of the batch do not belong to the current request.
        self._call_later(seconds, function, context=Context())

    def _on_timer(self) -> None:
        self._will_settle = False
        self.flush_batch()


def _notify_listener(listener_method: Callable[..., None], *arguments: Any) -> None:
    """Call a listener of requests, and log its exceptions."""
    try:
        listener_method(*arguments)
    except Exception:
        logger.exception("requests: a request listener failed: %s", listener_method.__qualname__)


def _overrides_method(listener: RequestListener, method_name: str) -> bool:
    return getattr(type(listener), method_name) is not getattr(RequestListener, method_name)
