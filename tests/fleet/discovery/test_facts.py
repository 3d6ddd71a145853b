"""The question to SGLang whether its chat streams report token ids."""

from __future__ import annotations

import pytest

from proxy.balancer.engines import EngineFacts, EngineIdentity, EngineVersion
from proxy.fleet.discovery.facts import needs_chat_ids_question, update_chat_ids
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
def test_only_recent_sglang_is_asked_for_chat_token_ids(
    kind: str | None, version: EngineVersion, is_asked: bool
) -> None:
    assert needs_chat_ids_question(EngineFacts(version, identity=EngineIdentity(engine_kind=kind))) is is_asked


@pytest.mark.parametrize(
    ("answer", "reports_ids"),
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
def test_answer_shows_whether_chats_have_token_ids(answer: BufferedResponse | None, reports_ids: bool) -> None:
    setup = update_chat_ids(EngineFacts(), answer).identity.engine_setup
    assert setup is not None
    assert setup.has_chat_token_ids is reports_ids
