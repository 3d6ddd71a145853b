"""A client that asks gateways and engines alike, and reads their answers whole or streamed."""

from __future__ import annotations

import http.client
import json
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.real.programs import HOST, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# A small machine that runs many engines may pause each of them for a long time. Nothing here is about speed.
TIMEOUT_SECONDS = 180.0


@dataclass(slots=True)
class Choice:
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] = field(default_factory=list, compare=False)
    """An element per token. Rounding differs with what else an engine computes, so they are for `nearly`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What two answers to the same request must have in common."""

    choices: dict[int, Choice]
    prompt_tokens: int
    completion_tokens: int


@contextmanager
def request(port: int, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """GET, or POST a body. Leaving closes the connection, whatever of the answer has been read."""
    with sent(port, path, body) as connection:
        yield connection.getresponse()


@contextmanager
def sent(port: int, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPConnection]:
    """The same, of which nothing has been answered yet."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)) as connection:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
        yield connection


def ask(port: int, path: str, **body: Any) -> Answer:
    """A successful answer, which is streamed if the body says so; greedy unless the body says otherwise."""
    body = {"temperature": 0, "return_token_ids": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    with request(port, path, body) as response:
        if response.status != 200:
            raise AssertionError(f"status {response.status}: {response.read()!r}")
        return whole([json.load(response)]) if not body.get("stream") else whole(seamless(list(events(response))))


def whole(payloads: list[Any]) -> Answer:
    """The answer these payloads add up to: the chunks of a stream, or the only one."""
    choices: dict[int, Choice] = {}
    for choice in (choice for payload in payloads for choice in payload["choices"]):
        message = choice.get("message") or choice.get("delta") or choice
        so_far = choices.setdefault(choice["index"], Choice())
        so_far.text += message.get("content") or message.get("text") or ""
        so_far.reasoning += message.get("reasoning") or ""
        so_far.token_ids += choice.get("token_ids") or choice.get("response_token_ids") or ()
        so_far.finish_reason = choice["finish_reason"] or so_far.finish_reason
        so_far.stop_reason = choice.get("stop_reason") or so_far.stop_reason
        so_far.logprobs += _per_token(choice.get("logprobs"))
    usage = payloads[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Answer(dict(sorted(choices.items())), usage["prompt_tokens"], usage["completion_tokens"])


def seamless(chunks: list[Any]) -> list[Any]:
    """The same chunks, which must look as if one engine had written them in one go."""
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk for chunk in chunks if chunk.get("usage")] == chunks[-1:]
    by_choice: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice.get("stop_reason") != "recomputed"
        by_choice.setdefault(choice["index"], []).append(choice)
    for choices in by_choice.values():
        assert [choice for choice in choices if choice["finish_reason"]] == choices[-1:]
        if "delta" in choices[0]:
            assert [choice for choice in choices if choice["delta"].get("role")] == choices[:1]
    return chunks


def tokens_of(port: int, text: str) -> list[int]:
    """The token ids of a text, and nothing else."""
    with request(port, "/tokenize", {"prompt": text, "add_special_tokens": False}) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def late_piece(text: str, share: float) -> str:
    """Characters to stop at: after this share of a text, and not before."""
    pieces = ((start, text[start : start + 12]) for start in range(int(len(text) * share), len(text) - 20))
    return next(piece for start, piece in pieces if "\ufffd" not in piece and text.find(piece) == start)


def difference(answer: Answer, expected: Answer) -> str:
    """Where two answers begin to differ."""
    members = [
        (name, getattr(answer, name), getattr(expected, name)) for name in ("prompt_tokens", "completion_tokens")
    ]
    for index, choice in answer.choices.items():
        other = expected.choices.get(index, Choice())
        names = ("finish_reason", "stop_reason", "reasoning", "text", "token_ids")
        members += [(f"{name} of choice {index}", getattr(choice, name), getattr(other, name)) for name in names]
    return "; ".join(f"{name} {_apart(one, other)}" for name, one, other in members if one != other)


def _apart(one: Any, other: Any) -> str:
    if not isinstance(one, str | list) or not isinstance(other, str | list):
        return f"is {one!r}, not {other!r}"
    at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    return f"has at {at} {one[at : at + 20]!r}, not {other[at : at + 20]!r}"


def nearly(one: Any, other: Any) -> bool:
    """Equal, but for the last digits of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(nearly(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(nearly, one, other))
    return bool(one == other)


def _per_token(logprobs: Any) -> list[Any]:
    """A chat's or a completion's log probabilities, an element per token."""
    if not logprobs:
        return []
    if "content" in logprobs:
        # As dictionaries, like a completion's: there, tokens with the same text are one.
        return [
            token | {"top_logprobs": {other["token"]: other["logprob"] for other in token["top_logprobs"]}}
            for token in logprobs["content"] or ()
        ]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [dict(zip(names, values, strict=True)) for values in zip(*(logprobs[name] for name in names), strict=True)]


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The payloads of a stream, which must end with `[DONE]`."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")
