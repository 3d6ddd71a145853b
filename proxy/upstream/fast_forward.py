"""Tokens that go from the engine's socket to the client's as they came, in the chunk the engine put them into. No IO.

In a long answer nearly every read is one event in one chunk of HTTP/1.1, and differs from the one before it in nothing
but its text and its token id. One function sees to that one, and the client is sent the very bytes: there is no
parsing of HTTP, events or JSON, and nothing is framed again. Ids that the client did not ask for are overwritten by a
`null` of the same length. Everything else takes the way through Relay and Delivery, which comes to the same.

Between two tokens of a stream the processor has seen hundreds of others, so that each object of a stream's own which
its token touches costs as much as a call. So there is one, Tokens, with small numbers in it, and the expression
that matches what is not alike is one for all streams of an engine. Text and id are only noted, to be read many at a
time or when somebody asks.
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


class _SizeLines(dict[int, bytes]):
    """By the length of a whole chunk what it begins with, such as `a\\r\\n` at 15. Where no chunk is so long, or it is
    longer than those of tokens, it is as many bytes: nothing begins with them and more.
    """

    def __init__(self) -> None:
        for size in range(1, _MAX_CHUNK_BYTES - 8):
            line = b"%x\r\n" % size
            self[len(line) + size + 2] = line

    def __missing__(self, chunk_bytes: int) -> bytes:
        return bytes(chunk_bytes)


_SIZE_LINES: Final = _SizeLines()
# Without what cannot be in a JSON string as it is, or stands for something else. A quote ends the text.
_TEXT: Final = rb'[^"\\\x00-\x1f]+'
_MAX_DIGITS: Final = 9
_NULLS: Final = [b"null".ljust(size) for size in range(len(b"[]") + _MAX_DIGITS + 1)]
"""By the length of a list of ids, what it is overwritten by."""
# Of an event without carriage returns. There is no line end in the middle of it.
_CHUNK_END: Final = b"\n\n\r\n"


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


@lru_cache(maxsize=64)
def _matcher(
    between: bytes | None, skips: frozenset[bytes], *, hides_ids: bool
) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Matches a token's text and what is behind it, up to the quote, or to the end of the list with its id: that is
    group 2, and group 1 what is before it. See Tokens.
    """
    if between is None:
        return re.compile(_TEXT + b'"').match
    skipped = rb"(?!(?:%b)\])" % b"|".join(sorted(skips)) if skips else b""
    least = 1 if hides_ids else 0  # there is no room for `null` in `[7]`
    return re.compile(
        rb"(%b%b)(\[%b[1-9][0-9]{%d,%d}\])" % (_TEXT, re.escape(between[:-1]), skipped, least, _MAX_DIGITS - 1)
    ).match


class Tokens:
    """What the tokens of one decoder's stream look like, and where they go."""

    __slots__ = ("_settle", "behind", "head", "hides_ids", "index", "journal", "match", "output", "ticks")

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
        self.match = _matcher(shape.between, skips, hides_ids=hides_ids)
        self.behind = shape.behind[1:] + b"\r\n"
        """What follows the match, with the end of the chunk."""
        self.hides_ids = hides_ids and shape.between is not None
        self.journal = journal
        self.output = output
        self.index = -1
        """Of the last part of the answer that was passed on; parts are counted from 0 on."""
        self._settle = settle
        self.ticks = ticks

    def sample(self, index: int) -> None:
        """The part with this index was passed on, with which a gap ends that is timed: one of eight."""
        if self.ticks is not None:
            self.ticks.sample()
        if not index & 8 and self.journal is not None:
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
        before = _SIZE_LINES[len(data)] + tokens.head
        if (
            not data.startswith(before)
            or (token := tokens.match(data, len(before))) is None
            or data[token.end() :] != tokens.behind
            or not (data.isascii() or _is_text(token[0]))
        ):
            return False if is_part else self._part(tokens, data)
        if (journal := tokens.journal) is not None:
            journal.append(token[0])
        if tokens.hides_ids:
            data = before + token[1] + _NULLS[len(token[2])] + tokens.behind
        self.is_active = True
        if (output := tokens.output) is not None and not output.is_closing():
            output.write(data)
        tokens.index = index = tokens.index + 1
        if not index & 6:
            if index & 1:
                tokens.sample(index)
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
