"""An API that is translated to chats, with arbitrary bodies and answers of engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, cast

import orjson

from proxy.common.errors import BadRequest, GatewayError
from proxy.dialects.base import AnsweredAttempt
from proxy.dialects.call import Call
from proxy.dialects.requests import parse_body
from proxy.dialects.segment import Meaning
from proxy.dialects.translated import AnswerParts, ChatCompletion, TranslatedDialect
from proxy.settings import Cost
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.python_json import dumps, loads
from proxy.wire.sse import EventSplitter
from tests.asking import Answer
from tests.dialects.validators import check
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    data:\x20{"choices":[{"index":0, }]}\n\n "delta":{ "message":{ "content": "reasoning": "reasoning_content":
    "tool_calls": [{"index":0,"id":"a","function":{"name":"f","arguments":" "}}]} "index": "id": "function": "name":
    "arguments": "finish_reason": "stop" "length" "tool_calls" "abort" "stop_reason": "usage":
    {"prompt_tokens":1,"completion_tokens":2} data:\x20{"choices":[],"usage":{"completion_tokens":2}}\n\n
    data:\x20[DONE]\n\n {"type":"text","text":"a"} [{ }] "type": "text": "input": "messages": "role": "user"
    "assistant" "model": "m" "max_tokens":5 "stream":true "tools": "tool_choice": "tool_use" "tool_result"
    "document" "image" "input_schema": "parameters": "function_call" "custom" "namespace" "call_id": "output":
    "system": "instructions": "thinking": "include": null true 0 -1 1.5 1e9 "" "a" { } [ ] , : \\n \\ud83d \xc3\xbc
    \xff \n\n :\x20ping\n\n {"a":1} "created": "prompt_tokens_details": {"cached_tokens":1} 99999999999999999999
    """
)
_ATTEMPT: Final = cast("AnsweredAttempt", SimpleNamespace(prompt_tokens=7, prompt_tokens_details=None))


def check_translated(dialect: TranslatedDialect, question: bytes, data: bytes) -> None:
    """Check that a body becomes a chat or a BadRequest, and an answer a valid one or an error."""
    kind, raw = data[0] if data else 0, spelled(data[1:], WORDS)
    if kind % 3 == 0:
        _check_request(dialect, raw)
        return
    call = dialect.parse_request(parse_body(question), Cost(), {})
    if kind % 3 == 1:
        _check_stream(dialect, call, raw)
    else:
        _check_whole(dialect, call, raw)


def _check_request(dialect: TranslatedDialect, raw: bytes) -> None:
    try:
        call = dialect.parse_request(parse_body(raw), Cost(), {})
    except BadRequest as refused:
        assert refused.message  # noqa: PT017 both results are right
        return
    assert isinstance(call.values["messages"], list)


def _check_stream(dialect: TranslatedDialect, call: Call, raw: bytes) -> None:
    rendering = dialect.make_rendering(call, dialect.split_into_units(call, Cost(), 1))
    assert isinstance(rendering, AnswerParts)
    rendering.begin_decoder_answer(_ATTEMPT, goes_on=False)
    segment, output = dialect.make_segment(), []
    try:
        for event in EventSplitter().split_chunk(raw):
            if segment.read_event(event) is Meaning.CONTENT:
                output.append(rendering.render(segment.payload))  # noqa: PERF401 items before an error count
        if not segment.is_finished or not rendering.has_begun:
            return
        output.append(rendering.render_final_events([segment.usage], {}))
        is_whole = True
    except UnreadableMember:
        output.append(rendering.error_event(GatewayError("the answer cannot be read")))
        is_whole = False
    except GatewayError as error:
        output.append(rendering.error_event(error))
        is_whole = False
    headers = {"content-type": "text/event-stream"}
    check(dialect.path, Answer(200, headers, b"".join(output), is_whole), streams=True)


def _check_whole(dialect: TranslatedDialect, call: Call, raw: bytes) -> None:
    try:
        values: Any = loads(raw)
    except orjson.JSONDecodeError:
        return
    if not isinstance(values, dict):
        return
    try:
        body = dumps(dialect.make_answer(call, ChatCompletion.read_answer(values)))
    except (UnreadableMember, GatewayError):
        return
    check(dialect.path, Answer(200, {}, body, is_whole=True), streams=False)
