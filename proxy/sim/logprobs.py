"""Invented but deterministic log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.sim.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Sequence


def chat_logprobs(token_ids: Sequence[int], top: int) -> dict[str, Any]:
    return {
        "content": [
            _entry(token, 0) | {"top_logprobs": [_entry(other, rank) for rank, other in enumerate(_ranked(token, top))]}
            for token in token_ids
        ]
    }


def completion_logprobs(token_ids: Sequence[int], top: int, text_offset: int) -> dict[str, Any]:
    tokens = [decode([token], keep_markers=True) for token in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_logprob(token, 0) for token in token_ids],
        "tokens": tokens,
        "top_logprobs": [
            {
                decode([other], keep_markers=True): _logprob(token, rank)
                for rank, other in enumerate(_ranked(token, top + 1))
            }
            for token in token_ids
        ],
    }


def _ranked(token: int, count: int) -> list[int]:
    """The sampled token and its rivals, printable ones."""
    return [token, *(97 + (token + rank) % 26 for rank in range(1, count))][:count]


def _logprob(token: int, rank: int) -> float:
    return -(token * 37 % 97 + 1) / 1000 - rank


def _entry(token: int, rank: int) -> dict[str, Any]:
    text = decode([token], keep_markers=True)
    return {"token": text, "logprob": _logprob(token, rank), "bytes": list(text.encode())}
