"""Words that logs, metrics and messages share with the code that acts on them."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Final


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: `1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Stage(StrEnum):
    """Where a unit of a request is; the letter stands second in the access line's `term`."""

    QUEUE = "Q"
    ENCODE = "E"
    PREFILL = "F"
    HANDOFF = "H"
    FIRST_TOKEN = "T"
    STREAM = "D"

    @cached_property
    def label(self) -> str:
        """The metric label: the member's name in lower case."""
        return self.name.lower()


class Action(StrEnum):
    """What is done about an answer that was broken off; the value is the metric label."""

    RESTART = "restart"
    """The client has nothing: from the beginning."""
    COMPLETION_TOKENS = "completion_tokens"
    """A completion, from its token ids."""
    CHAT_TOKENS = "chat_tokens"
    """A chat, from token ids that the engine takes in place of the messages."""
    ROLL_BACK = "roll_back"
    """Likewise, from before a tool call of which the client has nothing."""
    RAW_TOKENS = "raw_tokens"
    """A chat, from token ids as a completion, whose text is parsed here."""
    SUFFIX = "suffix"
    """Likewise, in the middle of tool calls that the client has the beginning of."""
    REPLAY = "replay"
    """From the beginning, showing what is new as long as the rest is the same."""
    FINISH = "finish"
    """Nothing is left to generate."""


KV_EVENTS: Final = ("stored", "removed", "cleared", "unreadable")
"""What KV events say."""
KV_EVENT_GAPS: Final = ("lost", "replayed", "started_anew")
"""How KV events do not follow each other: some were lost, or came when they were asked for again, or the publisher has
started anew."""
