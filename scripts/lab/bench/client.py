"""A connection that asks, and what is checked of an answer.

Status, number of tokens, finish reason, usage and the end of the stream: whatever is not as it should be is a problem.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, cast

import httptools
import orjson

from lab.bench.answers import ENGINE_ID, WORD

if TYPE_CHECKING:
    from lab.bench.histogram import Histogram
    from lab.bench.scenarios import Scenario

_CONTENT = f'"content":"{WORD}'.encode()


class Client(asyncio.Protocol):
    """One connection, used for one request after the other. Tells `gaps` of the time between two arrivals of tokens."""

    def __init__(self, gaps: Histogram) -> None:
        self.closed = False
        self.first_token_at: float | None = None
        self._gaps = gaps
        self._token_at = 0.0
        self._has_token = False
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answer: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Status and body of the answer."""
        self.first_token_at = None
        self._body = []
        self._answer = self._loop.create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = perf_counter()  # the loop's own clock has milliseconds only
        self._has_token = False
        self._parser.feed_data(data)
        if self._has_token:
            if self.first_token_at is None:
                self.first_token_at = now
            else:
                self._gaps.add(now - self._token_at)
            self._token_at = now

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if not self._has_token and _CONTENT in data:
            self._has_token = True

    def on_message_complete(self) -> None:
        if not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was closed before the end of the answer"))
            self._answer.exception()  # nobody may be waiting any more


def http_request(scenario: Scenario, port: int, *, directly: bool) -> bytes:
    """What a client sends, head and body; `directly` to a decoder, as if a prefiller had been asked before."""
    kv_params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": ENGINE_ID}} if directly else {}
    body = scenario.body(**kv_params)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 1.60.0\r\nAuthorization: Bearer bench\r\nX-Stainless-Lang: python\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def problem(scenario: Scenario, status: int, body: bytes) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    if status != 200:
        return f"status {status}"
    return _stream_problem(scenario, body) if scenario.stream else _answer_problem(scenario, body)


def _answer_problem(scenario: Scenario, body: bytes) -> str | None:
    answer = orjson.loads(body)
    if answer["choices"][0]["message"]["content"] != WORD * scenario.max_tokens:
        return "wrong text"
    return None if answer["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"


def _stream_problem(scenario: Scenario, body: bytes) -> str | None:
    if not body.endswith(b"data: [DONE]\n\n"):
        return "no [DONE]"
    if body.count(_CONTENT) != scenario.max_tokens:
        return "wrong number of tokens"
    if b'"finish_reason":"length"' not in body.replace(b": ", b":"):
        return "no finish reason"
    *_, usage, _, _ = body.split(b"\n\n")
    return None if orjson.loads(usage[6:])["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"
