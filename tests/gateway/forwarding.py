"""Doubles for the connections of engine and client where tokens bypass the delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.resume.transcript import Transcript
from proxy.upstream.fast_forward import FastForward, Tokens
from tests.canned import data

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.sse import Shape


class Client:
    """Takes all that is written: a transport, its protocol, and the ClientWriter that has both."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.has_left = False
        self.on_full: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.has_left


class Engine(FastForward):
    """A connection that keeps what it does not pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = b""

    def _read(self, data: bytes) -> None:
        self.left += data

    def take(self, tokens: Tokens, data: bytes) -> bytes:
        """Take the bytes of a read, and return those that were left."""
        self.left = b""
        self._tokens = tokens
        self.data_received(data)
        return self.left


def tokens_like(
    shape: Shape, client: Client | None, transcript: Transcript | None = None, *, hides_ids: bool = False
) -> Tokens:
    """Tokens that are written to `client` and noted for `transcript`; None: they are not."""
    known = Transcript() if transcript is None else transcript
    notes = known.noting(is_reasoning=shape.is_reasoning)
    skips = known.grammar.reasoning_end_ids if shape.is_reasoning else ()
    return Tokens(
        shape,
        None if transcript is None else notes,
        known.settle,
        client,
        None,
        skips=frozenset(skips),
        hides_ids=hides_ids,
    )


def framed(data: bytes) -> bytes:
    """One chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(field: str | None, number: int, *, ids: bool) -> bytes:
    """One token of a chat as an engine sends it, or of a completion where there is no `field`."""
    text = f" word{number}"
    told: dict[str, Any] = {"text": text} if field is None else {"delta": {field: text}}
    told |= {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": [1000 + number] if ids else None}
    return framed(data({"id": "c", "object": "chunk", "created": 1, "choices": [told]}))
