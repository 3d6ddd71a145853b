"""Answers, requests to engines, metrics and the access log are as they were recorded."""

from __future__ import annotations

from difflib import unified_diff

import pytest

from tests.recorded.conversation import Conversation
from tests.recorded.recording import COMMAND, DIRECTORY, file, recording
from tests.recorded.table import CONVERSATIONS


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.name)
async def test_conversation_is_as_recorded(conversation: Conversation) -> None:
    recorded = file(conversation).read_text(encoding="utf-8").splitlines()
    now = (await recording(conversation)).splitlines()
    if differences := list(unified_diff(recorded, now, "recorded", "now", lineterm="", n=2)):
        command = f"{COMMAND} {conversation.name}"
        pytest.fail("\n".join([*differences, f"If it is meant to change: {command}"]), pytrace=False)


def test_recordings_are_those_of_the_table() -> None:
    assert len({conversation.name for conversation in CONVERSATIONS}) == len(CONVERSATIONS)
    assert sorted(DIRECTORY.iterdir()) == sorted(map(file, CONVERSATIONS))
