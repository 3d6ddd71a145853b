"""What the simulated engines send, built beforehand: the answers of vLLM, and what tells of a hand-over."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from lab.bench.scenarios import MODEL

ENGINE_ID = "0c1b6f0e-5f43-4d54-8a53-5f1f3a0b7c5e"
WORD = " token"
_ID = "chatcmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91"
_CREATED = 1760000000


def json_answer(status: str, payload: object) -> bytes:
    body = orjson.dumps(payload)
    head = (
        f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[dict[str, Any]], **more: object) -> bytes:
    payload = {
        "id": _ID,
        "object": "chat.completion.chunk",
        "created": _CREATED,
        "model": MODEL,
        "choices": choices,
        **more,
    }
    return _chunk(b"data: " + orjson.dumps(payload) + b"\n\n")


def _token(finish_reason: str | None, token_ids: list[int] | None) -> bytes:
    delta = {"content": WORD, "reasoning": None}
    return _event(
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": token_ids}]
    )


def _usage(completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 100,
        "total_tokens": 100 + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 99},
    }


@lru_cache
def role(prompt_tokens: int | None) -> bytes:
    """The role chunk, with so many ids of the prompt."""
    delta = {"role": "assistant", "content": ""}
    prompt = None if prompt_tokens is None else list(range(30_000, 30_000 + prompt_tokens))
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return _event([choice], prompt_token_ids=prompt)


@lru_cache
def end(completion_tokens: int, tells_ids: bool) -> bytes:
    """The last token and what follows it: usage, [DONE], the end of the body."""
    token = _token("length", [12345] if tells_ids else None)
    return token + _event([], usage=_usage(completion_tokens)) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@lru_cache
def completion(completion_tokens: int, kv_params: bytes = b"null") -> bytes:
    """An answer that is not streamed."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": WORD * completion_tokens,
        "reasoning": None,
        "tool_calls": [],
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return json_answer(
        "200 OK",
        {
            "id": _ID,
            "object": "chat.completion",
            "created": _CREATED,
            "model": MODEL,
            "choices": [choice],
            "usage": _usage(completion_tokens),
            "kv_transfer_params": orjson.loads(kv_params),
        },
    )


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TOKENS = {tells_ids: _token(None, [12345] if tells_ids else None) for tells_ids in (False, True)}
HEALTHY = json_answer("200 OK", {})
PREFILLED = completion(
    1,
    orjson.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(7)),
            "remote_engine_id": ENGINE_ID,
            "remote_request_id": _ID,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
    ),
)
"""A prefiller's answer in the pull protocol."""
BOOTSTRAPPED = {False: completion(1), True: STREAM_HEAD + role(None) + end(1, False)}
"""A prefiller's answer in SGLang's protocol, by whether a stream is asked for: that of any engine; routers drop it."""
NO_PREFILL = json_answer("400 Bad Request", {"error": {"message": "not a prefill request"}})
NO_KV = json_answer("400 Bad Request", {"error": {"message": "no KV parameters of a prefiller"}})
