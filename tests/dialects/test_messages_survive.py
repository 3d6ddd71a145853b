"""A message whose decoder is lost is the same message: behind each token, in thinking, text and tool calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.dialects import surviving
from tests.dialects.messages import ask, message, story

if TYPE_CHECKING:
    from tests.deployment import Deployment

TOKENS = 137


async def asking(gateway: Deployment, body: dict[str, Any]) -> dict[str, Any]:
    return message(await ask(gateway, body))


LOST = [
    (fault, step, profile, stream)
    for fault, step in (("recomputed", 1), ("killed", 3), ("stalled", 12))
    for profile in ("v0.23", "v0.33")
    for stream in (False, True)
]


@pytest.mark.timeout(60)
@pytest.mark.covering("fault step profile stream", LOST)
async def test_it_is_the_same_message(fault: str, step: int, profile: str, stream: bool) -> None:
    ask_for = partial(asking, body=story(stream=stream))
    first = 0 if fault == "recomputed" else 1  # before it, what is tried again is what chats have tried again
    assert not await surviving.differences(ask_for, profile, fault, range(first, TOKENS, step))
