"""Tokens that go from the engine's socket to the client's as they came, in the chunk the engine put them into. No IO.

In a long answer nearly every read is one event in one chunk of HTTP/1.1, and differs from the one before it in nothing
but its text and its token id. One function sees to that one, and the client is sent the very bytes: there is no
parsing of HTTP, events or JSON, and nothing is framed again. Ids that the client did not ask for are overwritten by a
`null` of the same length. Everything else takes the way through Relay and Delivery, which comes to the same.

Between two tokens of a stream the processor has seen hundreds of others, so that each object of a stream's own which
its token touches costs as much as a call. So there is one, Tokens, with small numbers in it, and what streams have in
common is one object for all of them. Text and id are only noted, to be read many at a time or when somebody asks.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

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
_MAX_DIGITS: Final = 9


class Output(Protocol):
    """The client's connection: chunks can be written to it as they are."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...


class Ticks(Protocol):
    """Times gaps between tokens."""

    gap_from: float
    """When the gap began that is timed."""
    now: Callable[[], float]

    def sample(self) -> None:
        """The gap has ended."""


class _Frame:
    """What the tokens of an engine have in common behind their text, whoever asked for them."""

    __slots__ = ("behind", "between", "skips", "tails")

    def __init__(self, between: bytes | None, behind: bytes, skips: frozenset[bytes], *, hides_ids: bool) -> None:
        self.between = between
        """See Shape."""
        self.behind = behind
        """See Shape; with the end of the chunk."""
        self.skips = skips
        """The digits of ids that are not passed on."""
        shortest = len(b"[]") if hides_ids else 1  # there is no room for `null` in `[7]`
        self.tails: list[bytes | None] = [
            None if digits < shortest else b"null".ljust(digits + 2) + behind[1:] if hides_ids else b""
            for digits in range(_MAX_DIGITS + 1)
        ]
        """By the number of an id's digits, what replaces its list and all that follows; empty: it stays; None: such an
        id is not passed on."""


@lru_cache(maxsize=64)
def _frame(between: bytes | None, behind: bytes, skips: frozenset[bytes], *, hides_ids: bool) -> _Frame:
    return _Frame(between, behind, skips, hides_ids=hides_ids)


class Tokens:
    """What the tokens of one decoder's stream look like, and where they go."""

    __slots__ = ("_settle", "frame", "has_passed", "head", "journal", "output", "phase", "ticks")

    def __init__(
        self,
        shape: Shape,
        journal: list[bytes] | None,
        settle: Callable[[], None],
        output: Output | None,
        ticks: Ticks | None,
        *,
        skips: frozenset[bytes],
        hides_ids: bool,
    ) -> None:
        """`journal` takes what is to be known of each token, see Transcript.journal, and `settle` is called when it has
        grown long; None: nobody will ask. `output` None: the answer is only kept. `skips`: the digits of ids that stand
        for more than their text.
        """
        self.head = shape.head
        self.frame = _frame(shape.between, shape.behind + b"\r\n", skips, hides_ids=hides_ids)
        self.journal = journal
        self.output = output
        self.has_passed = False
        """A token was passed on since this was last set to False."""
        self.phase = 0
        """Counts the tokens that the client gets, from 0 to 15 and from 0 again."""
        self._settle = settle
        self.ticks = ticks

    def sample(self, phase: int) -> None:
        """One of eight tokens was passed on, with which a gap ends that is timed."""
        if self.ticks is not None:
            self.ticks.sample()
        if phase == 1 and self.journal is not None:
            self._settle()


class FastForward(asyncio.Protocol):
    """A connection to an engine, as far as it passes tokens on. What it does not, `_read` is given."""

    __slots__ = ("_tokens", "is_active")

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        """Which of the next reads are passed on, if they begin with such chunks; None: none is."""
        self.is_active = False
        """Some of a streamed answer has arrived since silence was last checked."""

    def _read(self, data: bytes) -> None:
        """Take bytes that are not passed on. They begin where a chunk does, if tokens were passed on before."""
        raise NotImplementedError

    def data_received(self, data: bytes, is_part: bool = False) -> bool:  # type: ignore[override]
        """Take what was read. `is_part`: nothing is done with what is not passed on; False: it is not.

        Event loops do not look at what is returned.
        """
        tokens = self._tokens
        if tokens is None:
            self._read(data)
            return False
        size = len(data)
        line = _SIZES[size] if size < _MAX_CHUNK_BYTES else ()
        line_bytes, head, frame = len(line), tokens.head, tokens.frame
        begin = line_bytes + len(head)
        behind = frame.behind
        stop = size - len(behind)
        if data[:line_bytes] != line or data[line_bytes:begin] != head or data[stop:] != behind:
            return False if is_part else self._part(tokens, data)
        end = data.find(b'"', begin)
        if end <= begin or _odd(data, begin, end) is not None or not (data.isascii() or _is_text(data[begin:end])):
            return False if is_part else self._part(tokens, data)
        journal = tokens.journal
        if (between := frame.between) is None:
            if end != stop:
                return False if is_part else self._part(tokens, data)
            if journal is not None:
                journal.append(data[begin : stop + 1])
        else:
            id_at = end + len(between)
            digits = data[id_at:stop]
            if (
                data[end:id_at] != between
                or not digits.isdigit()
                or (digits_count := stop - id_at) > _MAX_DIGITS
                or (tail := frame.tails[digits_count]) is None
                or digits[0] == _ZERO
                or digits in frame.skips
            ):
                return False if is_part else self._part(tokens, data)
            if journal is not None:
                journal.append(data[begin : stop + 1])
            if tail:
                data = data[: id_at - 1] + tail
        self.is_active = tokens.has_passed = True
        if (output := tokens.output) is not None and not output.is_closing():
            output.write(data)
        tokens.phase = phase = (tokens.phase + 1) & 15
        if (place := phase & 7) < 2:
            if place:
                tokens.sample(phase)
            elif (ticks := tokens.ticks) is not None:
                ticks.gap_from = ticks.now()
        return True

    def _part(self, tokens: Tokens, data: bytes) -> bool:
        """Pass on the chunks that a read begins with, as far as each is a token, and read the rest. False.

        The transport of an engine sends together what is written in one turn of its loop.
        """
        begin = 0
        while begin < len(data):
            end = data.find(_CHUNK_END, begin) + len(_CHUNK_END)
            if end < len(_CHUNK_END) or end - begin == len(data) or not self.data_received(data[begin:end], True):
                break
            begin = end
            if self._tokens is not tokens:  # the client has left
                return False
        if begin < len(data):
            self._tokens = None
            self._read(data[begin:])
        return False


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
