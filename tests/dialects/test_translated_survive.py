"""An answer that loses its decoder is the same answer: behind each token, in thinking, text and tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.dialects import messages, responses, surviving

if TYPE_CHECKING:
    from tests.deployment import Deployment

TOKENS = 137
LOST = [
    (fault, step, dialect, profile, stream)
    for fault, step in (("recomputed", 1), ("killed", 3), ("stalled", 12))
    for dialect in ("messages", "responses")
    for profile in ("v0.23", "v0.33")
    for stream in (False, True)
]


@pytest.mark.timeout(60)
@pytest.mark.covering("fault step dialect profile stream", LOST)
async def test_it_is_the_same_answer(fault: str, step: int, dialect: str, profile: str, stream: bool) -> None:
    async def asking(gateway: Deployment) -> dict[str, Any]:
        if dialect == "messages":
            return messages.message(await messages.ask(gateway, messages.story(stream=stream)))
        return responses.response(await responses.ask(gateway, responses.story(stream=stream)))

    first = 0 if fault == "recomputed" else 1  # before it, what is tried again is what chats have tried again
    assert not await surviving.differences(asking, profile, fault, range(first, TOKENS, step))
