"""An answer that loses its decoder is the same answer: behind each token, in thinking, text and tool calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.conformance.resuming import serving
from tests.deployment import Deployment
from tests.dialects import messages, responses, surviving

TOKENS = 137
STEPS = {"recomputed": 1, "killed": 3, "aborted": 3, "stalled": 12}
"""Places that are tried by the short suite, which has less time; the full one tries them all."""
LOST = [
    (fault, dialect, profile, stream)
    for fault in STEPS
    for dialect in ("messages", "responses")
    for profile in ("v0.23", "v0.33")
    if fault != "aborted" or profile == "v0.33"  # older engines say `tool_calls` once a call has begun
    for stream in (False, True)
]


@pytest.mark.covering("fault dialect profile stream", LOST)
async def test_streamed_and_whole_answers_are_equal(
    pytestconfig: pytest.Config, fault: str, dialect: str, profile: str, stream: bool
) -> None:
    step = 1 if pytestconfig.getoption("full") else STEPS[fault]
    first = 0 if fault == "recomputed" else 1  # before it, another decoder is needed: see below
    asking = partial(ask, dialect, stream)
    assert not await surviving.differences(asking, profile, fault, range(first, TOKENS, step))


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_lost_decoder_is_replaced_before_the_first_token(dialect: str, stream: bool) -> None:
    expected, answers = await surviving.from_another_decoder(partial(ask, dialect, stream), "v0.33")
    assert answers == [expected] * len(answers)


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_late_first_token_has_an_error_message(dialect: str, stream: bool) -> None:
    """A timeout is not retried."""
    asked = messages if dialect == "messages" else responses
    async with serving("v0.33", timeouts={"first_token_seconds": 0.1}) as gateway:
        for decoder in gateway.decoders:
            decoder.faults.add(surviving.FAULTS["stalled"], path="/v1/chat", tokens=0)
        answer = await asked.ask(gateway, asked.story(stream=stream))
    assert answer.status == 504
    assert answer.json["error"]["type"] == ("timeout_error" if dialect == "messages" else "server_error")


async def ask(dialect: str, stream: bool, gateway: Deployment) -> dict[str, Any]:
    if dialect == "messages":
        return messages.message(await messages.ask(gateway, messages.story(stream=stream)))
    return responses.response(await responses.ask(gateway, responses.story(stream=stream)))
