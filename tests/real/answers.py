"""A client that asks gateways and engines alike, and reads their answers whole or streamed."""

from __future__ import annotations

import http.client
import json
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.real.engines import HOST, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# A small machine that runs many engines may pause each of them for a long time. Nothing here is about speed.
TIMEOUT_SECONDS = 180.0


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What two answers to the same request must have in common."""

    choices: dict[int, Choice]
    prompt_tokens: int
    completion_tokens: int


@contextmanager
def request(port: int, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """GET, or POST a body. Leaving closes the connection, whatever of the answer has been read."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)) as connection:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
        yield connection.getresponse()


def ask(port: int, path: str, **body: Any) -> Answer:
    """A successful answer, which is streamed if the body says so; greedy unless the body says otherwise."""
    body = {"temperature": 0, "return_token_ids": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    with request(port, path, body) as response:
        if response.status != 200:
            raise AssertionError(f"status {response.status}: {response.read()!r}")
        payloads = list(events(response)) if body.get("stream") else [json.load(response)]
    choices: dict[int, Choice] = {}
    for choice in (choice for payload in payloads for choice in payload["choices"]):
        message = choice.get("message") or choice.get("delta") or choice
        so_far = choices.setdefault(choice["index"], Choice())
        so_far.text += message.get("content") or message.get("text") or ""
        so_far.token_ids += choice.get("token_ids") or ()
        so_far.finish_reason = choice["finish_reason"] or so_far.finish_reason
    usage = payloads[-1]["usage"]
    return Answer(dict(sorted(choices.items())), usage["prompt_tokens"], usage["completion_tokens"])


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The payloads of a stream, which must end with `[DONE]`."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")
