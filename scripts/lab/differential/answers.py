"""What the engines say: two tokens for every prompt and sample, in the shapes of vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lab.differential.requests import CHAT, GENERATE
from lab.differential.units import answers as count
from lab.differential.units import prompts
from lab.differential.wire import Answer

_WORDS = ("Hello", " you")
_PROMPT_IDS = [1, 2, 3, 4]


def answer(path: str, asked: Mapping[str, Any], kv_params: object = None) -> Answer:
    """What a body is answered with; with `kv_params` if it is not streamed."""
    if path == GENERATE:
        return _native(asked)
    stream = _events(path, asked) if asked.get("stream") else None
    return Answer(events=stream) if stream is not None else Answer(payload=_whole(path, asked, kv_params))


def _whole(path: str, asked: Mapping[str, Any], kv_params: object) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": "".join(_WORDS)}} if path == CHAT else {"text": "".join(_WORDS)}
    )
    choices = [{"index": index, **said, "logprobs": None, "finish_reason": "length"} for index in range(count(asked))]
    return {**_frame(path, asked, ""), "choices": choices, "usage": _usage(asked), "kv_transfer_params": kv_params}


def _events(path: str, asked: Mapping[str, Any]) -> Sequence[str]:
    frame = _frame(path, asked, ".chunk")
    ids = bool(asked.get("return_token_ids"))
    chunks: list[dict[str, Any]] = []
    for index in range(count(asked)):
        if path == CHAT:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append({"choices": [role], **({"prompt_token_ids": _PROMPT_IDS} if ids else {})})
        for number, word in enumerate(_WORDS):
            said: dict[str, Any] = {"delta": {"content": word}} if path == CHAT else {"text": word}
            choice = {"index": index, **said, "finish_reason": "length" if word is _WORDS[-1] else None}
            if ids:
                choice["token_ids"] = [10 + number]
                if path != CHAT and number == 0:
                    choice["prompt_token_ids"] = _PROMPT_IDS
            chunks.append({"choices": [choice]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": _usage(asked)})
    return [*(json.dumps({**frame, **chunk}) for chunk in chunks), "[DONE]"]


def _frame(path: str, asked: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if path == CHAT else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1_760_000_000, "model": asked.get("model")}


def _usage(asked: Mapping[str, Any]) -> dict[str, Any]:
    read, written = len(_PROMPT_IDS) * prompts(asked), len(_WORDS) * count(asked)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _native(asked: Mapping[str, Any]) -> Answer:
    meta: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": "length", "length": len(_WORDS)},
        "prompt_tokens": len(_PROMPT_IDS),
        "completion_tokens": len(_WORDS),
        "cached_tokens": 0,
    }
    if asked.get("return_logprob"):
        meta |= {"input_token_logprobs": [[-0.5, 1, None]], "output_token_logprobs": [[-0.5, 10, None]]}
    several = count(asked)
    said = {"text": "".join(_WORDS), "output_ids": [10, 11], "meta_info": meta}
    if asked.get("stream"):
        chunks = [said] if several == 1 else [{**said, "index": index} for index in range(several)]
        return Answer(events=[*map(json.dumps, chunks), "[DONE]"])
    return Answer(payload=said if several == 1 else [said] * several)
