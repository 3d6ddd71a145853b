"""What the gateway and the process that subscribes tell each other: lines of JSON through pipes."""

from __future__ import annotations

from typing import Literal

import msgspec

Word = Literal["lost", "replayed", "started_anew"]
"""What befell a subscription: one of terms.KV_EVENT_GAPS."""


class EventSource(msgspec.Struct, frozen=True):
    """Where one rank of an instance publishes."""

    instance: str
    """Backend.key."""
    endpoint: str
    """tcp://host:port"""
    replay_endpoint: str | None = None
    topic: str = ""


class SubscribeTo(msgspec.Struct):
    """To the process: what to subscribe to from now on, and nothing else."""

    sources: list[EventSource]


class InstanceReport(msgspec.Struct):
    """From the process, of one instance, all of whose ranks are heard."""

    instance: str
    count: tuple[int, int, bool, int]
    """A CacheCount."""
    events: dict[str, int]
    """How many have come since the last time, by kind."""
    words: dict[Word, int]
    """What has befallen since, and how often."""
    why: str = ""
    """What was wrong with the last one that could not be read."""
    unopened: str = ""
    """An endpoint that nothing can be heard from, and why; empty: none has come to it."""
