"""Invented but deterministic log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.sim.model.tokenizer import Detokenizer, decode

if TYPE_CHECKING:
    from collections.abc import Sequence


class Speller:
    """The texts of one choice's tokens: a token within a character has none, the last one has all of it
    (vLLM `v1/engine/logprobs.py`).
    """

    def __init__(self) -> None:
        self._detokenizer = Detokenizer(keep_markers=True)

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        return [self._detokenizer.feed(token) for token in token_ids]


def chat_logprobs(token_ids: Sequence[int], top: int, speller: Speller) -> dict[str, Any]:
    return {
        "content": [
            _entry(token, text, 0) | {"top_logprobs": _alternatives(token, text, top)}
            for token, text in zip(token_ids, speller.spell(token_ids), strict=True)
        ]
    }


def completion_logprobs(
    token_ids: Sequence[int], top: int, text_offset: int, speller: Speller, *, unknown: int = 0
) -> dict[str, Any]:
    """`unknown`: so many tokens at the beginning have none, as the first of a prompt, which nothing goes before."""
    tokens = speller.spell(token_ids)
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    known = list(zip(token_ids, tokens, strict=True))[unknown:]
    alternatives = [_alternatives(token, text, top + 1) for token, text in known]
    return {
        "text_offset": offsets,
        "token_logprobs": [None] * unknown + [_logprob(token, 0) for token, _ in known],
        "tokens": tokens,
        "top_logprobs": [None] * unknown
        + [{entry["token"]: entry["logprob"] for entry in entries} for entries in alternatives],
    }


def prompt_logprobs(prompt: Sequence[int], top: int, *, unknown: int) -> list[dict[str, Any] | None]:
    """By token id, as vLLM tells them. `unknown` as in completion_logprobs."""
    told: list[dict[str, Any] | None] = [None] * unknown
    for token in prompt[unknown:]:
        ranked = {token: 0} | {(token + rank) % 256: rank for rank in range(1, top)}
        told.append(
            {
                str(rival): {"logprob": _logprob(token, rank), "rank": rank + 1, "decoded_token": decode([rival])}
                for rival, rank in ranked.items()
            }
        )
    return told


def _alternatives(token: int, text: str, count: int) -> list[dict[str, Any]]:
    """The sampled token and its rivals, printable ones."""
    rivals = [_entry(token, decode([97 + (token + rank) % 26]), rank) for rank in range(1, count)]
    return [_entry(token, text, 0), *rivals][:count]


def _logprob(token: int, rank: int) -> float:
    return -(token * 37 % 97 + 1) / 1000 - rank


def _entry(token: int, text: str, rank: int) -> dict[str, Any]:
    return {"token": text, "logprob": _logprob(token, rank), "bytes": list(text.encode())}


def native_logprobs(token_ids: Sequence[int]) -> list[list[Any]]:
    """SGLang's triples of logprob, id and text; the text is null unless asked for."""
    return [[_logprob(token, 0), token, None] for token in token_ids]
