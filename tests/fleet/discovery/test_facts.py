"""What an engine is asked when it comes up, beside its health: whether the streams of its chats tell token ids."""

from __future__ import annotations

import pytest

from proxy.balancer.engines import EngineFacts, EngineVersion, Identity
from proxy.fleet.discovery.facts import needs_chat_ids_question, with_chat_ids
from proxy.upstream import BufferedResponse


@pytest.mark.parametrize(
    ("kind", "version", "is_asked"),
    [
        ("SGLang", (0, 5, 23), True),
        ("SGLang", (0, 5, 16), False),
        ("SGLang", (0, 0), False),
        ("vLLM", (0, 33), False),
        (None, (0, 33), False),
    ],
)
def test_who_is_asked(kind: str | None, version: EngineVersion, is_asked: bool) -> None:
    assert needs_chat_ids_question(EngineFacts(version, identity=Identity(kind=kind))) is is_asked


@pytest.mark.parametrize(
    ("answer", "tells"),
    [
        (BufferedResponse(400, {}, b'{"message":"temperature must be non-negative, got -1.0."}'), True),
        (
            BufferedResponse(400, {}, b'{"message":"return_token_ids is not supported with streaming on /v1/chat"}'),
            False,
        ),
        (BufferedResponse(400, {}, b'{"message":"return_token_ids, temperature"}'), False),
        (BufferedResponse(400, {}, b'{"message":"no such model"}'), False),
        (BufferedResponse(401, {}, b'{"message":"temperature"}'), False),
        (BufferedResponse(200, {}, b"data: temperature"), False),
        (None, False),
    ],
)
def test_what_an_answer_tells(answer: BufferedResponse | None, tells: bool) -> None:
    setup = with_chat_ids(EngineFacts(), answer).identity.setup
    assert setup is not None
    assert setup.has_chat_token_ids is tells
