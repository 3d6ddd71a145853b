"""What in an answer of SGLang is an error, whatever its status."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.sglang import find_answer_error, find_event_error

ABORT = {"type": "abort", "message": "lost", "status_code": 503, "err_type": None}
WISH = {"type": "abort", "message": "Abort", "status_code": None}


@pytest.mark.parametrize(
    ("payload", "status", "message"),
    [
        ({"error": {"message": "lost", "code": 400}}, 400, "lost"),
        ({"error": {"message": "lost", "code": "x"}}, 500, "lost"),
        ({"meta_info": {"finish_reason": ABORT}}, 503, "lost"),
        (
            {"meta_info": {"finish_reason": {**ABORT, "status_code": 7, "message": None}}},
            500,
            "the request was aborted",
        ),
    ],
)
def test_error_has_a_status_and_a_body(payload: dict[str, Any], status: int, message: str) -> None:
    for error in (
        find_event_error(payload),
        find_answer_error(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(payload)),
    ):
        assert error is not None
        assert error.status == status
        assert orjson.loads(error.body)["error"]["message"] == message


@pytest.mark.parametrize(
    "payload",
    [
        {"meta_info": {"finish_reason": {"type": "length", "length": 1}}},
        {"choices": [{"finish_reason": "length", "text": '"error" "abort"'}]},
        {"meta_info": {"finish_reason": {"type": "length", "length": 1}}, "text": "abort"},
        {"error": None},
        {},
        [],
        5,
    ],
)
def test_answers_without_error_have_none(payload: Any) -> None:
    raw = orjson.dumps(payload)
    assert find_event_error(payload) is find_answer_error(raw) is find_answer_error(b"data: %b\n\n" % raw) is None


@pytest.mark.parametrize("payload", [{"meta_info": {"finish_reason": WISH}}, {"choices": [{"finish_reason": "abort"}]}])
def test_requested_abort_is_an_error_of_prefillers_only(payload: dict[str, Any]) -> None:
    assert find_event_error(payload) is None
    error = find_answer_error(orjson.dumps(payload))
    assert error is not None
    assert (error.status, error.is_requested) == (500, True)


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda raw: b'data: {"error":' + raw + b"}\n\n"))
def test_error_in_answer_accepts_any_bytes(answer: bytes) -> None:
    error = find_answer_error(answer)
    assert error is None or 400 <= error.status < 600
