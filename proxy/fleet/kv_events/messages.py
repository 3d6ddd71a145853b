"""Messages between the worker and the subscriber process: lines of JSON through pipes."""

from __future__ import annotations

from typing import Literal

import msgspec

Gap = Literal["lost", "replayed", "started_anew"]
"""A gap in the events of a rank: one of terms.KV_EVENT_GAPS."""


class EventSource(msgspec.Struct, frozen=True):
    """Endpoints at which one rank of an instance publishes."""

    instance: str
    """Backend.key."""
    endpoint: str
    """tcp://host:port"""
    replay_endpoint: str | None = None
    """Endpoint that repeats lost events; None if there is none."""
    topic: str = ""


class SubscribeTo(msgspec.Struct):
    """A command to the process: subscribe to these sources, and to no others."""

    sources: list[EventSource]


class InstanceReport(msgspec.Struct):
    """A report of the process on one instance, over all its ranks, since its last report."""

    instance: str
    """Backend.key."""
    count: tuple[int, int, bool, int]
    """The fields of a CacheCount."""
    events: dict[str, int]
    """Number of events by kind."""
    gaps: dict[Gap, int]
    """Number of gaps by kind."""
    unreadable: str = ""
    """Problem of the last message that could not be read; empty if there was none."""
    unopened: str = ""
    """An endpoint that cannot be opened, and the reason; empty if there is none."""
