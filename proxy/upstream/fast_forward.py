"""Tokens that go from the engine's socket to the client's as they came, in the chunk the engine put them into. No IO.

In a long answer nearly every read is one event in one chunk of HTTP/1.1, and differs from the one before it in nothing
but its text and its token id. One function sees to that one, and the client is sent the very bytes: nothing else is
parsed, be it HTTP, events or JSON, and nothing is framed again. Ids that the client did not ask for are overwritten by
a `null` of the same length. Everything else takes the way through Relay and Delivery, which comes to the same.

Between two tokens of a stream the processor has seen hundreds of others, so that each object of a stream's own which
its token touches costs as much as a call. So there is one, Tokens, with small numbers in it, and what is behind the
text is one object for all streams of an engine. There is no regular expression: to match one byte of what is known
takes it as long as all of it takes a comparison. Text and id are only noted, to be taken many at a time or when
somebody asks.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from msgspec import Meta
from msgspec.json import Decoder

from proxy.upstream.size_lines import MAX_CHUNK_BYTES, NO_LINE, SIZE_LINES

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.token import Shape

_MAX_DIGITS: Final = 9
(_BACKSLASH,) = b"\\"  # to look for a number in bytes takes a fifth of what it takes to look for a byte of bytes
_text_of: Final = Decoder(str).decode
"""What a JSON string says. orjson comes to the same, and takes twice as long for a short one."""
_NULLS: Final = [b"null".ljust(len(b"[]") + digits) for digits in range(_MAX_DIGITS + 1)]
"""By the digits of an id, what it is overwritten by, with its brackets."""
# Of an event without carriage returns. There is no line end in the middle of it.
_CHUNK_END: Final = b"\n\n\r\n"


class Output(Protocol):
    """The client's connection: chunks can be written to it as they are."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...


Notes = tuple[list[str], list[int]]
"""Of each token that was passed on its text, and its id if it has one."""


class Ticks(Protocol):
    """Times gaps between tokens."""

    gap_from: float
    """When the gap began that is timed."""
    now: Callable[[], float]

    def sample(self) -> None:
        """The gap has ended."""


class _Rest:
    """What is behind a token's text, for all streams in which it is alike."""

    __slots__ = ("behind", "behind_bytes", "between", "id_of", "shown_behind", "skips")

    def __init__(self, between: bytes | None, behind: bytes, skips: frozenset[int], *, hides_ids: bool) -> None:
        """The first two as Shape has them, but for the quote behind the text."""
        self.between = None if between is None else between.removesuffix(b"[")
        """From behind the text up to the id's bracket; None: there is no id."""
        self.behind = behind + b"\r\n"
        """What follows the id, or else the text, with the end of the chunk."""
        self.behind_bytes = len(self.behind)
        self.shown_behind = self.behind.removeprefix(b"]") if hides_ids and between is not None else None
        """What the client gets behind the `null`; None: it gets what there is."""
        least = 10 if hides_ids else 1  # there is no room for `null` in `[7]`
        self.id_of = Decoder(Annotated[int, Meta(ge=least, lt=10**_MAX_DIGITS)]).decode
        """The id that some digits are. Raises ValueError."""
        self.skips = skips
        """Ids that stand for more than their text."""


_rest_of: Final = lru_cache(maxsize=64)(_Rest)


class Tokens:
    """What the tokens of one decoder's stream look like, and where they go."""

    __slots__ = ("_settle", "head", "index", "notes", "output", "rest", "ticks")

    def __init__(
        self,
        shape: Shape,
        notes: Notes | None,
        settle: Callable[[], None],
        output: Output | None,
        ticks: Ticks | None,
        *,
        skips: frozenset[int],
        hides_ids: bool,
    ) -> None:
        """`notes` take what is to be known of each token, see Transcript.noting, and `settle` is called when they have
        grown long; None: nobody will ask. `output` None: the answer is only kept. `skips`: ids that stand for more
        than their text.
        """
        # Here the quotes around the text belong to it.
        self.head = shape.head[:-1]
        between, behind = shape.between, shape.behind
        if between is None:
            behind = behind[1:]
        else:
            between = between[1:]
        self.rest = _rest_of(between, behind, skips, hides_ids=hides_ids)
        self.notes = notes
        self.output = output
        self.index = -1
        """Of the last part of the answer that was passed on; parts are counted from 0 on."""
        self._settle = settle
        self.ticks = ticks

    def sample(self, index: int) -> None:
        """The part with this index was passed on, with which a gap ends that is timed: one of eight."""
        if self.ticks is not None:
            self.ticks.sample()
        if not index & 8 and self.notes is not None:
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
        before = (SIZE_LINES[size] if size <= MAX_CHUNK_BYTES else NO_LINE) + tokens.head
        rest = tokens.rest
        quoted = data.removeprefix(before).removesuffix(rest.behind)
        text, number = "", None
        if len(quoted) == size - len(before) - rest.behind_bytes:  # it has both
            try:
                if (between := rest.between) is not None:
                    left, _, digits = quoted.rpartition(b"[")
                    quoted = left.removesuffix(between)
                    if len(quoted) < len(left) and digits.isdigit():
                        number = rest.id_of(digits)
                if _BACKSLASH not in quoted and (between is None or (number is not None and number not in rest.skips)):
                    text = _text_of(quoted)
            except ValueError:
                pass
        if not text:
            return not is_part and self._part(tokens, data)
        if (notes := tokens.notes) is not None:
            notes[0].append(text)
            if number is not None:
                notes[1].append(number)
        if (shown_behind := rest.shown_behind) is not None:
            data = b"".join((before, left, _NULLS[len(digits)], shown_behind))
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
            if self._tokens is not tokens:  # the client has left, or somebody else goes on with the answer
                break
        if begin < len(data):
            self._tokens = None
            self._read(data[begin:])
        return False
