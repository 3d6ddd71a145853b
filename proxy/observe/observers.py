"""Who is told of generation requests: each listener is registered in assembly, and knows of no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.observe.outcome import outcome_of
from proxy.observe.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.observe.outcome import Outcome
    from proxy.observe.timeline import Timeline
    from proxy.terms import Stage


class RequestListener:
    """Hears of what happens to requests. Each method does nothing unless it is overridden, must not wait, and costs
    nothing where it is not.
    """

    def request_began(self, record: RequestRecord) -> None:
        """A request has come; nothing of it was read but its path."""

    def stage_ended(self, timeline: Timeline, stage: Stage, began: float, ended: float) -> None:
        """A unit of a request has been in a stage from one second of its clock to another."""

    def request_ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request is over, however it ended."""


class Observers:
    """The listeners of one worker."""

    def __init__(self, listeners: Sequence[RequestListener] = ()) -> None:
        self._at_begin: tuple[RequestListener, ...] = ()
        self._at_stages: tuple[RequestListener, ...] = ()
        self._at_end: tuple[RequestListener, ...] = ()
        for listener in listeners:
            self.add(listener)

    def add(self, listener: RequestListener) -> None:
        """Let it hear of the requests that come from now on."""
        self._at_begin += _if_overridden(listener, "request_began")
        self._at_stages += _if_overridden(listener, "stage_ended")
        self._at_end += _if_overridden(listener, "request_ended")

    def begin(self, label: str, request_id: str) -> RequestRecord:
        """A request has come to a route whose dialect has this label."""
        record = RequestRecord(label, request_id, stage_listeners=self._at_stages)
        for listener in self._at_begin:
            listener.request_began(record)
        return record

    def end(self, record: RequestRecord) -> None:
        """The request is over."""
        outcome = outcome_of(record)
        for listener in self._at_end:
            listener.request_ended(record, outcome)


def _if_overridden(listener: RequestListener, method: str) -> tuple[RequestListener, ...]:
    is_default = getattr(type(listener), method) is getattr(RequestListener, method)
    return () if is_default else (listener,)
