"""Every connector, both endpoints, streamed and not: the client leaves, and the engines are let go at once.

What counts is the order of things: the engine sees its connection close because the client went, while the request
would otherwise have lasted for ever. Nothing is tried again, and nobody is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.wire.openai import Api
from tests.deployment import generations, request, until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.sim.state import Condition
    from tests.conftest import Deploy

_NOTICED_WITHIN_SECONDS = 1.0


@dataclass(frozen=True)
class Phase:
    """A fault that keeps an engine in a phase for ever, how it is known to be there, and how the end is accounted."""

    name: str
    role: str
    fault: str
    fields: Mapping[str, Any]
    is_there: Condition
    term: str
    """As streamed; an answer that is not streamed is in the hand-over until it is complete."""
    tokens: int = 0
    """So many reach the client of a stream first."""
    pinned: int = 0

    def __str__(self) -> str:
        return self.name


PHASES = [
    Phase("prefill", "prefill", "hang_before_headers", {}, lambda state: state.live == 1, "CF"),
    Phase("hand-over", "decode", "hang_before_headers", {}, lambda state: state.live == 1, "CH", pinned=1),
    Phase("fetching-kv", "decode", "slow_load", {"seconds": 3600}, lambda state: state.live == 1, "CT"),
    Phase("first-token", "decode", "stall_after_tokens", {"tokens": 0}, lambda state: state.pulls == 1, "CT"),
    Phase(
        *("streaming", "decode", "slow_headers", {}),
        lambda state: state.tokens_generated >= 3,
        "CD",
        tokens=3,
    ),
    Phase(
        *("stalled", "decode", "stall_after_tokens", {"tokens": 3}),
        lambda state: state.tokens_generated >= 3,
        "CD",
        tokens=3,
    ),
]


def combinations() -> list[Any]:
    return [
        pytest.param(connector, phase, id=f"{connector}-{phase}")
        for connector in CONNECTORS
        for phase in PHASES
        if connector != "plain" or (phase.role == "decode" and phase.name != "fetching-kv")
    ]
