"""Answers that are not streamed: passed on as they are, or recognised as no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from proxy.wire.openai import Api
from tests.asking import Answer, request
from tests.canned import CannedEngine, http, json_answer

if TYPE_CHECKING:
    from tests.conftest import Deploy

CHOICE = {"index": 0, "text": "y", "finish_reason": "stop"}
PREFILLED = {
    "choices": [CHOICE],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": "r"},
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
}


async def answered(deploy: Deploy, decoded: bytes) -> Answer:
    """What a client gets when a decoder answers this."""
    prefiller, decoder = CannedEngine("prefill", [json_answer(PREFILLED)]), CannedEngine("decode", [decoded])
    gateway = await deploy([prefiller], [decoder], retry={"max_attempts": 1})
    # The parameters are the same each time, which only matters to engines.
    return await gateway.ask(request(Api.COMPLETIONS))


async def test_only_what_the_gateway_knows_better_is_changed(deploy: Deploy) -> None:
    text = b'"choices" : [{"index":0,"text":"\\u00fc\\/","finish_reason":"stop","x":1e2}],"created":1.0'
    usage = b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}'
    answer = await answered(
        deploy, http(b'{%b,"kv_transfer_params": {"remote_host":"h"},%b,"last":null}' % (text, usage))
    )
    assert answer.body == b'{%b,%b,"last":null}' % (text, usage.replace(b"8", b"4"))
    assert answer.headers["content-type"].startswith("application/json")


NO_ANSWERS: list[tuple[Any, str]] = [
    (b"[]", "decode_bad_answer"),
    (b"", "decode_bad_answer"),
    (b"<html>", "decode_bad_answer"),
    (b"{}", "decode_bad_answer"),
    (b'{"choices": []}', "decode_bad_answer"),
    (b'{"choices": null}', "decode_bad_answer"),
    (b'{"choices": [{"finish_reason": "stop"}], "choices": []}', "decode_bad_answer"),
    (b'{"choices": [7]}', "decode_bad_answer"),
    (b'{"choices": [{"index": 0, "finish_reason": null}]}', "decode_broken"),
    (b'{"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1}]}', "decode_broken"),
    (b'{"choices": [{"index": 0, "finish_reason": "stop", "stop_reason": "recomputed"}]}', "decode_recomputed"),
]


@pytest.mark.parametrize(("body", "code"), NO_ANSWERS)
async def test_what_is_no_answer_is_an_error(deploy: Deploy, body: bytes, code: str) -> None:
    answer = await answered(deploy, http(body))
    assert (answer.status, answer.error["code"]) == (502, code)
    assert answer.headers["x-should-retry"] == "false"


async def test_a_redirect_is_not_followed(deploy: Deploy) -> None:
    answer = await answered(
        deploy, b"HTTP/1.1 307 Elsewhere\r\nLocation: http://10.6.6.6/\r\nContent-Length: 0\r\n\r\n"
    )
    assert (answer.status, answer.error["code"]) == (502, "decode_bad_answer")


async def test_an_engines_error_keeps_its_status_body_and_type(deploy: Deploy) -> None:
    body = b"<h1>the context is too long</h1>"
    answer = await answered(deploy, http(body, "422 Unprocessable", "text/html; charset=latin-1"))
    assert (answer.status, answer.body) == (422, body)
    assert answer.headers["content-type"] == "text/html; charset=latin-1"


async def test_a_busy_engine_says_itself_when_to_come_again(deploy: Deploy) -> None:
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"
    answer = await answered(deploy, busy)
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b"busy", "7")
    assert "x-should-retry" not in answer.headers
