"""Tokens that go from the engine's socket to the client's as they came, in the chunk the engine put them into. No IO.

In a long answer nearly every read is one event in one chunk of HTTP/1.1, and differs from the one before it in nothing
but its text and its token id. One function sees to that one, and the client is sent the very bytes: there is no
parsing of HTTP, events or JSON, and nothing is framed again. Ids that the client did not ask for are overwritten by a
`null` of the same length. Everything else takes the way through Relay and Delivery, which comes to the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.resume.transcript import Transcript
    from proxy.wire.token import Shape

_MAX_CHUNK_BYTES: Final = 4096


def _sizes() -> list[bytes | tuple[()]]:
    """What a chunk of so many bytes begins with, such as `a\\r\\n` at 15; () for sizes that none has."""
    lines: list[bytes | tuple[()]] = [()] * _MAX_CHUNK_BYTES
    for size in range(1, _MAX_CHUNK_BYTES - 8):
        line = b"%x\r\n" % size
        lines[len(line) + size + 2] = line
    return lines


_SIZES: Final = _sizes()
# What cannot be in a JSON string as it is, or stands for something else. A quote ends the text.
_odd: Final = re.compile(rb"[\\\x00-\x1f]").search
# Of an event without carriage returns. There is no line end in the middle of it.
_CHUNK_END: Final = b"\n\n\r\n"
_ZERO: Final = ord("0")


class Output(Protocol):
    """The client's connection: chunks can be written to it as they are."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...


class Pausable(Protocol):
    """The protocol of the client's connection."""

    is_paused: bool
    """The client reads slower than we write."""


class Ticks(Protocol):
    """Counts what the client is sent."""

    count: int
    gap_from: float
    """When the count left a remainder of 1 by 8."""
    now: Callable[[], float]

    def sample(self) -> None:
        """It leaves one of 2: the gap ends."""


class FastForward:
    """Takes the tokens of one decoder's stream. Made anew for each stream.

    `transcript`: keeps text and ids; None: nobody will ask. `output` None: the answer is only kept. `on_full` is called
    when a client reads too slowly: the engine must be held back, or what it sends is kept in memory.
    """

    __slots__ = (
        *("has_taken", "_shape", "_head", "_head_bytes", "_between", "_between_bytes", "_behind", "_behind_bytes"),
        *("_hides_ids", "_tails", "_markers", "_transcript", "_text"),
        *("_output", "_client", "_ticks", "_on_full"),
    )

    def __init__(
        self,
        transcript: Transcript | None,
        output: Output | None,
        client: Pausable | None,
        on_full: Callable[[], None],
        ticks: Ticks | None = None,
        *,
        hides_ids: bool,
    ) -> None:
        self.has_taken = False
        """A token was taken since this was last set to False."""
        self._transcript = transcript
        self._output = output
        self._client = client
        self._on_full = on_full
        self._ticks = ticks
        self._hides_ids = hides_ids
        self._shape: Shape | None = None

    def expect(self, shape: Shape) -> None:
        """From now on, tokens look like this."""
        if shape is self._shape:
            return
        self._shape = shape
        self._head, self._between, self._behind = shape.head, shape.between, shape.behind + b"\r\n"
        self._head_bytes, self._behind_bytes = len(self._head), len(self._behind)
        self._between_bytes = 0 if self._between is None else len(self._between)
        self._tails: list[bytes | None] = [None] * 10
        """What replaces an id of so many digits, with all that follows it."""
        transcript = self._transcript
        self._text = bytearray() if transcript is None else transcript.written(is_reasoning=shape.is_reasoning)
        self._markers: Sequence[int] | None = None
        """Ids that end reasoning; None outside of it."""
        if transcript is not None and shape.is_reasoning:
            self._markers = transcript.grammar.reasoning_end_ids

    def take(self, data: bytes) -> bytes:
        """Take the chunks that a read begins with, as far as each of them is one such token; the bytes that are left.

        `data` must begin where a chunk begins. See Connection.forward_to.
        """
        size = len(data)
        line = _SIZES[size] if size < _MAX_CHUNK_BYTES else ()
        head_at = len(line)
        if not (data.startswith(line) and data.startswith(self._head, head_at) and data.endswith(self._behind)):
            return self._take_several(data)
        begin = head_at + self._head_bytes
        end = data.find(b'"', begin)
        if end <= begin or _odd(data, begin, end) is not None:
            return data
        text = data[begin:end]
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                return data
        transcript = self._transcript
        if (between := self._between) is None:
            if end + self._behind_bytes != size:
                return data
        else:
            id_at = end + self._between_bytes
            digits = data[id_at : size - self._behind_bytes]
            if not (data.startswith(between, end) and digits.isdigit() and digits[0] != _ZERO and len(digits) < 10):
                return data
            if self._hides_ids and len(digits) < 2:
                return data  # there is no room for `null`
            if transcript is not None:
                number = int(digits)
                ids = transcript.ids
                before = len(ids)
                if self._markers is not None:
                    if number in self._markers:
                        return data
                    transcript.reasoned = transcript.reasoning_ids
                    transcript.reasoning_ids = before + 1
                ids.append(number)
                transcript.chunk_start = before
                transcript.settled = before + 1
            if self._hides_ids:
                if (tail := self._tails[len(digits)]) is None:
                    self._tails[len(digits)] = tail = b"null".ljust(len(digits) + 2) + self._behind[1:]
                data = data[: id_at - 1] + tail
        if transcript is not None:
            text_so_far = self._text
            text_so_far += text
        self.has_taken = True
        if (output := self._output) is None or output.is_closing():
            return b""
        output.write(data)
        if (ticks := self._ticks) is not None:
            ticks.count = count = ticks.count + 1
            if (phase := count & 7) == 1:
                ticks.gap_from = ticks.now()
            elif phase == 2:
                ticks.sample()
        if (client := self._client) is not None and client.is_paused:
            self._on_full()
        return b""

    def _take_several(self, data: bytes) -> bytes:
        """As `take`, of more than one chunk. The transport sends together what is written in one turn of the loop."""
        begin = 0
        while begin < len(data):
            end = data.find(_CHUNK_END, begin) + len(_CHUNK_END)
            if end < len(_CHUNK_END) or end - begin == len(data) or self.take(data[begin:end]):
                break
            begin = end
        return data[begin:]
