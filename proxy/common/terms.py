"""Names that the code shares with logs, metrics and messages."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Final


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: `1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Stage(StrEnum):
    """Stage of a unit of a request. The value is the second letter of `term` in the access log."""

    QUEUE = "Q"
    ENCODE = "E"
    PREFILL = "F"
    HANDOFF = "H"
    FIRST_TOKEN = "T"
    STREAM = "D"

    @cached_property
    def label(self) -> str:
        """Return the metric label: the name of the member in lower case."""
        return self.name.lower()


class Action(StrEnum):
    """How an interrupted answer is continued. The value is the metric label."""

    RESTART = "restart"
    """Generate from the beginning, because the client has received nothing."""
    COMPLETION_TOKENS = "completion_tokens"
    """Continue a completion from its token IDs."""
    CHAT_TOKENS = "chat_tokens"
    """Continue a chat from token IDs that the engine accepts instead of messages."""
    ROLL_BACK = "roll_back"
    """Continue a chat from token IDs before a tool call of which the client has received nothing."""
    RAW_TOKENS = "raw_tokens"
    """Continue a chat as a completion from token IDs. The gateway parses the text."""
    SUFFIX = "suffix"
    """Continue a chat as a completion inside tool calls whose beginning the client has received."""
    REPLAY = "replay"
    """Generate from the beginning, and send the part that the client lacks while the rest is the same."""
    FINISH = "finish"
    """End the answer, because nothing is left to generate."""


KV_EVENTS: Final = ("stored", "removed", "cleared", "unreadable")
"""Kinds of KV events."""
KV_EVENT_GAPS: Final = ("lost", "replayed", "started_anew")
"""Kinds of gaps between KV events: events were lost, events were resent, or the publisher restarted."""
