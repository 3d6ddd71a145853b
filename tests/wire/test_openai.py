"""The few payload fields the gateway reads or writes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.common.backend import Backend, Role
from proxy.common.errors import BadRequest, Failure, NoBackendAvailable, UpstreamError
from proxy.wire.openai import (
    DONE_EVENT,
    Api,
    data_event,
    engine_error_text,
    error_body,
    error_event,
    error_type_of_status,
    replace_prompt_details,
)
from proxy.wire.sse import EventSplitter

DECODER = Backend(Role.DECODE, "10.0.0.1", 8000)


def payload_of(event: bytes) -> Any:
    splitter = EventSplitter()
    (only,) = splitter.split_chunk(event)
    assert splitter.pending_bytes == b""
    assert only.data is not None
    return orjson.loads(only.data)


def engine_error(body: bytes | None) -> UpstreamError:
    status = None if body is None else 500
    return UpstreamError(Failure.STATUS, DECODER, "decode instance: failed", engine_status=status, body=body)


def test_each_api_has_its_route() -> None:
    assert Api.CHAT.path == "/v1/chat/completions"
    assert Api.COMPLETIONS.path == "/v1/completions"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_type_of_an_error_follows_its_status(status: int, expected: str) -> None:
    assert error_type_of_status(status) == expected


def test_gateway_error_has_the_openai_format() -> None:
    assert orjson.loads(error_body(BadRequest("n must be a positive integer", param="n"))) == {
        "error": {
            "message": "n must be a positive integer",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }
    assert orjson.loads(error_body(NoBackendAvailable(Role.PREFILL))) == {
        "error": {
            "message": "no healthy prefill instance is available",
            "type": "server_error",
            "param": None,
            "code": "no_healthy_prefill",
        }
    }


def test_error_event_is_one_event_and_no_done_follows() -> None:
    assert payload_of(error_event(engine_error(None)))["error"]["code"] == "decode_status"


def test_error_event_keeps_the_error_of_the_engine() -> None:
    told = b'{"error": {"message":"\\u00fc",  "code":500}}'
    assert error_event(engine_error(told)) == b"data: " + told + b"\n\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad Gateway</html>",
        b'{"detail":"Not Found"}',
        b'{"error":null}',
        b'["error"]',
        b'{\n"error": {"message": "no"}\n}',
        b'{\r"error": {"message": "no"}}',
    ],
)
def test_error_event_replaces_errors_that_clients_would_not_recognise(body: bytes) -> None:
    assert payload_of(error_event(engine_error(body)))["error"]["message"] == "decode instance: failed"


def test_splitter_reads_the_events_of_the_gateway() -> None:
    assert payload_of(data_event({"text": "two\nlines \u2028 ü"})) == {"text": "two\nlines \u2028 ü"}
    assert EventSplitter().split_chunk(DONE_EVENT)[0].data == b"[DONE]"


@pytest.mark.parametrize(
    ("decoders", "prefillers", "expected"),
    [
        ({"cached_tokens": 9, "audio_tokens": 1}, {"cached_tokens": 4}, {"cached_tokens": 4, "audio_tokens": 1}),
        ({"created_cache_tokens": 0}, {"created_cache_tokens": 192}, {"created_cache_tokens": 192}),
        (None, {"cached_tokens": 4}, {"cached_tokens": 4}),
        ("nonsense", {"cached_tokens": 4}, {"cached_tokens": 4}),
        ({"cached_tokens": 9}, None, None),
    ],
)
def test_prefillers_details_replace_the_decoders(decoders: Any, prefillers: Any, expected: Any) -> None:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": decoders}
    assert replace_prompt_details(usage, prefillers) == {"prompt_tokens": 10, "prompt_tokens_details": expected}


def test_usage_without_details_stays_as_it_is() -> None:
    for usage in ({"prompt_tokens": 10}, {"prompt_tokens": 10, "prompt_tokens_details": None}):
        assert replace_prompt_details(usage, None) is usage


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("CUDA error: an illegal memory access\nCompile with...", "CUDA error: an illegal memory access Compile"),
        ("This model's maximum context length is 4096 tokens.", "This model's maximum context length is 4096 tokens"),
        ("1 validation error: [{'type': 'string_type', 'input': 'a secret'}]", "1 validation error"),
        ("Invalid value 'the secret of a prompt that is long' for prompt", "Invalid value"),
        ('Cannot parse "a secret"', "Cannot parse"),
        ("x" * 300, "x" * 200),
        ("bell\x07 and \x1b[31m red", "bell and"),
    ],
)
def test_words_of_an_engine_contain_no_quotation(message: str, words: str) -> None:
    for body in ({"error": {"message": message}}, {"object": "error", "message": message}, {"detail": message}):
        found = engine_error_text(orjson.dumps(body))
        assert found.startswith(words)
        assert "secret" not in found
        assert found.isprintable()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error":{"message":7}}', b'{"error":true}', b'{"error":null}']
)
def test_body_without_a_message_has_no_words(body: bytes) -> None:
    assert engine_error_text(body) == ""
