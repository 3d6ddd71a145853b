"""Engines with a reasoning parser, and chats that are interrupted in the reasoning, in the content or between them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.answers import CHAT, ask, difference, tokens_of
from tests.real.cluster import Cluster
from tests.real.report import Show

TOKENS = 120
CHATS = 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_ids", [True, False])
def test_interrupted_chat_keeps_reasoning_and_content_apart(
    thinking: Cluster, with_ids: bool, stream: bool, show: Show
) -> None:
    seen = []
    differences = {}
    for body, end in chats_with_reasoning(thinking):
        body["return_token_ids"] = with_ids
        alone = ask(thinking.single.port, CHAT, **body, stream=stream)
        middle = (1, end // 2, end - 1, end, end + 1, end + 2, (end + TOKENS) // 2)
        for tokens in range(TOKENS) if with_ids and stream else middle:
            thinking.engines.orders.give(tokens)
            answer = ask(thinking.gateway.port, CHAT, **body, stream=stream)
            assert thinking.engines.orders.left() == []
            if answer != alone:
                differences[end, tokens] = difference(answer, alone)
        seen.append(f"{end} tokens of reasoning")
    assert differences == {}
    show(f"{', '.join(seen)} of {TOKENS}")


def chats_with_reasoning(cluster: Cluster) -> list[tuple[dict[str, Any], int]]:
    """Bodies whose answers have reasoning and content, and the number of reasoning tokens, the end marker included."""
    (begin,), (end,) = (tokens_of(cluster.single.port, marker) for marker in ("<think>", "</think>"))
    found = []
    for number in range(200):
        body = {
            "messages": [{"role": "user", "content": f"{number}: what do you think?"}],
            "chat_template_kwargs": {"thinking": True},
            "max_tokens": TOKENS,
        }
        choice = ask(cluster.single.port, CHAT, **body).choices[0]
        markers = [token for token in choice.token_ids if token in (begin, end)]
        if markers == [end] and min(len(choice.reasoning), len(choice.text)) > 20 and choice.finish_reason == "length":
            found.append((body, choice.token_ids.index(end) + 1))
            if len(found) == CHATS:
                return found
    raise AssertionError("no chat has both reasoning and content")
