"""Forwards tokens in C, if the extension module is built; see `_pump.c`.

The socket of a stream moves from the event loop to the pump while it carries tokens of a known shape, and comes back
with the first other bytes. In the compiled build this takes about half of the user CPU time of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

try:
    from proxy.upstream import _pump  # type: ignore[attr-defined]
except ImportError:  # the interpreted build, or a system without epoll
    _pump = None

if TYPE_CHECKING:
    import asyncio

    from proxy.upstream.fast_forward import TokenFormat

CLIENT_IS_SLOW: Final = -2
"""The result of `Pump.add_stream` if bytes for the client are queued. Tokens that C forwards would overtake them."""


def is_built() -> bool:
    """Return whether the C extension module is installed."""
    return _pump is not None


class PumpedConnection(Protocol):
    """The connection to an engine whose socket the pump reads."""

    transport: asyncio.Transport

    def take_back_socket(self, unsent: bytes, data: bytes, arrivals: int) -> None:
        """Read from the engine's socket again, after the pump has returned it."""


class NativePump:
    """The streams of one worker whose tokens are forwarded in C. It must be closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._native_pump: Any = _pump.Pump(orjson.loads)
        self.watch_sockets()

    def close_pump(self) -> None:
        """Stop the pump. The caller has removed all streams before."""
        self.stop_watching()

    def watch_sockets(self) -> None:
        """Forward tokens whenever they arrive."""
        self._loop.add_reader(self._native_pump.fileno(), self._native_pump.run)

    def stop_watching(self) -> None:
        """Forward tokens only when `run` is called."""
        self._loop.remove_reader(self._native_pump.fileno())

    def forward_arrived_tokens(self) -> int:
        """Forward the tokens that have arrived on up to 64 streams. Return the number of these streams."""
        ready: int = self._native_pump.run()
        return ready

    def add_stream(self, connection: PumpedConnection, tokens: TokenFormat) -> int:
        """Take over the socket of a stream, and return its number, or -1 or CLIENT_IS_SLOW.

        -1: impossible, because of TLS, or because the client gets keep-alive bytes.
        """
        engine = _tcp_descriptor(connection.transport)
        client = -1
        if (output := tokens.client_output) is not None:
            client = _tcp_descriptor(output)
            if client < 0:
                return -1
            if output.get_write_buffer_size():  # type: ignore[attr-defined]
                return CLIENT_IS_SLOW
        if engine < 0:
            return -1
        number: int = self._native_pump.add(engine, client, connection, *pump_arguments(tokens))
        return number

    def take_arrived_tokens(self, stream_number: int) -> int:
        """Return the number of tokens of a stream since the last call."""
        arrivals: int = self._native_pump.arrivals(stream_number)
        return arrivals

    def remove_stream(self, stream_number: int) -> int:
        """Give the socket of a stream back to the event loop. Returns the same as `take_arrived_tokens`."""
        arrivals: int = self._native_pump.remove(stream_number)
        return arrivals


def pump_arguments(tokens: TokenFormat) -> tuple[object, ...]:
    """Return the arguments for the extension module's `add` that describe the tokens."""
    texts, ids = (None, None) if tokens.token_notes is None else tokens.token_notes
    rest = tokens.token_suffix
    return (
        *(
            tokens,
            texts,
            ids,
            rest.skips,
            tokens.bytes_before_text,
            rest.bytes_before_id,
            rest.bytes_after_id,
            rest.shown_bytes_after_id,
        ),
        *(rest.hides_ids, rest.least_digits, rest.omitted_length),
    )


def _tcp_descriptor(transport: Any) -> int:
    """Return the file descriptor of a TCP transport; -1 if it uses TLS or another event loop."""
    if not hasattr(transport, "get_extra_info") or transport.get_extra_info("sslcontext") is not None:
        return -1
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor
