"""What passes between the gateway and one engine, read off the network: every generation request, and how it went."""

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
    """Watches one connection and notes a Leg for each exchange.

    `sent_by_client`: the body that a client sent under a name, None when nobody did.
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
        """What is under way; None between an answer and the next request."""

    def on_data(self, direction: Direction, data: bytes) -> None:
        # What a dying engine says may be no HTTP. That is for the gateway to see.
        with suppress(httptools.HttpParserError):
            (self._requests if direction is Direction.UP else self._answers).feed_data(data)

    def on_end(self, direction: Direction) -> None:
        if direction is Direction.UP:
            # The gateway has hung up: what an engine still says reaches nobody.
            self.end(is_whole=False)

    def on_close(self) -> None:
        self.end(is_whole=False)

    # From the parsers

    def begin(self) -> None:
        self.exchange = _Exchange(sent=self._clock())

    def answered(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.answered is None:
            exchange.answered = self._clock()
            exchange.status = self._answers.get_status_code()

    def end(self, *, is_whole: bool) -> None:
        """The answer is whole, or the connection is gone."""
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
    """One request and what came back. Of the answer only the end is kept."""

    sent: float
    path: bytes = b""
    attempt: str = ""
    body: bytes = b""
    answered: float | None = None
    status: int | None = None
    answer: bytes = b""


class _Requests:
    """What httptools calls with the parts of a request."""

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
    """What httptools calls with the parts of an answer."""

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
    """Top-level members that were added, removed or written differently, and `order` if those kept changed places.

    How a value is written counts: the digits of a number, and the order of members inside it. Space between values and
    the escapes in text are not looked at.
    """
    ours, theirs = _members(client), _members(engine)
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    kept = [name for name in ours if name not in changed]
    return changed if kept == [name for name in theirs if name not in changed] else {*changed, "order"}


def _members(body: bytes) -> dict[str, str]:
    """The values of an object as text in one form, in their order."""
    try:
        pairs = json.loads(body, object_pairs_hook=tuple, parse_int=_Digits, parse_float=_Digits)
    except ValueError:
        return {}
    return {name: repr(value) for name, value in pairs} if isinstance(pairs, tuple) else {}


class _Digits(str):
    """A number as it is written; not to be taken for text that looks the same."""

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
