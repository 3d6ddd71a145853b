"""Models whose template takes a message of the system at the beginning only get one there (`models.system_first`)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.dialects.adjustments import SystemMessageJoiner
from proxy.settings import Settings
from tests.conftest import Deploy
from tests.deployment import generations
from tests.dialects import messages, responses

SYSTEM, LATER, HI = (
    {"role": role, "content": text} for role, text in (("system", "a"), ("system", "b"), ("user", "Hi"))
)
JOINED = {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([SYSTEM, HI], None),
        ([HI], None),
        ([SYSTEM, HI, LATER], [JOINED, HI]),
        ([HI, LATER], [LATER, HI]),
        ([SYSTEM, HI, {**LATER, "content": [{"type": "text", "text": "b"}]}, HI], [JOINED, HI, HI]),
    ],
)
def test_later_system_messages_are_joined_to_the_first(given: list[Any], told: list[Any] | None) -> None:
    expected = {} if told is None else {"messages": told}
    assert SystemMessageJoiner(["qwen*"]).changed_chat_members({"model": "qwen-4", "messages": given}) == expected
    assert SystemMessageJoiner(["qwen*"]).changed_chat_members({"model": "kimi", "messages": given}) == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_get_one_and_count_it(deploy: Deploy, stream: bool) -> None:
    gateway = await deploy(1, 1, models={"system_first": ["si?"], "aliases": ["claude-*=sim"]})
    turns = [HI, LATER]
    asked = {"model": "claude-opus-5", "system": "a", "messages": turns}
    assert (await messages.ask(gateway, {**asked, "max_tokens": 8, "stream": stream})).status == 200
    assert (await messages.ask(gateway, asked, path="/v1/messages/count_tokens")).status == 200
    body = {"model": "sim", "input": turns, "instructions": "a", "max_output_tokens": 8, "stream": stream}
    assert (await responses.ask(gateway, body)).status == 200
    counted = [seen for seen in gateway.prefillers[0].requests if seen.path == "/tokenize"]
    seen = [*generations(*gateway.prefillers), *generations(*gateway.decoders), *counted]
    assert [request.body["messages"] for request in seen] == [[JOINED, HI]] * 5


def test_invalid_names_of_models_are_refused() -> None:
    with pytest.raises(ValidationError, match="list of names"):
        Settings.model_validate({"models": {"system_first": [7]}})
