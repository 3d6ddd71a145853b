"""Arbitrary streams of a decoder on their way to the client."""

from __future__ import annotations

from array import array
from typing import Any, Final, cast

import orjson

from proxy.connectors.legs import Attempt
from proxy.gateway.assembly import StreamAssembly
from proxy.gateway.client_writer import ClientWriter
from proxy.gateway.delivery import Delivery
from proxy.gateway.relay import Relay
from proxy.observe.timeline import Timeline
from proxy.settings import Cost
from proxy.upstream.response import Response
from proxy.wire.openai import Api
from tests.asking import request
from tests.fuzz.answers import LOOP, Line, connected
from tests.fuzz.cutting import cut, singly, spelled, words
from tests.parsing import parse

# The first byte selects one of these requests.
_BODIES = [
    request(api, stream=True, **fields)
    for api in (Api.CHAT, Api.COMPLETIONS)
    for fields in ({}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}, "logprobs": 1}, {"n": 2})
]


WORDS: Final = words(
    r"""
    data:\x20{"choices":[{ }]}\n\n data:\x20{"id":"i","choices":[{"index":0, "delta":{ "content": "text":
    "role":"assistant" "finish_reason": null "stop" "stop_reason": "recomputed" "token_ids": [1,2] "logprobs":
    {"tokens":["a","b"],"token_logprobs":[0,-1],"text_offset":[0,1]} {"content":[{}]} "tool_calls":
    [{"index":0,"id":"c","function":{"name":"f","arguments":"{"}}] "index": "function": "arguments":
    "reasoning": "prompt_token_ids":[ "usage": {"prompt_tokens":1,"completion_tokens":2}
    data:\x20{"choices":[],"usage":{"completion_tokens":2}}\n\n "error": "code": data:\x20[DONE]\n\n data:\x20
    [] {} 0 -1 1e9 1.5 true "a" "" , { } [ ] \n\n \r\n\r\n :\x20ping\n\n {"choices":[ \xc3\xbc \xff \\ud800
    "prompt_tokens_details": "system_fingerprint": "text_offset": "tokens": "name": "id": 4294967296 163607
    99999999999999999999
    """
)


_SHORT_BYTES = 600


class Owner:
    """An AnswerOwner that does nothing."""

    def on_first_output(self) -> None:
        """See AnswerOwner."""

    def on_end(self) -> None:
        """See AnswerOwner."""

    def on_progress(self) -> None:
        """See AnswerOwner."""


class Client:
    """A client that accepts all data at once."""

    chunk_output = None

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> bool:
        self.parts.append(data)
        return False

    def write_with_next(self, data: bytes) -> None:
        self.parts.append(data)


def check_streams(data: bytes) -> None:
    """Check that a stream is delivered or ends in one UpstreamError, independent of the cuts."""
    kind, stream = data[0] if data else 0, spelled(data[1:], WORDS)
    pieces = cut(kind, stream)
    cuts = [[stream], pieces, singly(stream)] if len(stream) < _SHORT_BYTES else [[stream], pieces]
    first, *others = LOOP.run_until_complete(_outcomes(kind, cuts))
    assert all(other == first for other in others)


async def _outcomes(kind: int, cuts: list[list[bytes]]) -> list[tuple[bytes, str]]:
    return [_deliver(kind, pieces) for pieces in cuts]


class NoHandoff:
    def record_kv_arrival(self, gap_counter: object = None) -> None:
        """There is no prefiller."""

    def record_kv_loss(self) -> None:
        """There is no prefiller."""

    def keep_answer_kv(self, params: Any, ids: array[int] | None) -> None:
        """There is no prefiller."""


def _deliver(kind: int, pieces: list[bytes]) -> tuple[bytes, str]:
    """Return the data for the client, and the code of the error, empty for a complete answer."""
    body = _BODIES[kind % len(_BODIES)]
    is_observed, is_whole = "n" not in body and kind % 3 > 0, kind % 5 == 0
    api = Api.CHAT if "messages" in body else Api.COMPLETIONS
    call = parse(api, orjson.dumps(body), Cost())
    whole = StreamAssembly() if is_observed and is_whole else None
    delivery = Delivery(call, is_observed=is_observed, collector=whole)
    response = Response(connected(Line()), lambda error: None)
    attempt = Attempt(response, Timeline(), None, has_kv_from_prefiller=True, handoff=NoHandoff())
    client = Client()
    relay = Relay(attempt, delivery, Owner(), None if whole else cast("ClientWriter", client))
    for piece in filter(None, pieces):
        relay.on_body_data(piece)
    relay.on_body_end(None)
    if relay.stream_error is not None:
        return b"".join(client.parts), relay.stream_error.code
    if delivery.is_stopped:
        client.write(delivery.make_missing_end(None))
    if whole is not None:
        return orjson.dumps(whole.make_answer_values(delivery)), ""
    return b"".join(client.parts), ""
