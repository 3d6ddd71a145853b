"""Records every generation request between the gateway and one engine, read from the network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httptools

from lab.common.load import DONE
from lab.common.toxics import Direction
from lab.soak.evidence import Leg
from proxy.connectors.releaser import RELEASE_MODEL

_GENERATION = (b"/v1/chat/completions", b"/v1/completions")
_KEPT_BYTES = 4096


class Recorder:
    """Watches one connection and records a Leg for each request.

    `sent_by_client`: returns the body that a client sent under a name, or None.
    """

    def __init__(
        self,
        instance: str,
        note: Callable[[Leg], None],
        sent_by_client: Callable[[str], bytes | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._instance = instance
        self._note = note
        self._sent_by_client = sent_by_client
        self._clock = clock
        self._requests = httptools.HttpRequestParser(_Requests(self))
        self._answers = httptools.HttpResponseParser(_Answers(self))
        self.exchange: _Exchange | None = None
        """The request in flight. None between an answer and the next request."""

    def on_data(self, direction: Direction, data: bytes) -> None:
        # A dying engine may send invalid HTTP, which is the gateway's concern.
        with suppress(httptools.HttpParserError):
            (self._requests if direction is Direction.UP else self._answers).feed_data(data)

    def on_end(self, direction: Direction) -> None:
        if direction is Direction.UP:
            # The gateway has disconnected, so the rest of the answer reaches no client.
            self.end(is_whole=False)

    def on_close(self) -> None:
        self.end(is_whole=False)

    # Calls of the parsers

    def begin(self) -> None:
        self.exchange = _Exchange(sent=self._clock())

    def answered(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.answered is None:
            exchange.answered = self._clock()
            exchange.status = self._answers.get_status_code()

    def end(self, *, is_whole: bool) -> None:
        """End the request: the answer is whole, or the connection is closed."""
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.path not in _GENERATION:
            return
        values = _object(exchange.body)
        user, stream = str(values.get("user", "")), bool(values.get("stream"))
        is_finished = is_whole and exchange.status == 200 and _is_finished(exchange.answer, stream=stream)
        client_body = self._sent_by_client(user)
        self._note(
            Leg(
                instance=self._instance,
                stage=_stage(values),
                user=user,
                attempt=exchange.attempt,
                sent=exchange.sent,
                answered=exchange.answered,
                ended=self._clock(),
                status=exchange.status,
                is_whole=is_whole,
                is_finished=is_finished,
                stream=stream,
                edited=() if client_body is None else tuple(sorted(edits(client_body, exchange.body))),
            )
        )


@dataclass(slots=True)
class _Exchange:
    """A request and its answer, of which only the end is kept."""

    sent: float
    path: bytes = b""
    attempt: str = ""
    body: bytes = b""
    answered: float | None = None
    status: int | None = None
    answer: bytes = b""


class _Requests:
    """Callbacks of httptools for requests."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_message_begin(self) -> None:
        self._recorder.begin()

    def on_url(self, url: bytes) -> None:
        if self._recorder.exchange is not None:
            self._recorder.exchange.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._recorder.exchange is not None and name.lower() == b"x-request-id":
            self._recorder.exchange.attempt = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        if self._recorder.exchange is not None:
            self._recorder.exchange.body += data


class _Answers:
    """Callbacks of httptools for answers."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_headers_complete(self) -> None:
        self._recorder.answered()

    def on_body(self, data: bytes) -> None:
        exchange = self._recorder.exchange
        if exchange is not None:
            exchange.answer = (exchange.answer + data)[-_KEPT_BYTES:]

    def on_message_complete(self) -> None:
        self._recorder.end(is_whole=True)


def edits(client: bytes, engine: bytes) -> set[str]:
    """Return the top-level members that differ, and `order` if the others changed places.

    Digits of numbers and the order of nested members count. White space and escapes are ignored.
    """
    ours, theirs = _members(client), _members(engine)
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    kept = [name for name in ours if name not in changed]
    return changed if kept == [name for name in theirs if name not in changed] else {*changed, "order"}


def _members(body: bytes) -> dict[str, str]:
    """Return the values of an object as normalised text, in their order."""
    try:
        pairs = json.loads(body, object_pairs_hook=tuple, parse_int=_Digits, parse_float=_Digits)
    except ValueError:
        return {}
    return {name: repr(value) for name, value in pairs} if isinstance(pairs, tuple) else {}


class _Digits(str):
    """A number as written, distinct from equal text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _stage(values: dict[str, Any]) -> str:
    if values.get("model") == RELEASE_MODEL:
        return "release"
    params = values.get("kv_transfer_params")
    return "prefill" if isinstance(params, dict) and params.get("do_remote_decode") else "decode"


def _is_finished(answer: bytes, *, stream: bool) -> bool:
    if b'"recomputed"' in answer or b'"error":{' in answer:
        return False
    has_reason = any(b'"finish_reason":"%b"' % reason in answer for reason in (b"stop", b"length", b"tool_calls"))
    return has_reason and (not stream or answer.rstrip().endswith(DONE))
