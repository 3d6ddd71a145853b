"""Doubles for the connections of engine and client where tokens bypass the delivery."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from proxy.resume.transcript import Transcript
from proxy.upstream.fast_forward import FastForward, TokenFormat
from proxy.upstream.pump import pump_arguments
from proxy.wire.sse import TokenShape
from tests.canned import data


class Client:
    """Takes all that is written: a transport, its protocol, and the ClientWriter that has both."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.has_left = False
        self.on_write_buffer_full: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.has_left


class Engine(FastForward):
    """A connection that keeps what it does not pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = b""

    def _process_read(self, data: bytes) -> None:
        self.left += data

    def take(self, tokens: TokenFormat, data: bytes) -> bytes:
        """Take the bytes of a read, and return those that were left."""
        self.left = b""
        self._passed_tokens = tokens
        self.data_received(data)
        return self.left


class PumpedEngine:
    """The same as Engine with the extension module in C, over sockets."""

    def __init__(self, pump: Any) -> None:
        self._pump = pump
        self.given_back: tuple[bytes, bytes, int] | None = None
        """Unsent bytes, bytes of the engine, and tokens since the last count, if the pump gave the stream back."""
        self._engine, self._reads = socket.socketpair()
        self._writes, self._client = socket.socketpair()
        self._client.setblocking(False)
        self._writes.setblocking(False)

    def take(self, tokens: TokenFormat, data: bytes) -> bytes:
        """See Engine."""
        number = self.add(tokens)
        self.given_back = None
        self.run_after(data)
        if sent := self.received():
            assert tokens.client_output is not None
            tokens.client_output.write(sent)
        if self.given_back is None:
            self._pump.remove(number)
            return b""
        unsent, left, _ = self.given_back
        assert unsent == b""
        return left

    def take_back_socket(self, unsent: bytes, data: bytes, arrivals: int) -> None:
        """See EngineConnection."""
        self.given_back = unsent, data, arrivals

    def add(self, tokens: TokenFormat) -> int:
        """Let the pump read the engine's socket, and return the number of the stream."""
        client = -1 if tokens.client_output is None or tokens.client_output.is_closing() else self._writes.fileno()
        number: int = self._pump.add(self._reads.fileno(), client, self, *pump_arguments(tokens))
        return number

    def run_after(self, data: bytes) -> None:
        """Send bytes as the engine, and run the pump."""
        self._engine.sendall(data)
        self._pump.run()

    def received(self) -> bytes:
        """Return the bytes that the client has received since the last call."""
        received = b""
        with suppress(BlockingIOError):
            while part := self._client.recv(1_000_000):
                received += part
        return received

    def leave(self) -> None:
        """Close the connection as the engine."""
        self._engine.close()

    def close(self) -> None:
        """Close the sockets."""
        for end in (self._engine, self._reads, self._writes, self._client):
            end.close()


def tokens_like(
    shape: TokenShape, client: Client | None, transcript: Transcript | None = None, *, hides_ids: bool = False
) -> TokenFormat:
    """Tokens that are written to `client` and noted for `transcript`; None: they are not."""
    known = Transcript() if transcript is None else transcript
    notes = known.token_lists(is_reasoning=shape.is_reasoning)
    skips = known.grammar.reasoning_end_ids if shape.is_reasoning else ()
    return TokenFormat(
        shape,
        None if transcript is None else notes,
        known.settle_noted_tokens,
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
