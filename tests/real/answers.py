"""A client for gateways and engines alike, which reads whole and streamed answers into the same form."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.real.programs import HOST, MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Many engines share few cores, so any of them may pause for long. Nothing here is about speed.
TIMEOUT_SECONDS = 180.0


@dataclass(slots=True)
class Choice:
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] = field(default_factory=list, compare=False)
    """One element per token. The last digits depend on what else the engine computes: compare with `nearly_equal`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be equal in two answers to the same request."""

    choices: dict[int, Choice]
    prompt_tokens: int
    completion_tokens: int


@contextmanager
def request(port: int, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """GET, or POST if there is a body; yields the response. Leaving the block closes the connection."""
    with sent_request(port, path, body) as connection:
        yield connection.getresponse()


@contextmanager
def sent_request(port: int, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPConnection]:
    """Like `request`, but yields the connection before anything of the response has been read."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)) as connection:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
        yield connection


def ask(port: int, path: str, **body: Any) -> Answer:
    """Ask for an answer, greedily unless `body` says otherwise. Raises AssertionError if the status is not 200."""
    body = {"temperature": 0, "return_token_ids": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    with request(port, path, body) as response:
        if response.status != 200:
            raise AssertionError(f"status {response.status}: {response.read()!r}")
        if not body.get("stream"):
            return assemble([json.load(response)])
        chunks = list(events(response))
    assert_seamless(chunks)
    return assemble(chunks)


def assemble(payloads: list[Any]) -> Answer:
    """Put an answer together from the chunks of a stream, or from the one payload of a whole answer."""
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


def assert_seamless(chunks: list[Any]) -> None:
    """Assert that one engine may have written all chunks: one id, one role chunk, one finish reason, usage last."""
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


def tokens_of(port: int, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens."""
    with request(port, "/tokenize", {"prompt": text, "add_special_tokens": False}) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def late_piece(text: str, share: float) -> str:
    """Return a stop string of 12 characters that occurs first after this share (0 to 1) of the text."""
    pieces = ((start, text[start : start + 12]) for start in range(int(len(text) * share), len(text) - 20))
    return next(piece for start, piece in pieces if "\ufffd" not in piece and text.find(piece) == start)


def difference(answer: Answer, expected: Answer) -> str:
    """Return a sentence with the first difference of two answers, for the message of an assertion."""
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


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, with 0.001 allowed between floats."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(nearly_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    return bool(one == other)


def _per_token(logprobs: Any) -> list[Any]:
    """Return the log probabilities of a chat or a completion as one dictionary per token."""
    if not logprobs:
        return []
    if "content" in logprobs:
        # A completion has a dictionary by text here, in which tokens of the same text are one entry.
        return [
            token | {"top_logprobs": {other["token"]: other["logprob"] for other in token["top_logprobs"]}}
            for token in logprobs["content"] or ()
        ]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [dict(zip(names, values, strict=True)) for values in zip(*(logprobs[name] for name in names), strict=True)]


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the payloads of a stream. Raises AssertionError if it does not end with `[DONE]`."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")
