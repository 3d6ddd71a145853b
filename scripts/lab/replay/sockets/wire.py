"""What client and engines of a replay say to each other over HTTP, through whichever program stands between them.

A request's `seed` is its number in the trace, by which engines know it. A prompt has 4 bytes of text a token, which
are the same for equal names of its blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import orjson

from lab.replay.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from lab.replay.trace import Request

MODEL: Final = "replay"
BYTES_PER_TOKEN: Final = 4
WORD: Final = " tok"
_ID: Final = "cmpl-7d0b5b7c3c6f4c0f9d1f2f5c0a4e8b91"


def request_bytes(request: Request, number: int, port: int) -> bytes:
    """What a client sends: a completion, streamed."""
    rest = {
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
    }
    body = b'{"model":"%b","prompt":"%b",%b' % (MODEL.encode(), _prompt(request), orjson.dumps(rest)[1:])
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _prompt(request: Request) -> bytes:
    size = BYTES_PER_TOKEN * request.input_tokens
    text = b"".join(map(_block, request.blocks))[:size]
    # Traces may name fewer blocks than there are: nobody has what lies behind them.
    return text + _filled(f"{request.at} ", size - len(text))


@lru_cache(maxsize=20_000)
def _block(name: int) -> bytes:
    return _filled(f"{name} ", BYTES_PER_TOKEN * BLOCK_TOKENS)


def _filled(word: str, size: int) -> bytes:
    return (word.encode() * (size // len(word) + 1))[:size]


def json_answer(payload: object, status: str = "200 OK") -> bytes:
    """Head and body."""
    body = orjson.dumps(payload)
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def refusal(why: str) -> bytes:
    """Of what should not have come."""
    return json_answer({"error": {"message": why, "type": "BadRequestError", "code": 400}}, "400 Bad Request")


def prefilled(request: Request, cached_tokens: int, kv_params: dict[str, Any] | None) -> bytes:
    """A prefiller's answer that is not streamed."""
    choice = {"index": 0, "text": WORD, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = _usage(request.input_tokens, 1, cached_tokens)
    return json_answer({**_head(), "choices": [choice], "usage": usage, "kv_transfer_params": kv_params})


STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def tokens(count: int, finish_reason: str | None = None) -> bytes:
    """An event with so many tokens."""
    choice = {
        "index": 0,
        "text": WORD * count,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
    return _event({**_head(), "choices": [choice]})


def end(request: Request, cached_tokens: int) -> bytes:
    """What follows the last token of a stream."""
    usage = _usage(request.input_tokens, request.output_tokens, cached_tokens)
    return _event({**_head(), "choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _head() -> dict[str, Any]:
    return {"id": _ID, "object": "text_completion", "created": 1760000000, "model": MODEL}


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _event(payload: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + orjson.dumps(payload) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
