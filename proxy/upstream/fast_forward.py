"""Tokens that go from the engine's socket to the client's as they came, in the chunk the engine put them into. No IO.

In a long answer nearly every read is one event in one chunk of HTTP/1.1, and differs from the one before it in nothing
but its text and its token id. One function sees to that one, and the client is sent the very bytes: nothing else is
parsed, be it HTTP, events or JSON, and nothing is framed again. Ids that the client did not ask for are overwritten by
a `null` of the same length, and KV parameters that are null are left out. Everything else takes the way through Relay
and Delivery, which comes to the same.

Between two tokens of a stream the processor has seen hundreds of others, so that each object of a stream's own which
its token touches costs as much as a call. So there is one, Tokens, with small numbers in it, and what is behind the
text is one object for all streams of an engine. There is no regular expression: to match one byte of what is known
takes it as long as all of it takes a comparison. Text and id are only noted, to be taken many at a time or when
somebody asks.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import orjson

from proxy.upstream.answer_reader import MAX_CHUNK_BYTES, NO_LINE, SIZE_LINES
from proxy.wire.openai import NO_KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.sse import Shape

_MAX_DIGITS: Final = 9
_ZERO: Final = 48
_NINE: Final = 57
"""Of ASCII."""
_text_of: Final = orjson.loads
"""What a JSON string says."""
_PLAIN: Final = bytes(int(byte == 0) if byte < 0x20 or byte in b'"\\' else byte for byte in range(256))
"""Translates text that JSON writes as it is to itself, and no other."""
_NULLS: Final = [b"null".ljust(len(b"[]") + digits) for digits in range(_MAX_DIGITS + 1)]
"""By the digits of an id, what it is overwritten by, with its brackets."""
# Of an event without carriage returns. There is no line end in the middle of it.
_CHUNK_END: Final = b"\n\n\r\n"
_SIZE_LINES: Final = SIZE_LINES  # what is a module's own is found sooner


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

    __slots__ = (
        *("behind", "behind_bytes", "between", "between_bytes", "cut_bytes", "hides_ids", "least_digits"),
        *("shown_behind", "skips"),
    )

    def __init__(self, between: bytes | None, behind: bytes, skips: frozenset[int], *, hides_ids: bool) -> None:
        """The first two as Shape has them."""
        self.between = between
        """From behind the text up to the id, its bracket included; None: there is no id."""
        self.between_bytes = 0 if between is None else len(between)
        self.behind = behind + b"\r\n"
        """What follows the id, or else the text, with the end of the chunk."""
        self.behind_bytes = len(self.behind)
        self.hides_ids = hides_ids and between is not None
        shown = self.behind.replace(NO_KV_PARAMS, b"")
        self.cut_bytes = self.behind_bytes - len(shown)
        """By how much the chunk gets shorter for the client, who is not told of KV parameters."""
        self.shown_behind: bytes | None = None
        """What the client gets behind the text or the `null`; None: the chunk as it is."""
        if self.hides_ids:
            self.shown_behind = shown.removeprefix(b"]")
        elif self.cut_bytes:
            self.shown_behind = shown
        self.least_digits = 2 if hides_ids else 1  # there is no room for `null` in `[7]`
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
        self.head = shape.head
        self.rest = _rest_of(shape.between, shape.behind, skips, hides_ids=hides_ids)
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

    __slots__ = ("_tokens", "arrivals")

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        """Which of the next reads are passed on, if they begin with such chunks; None: none is."""
        self.arrivals = 0
        """How many parts of a streamed answer have arrived since silence was last checked."""

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
        before = (_SIZE_LINES[size] if size <= MAX_CHUNK_BYTES else NO_LINE) + tokens.head
        rest = tokens.rest
        text, number, digits, end = "", 0, 0, 0
        if data.startswith(before) and data.endswith(rest.behind):
            begin, end = len(before), size - rest.behind_bytes
            text_end = end
            if (between := rest.between) is not None:
                scale, at = 1, end - 1
                while _ZERO <= data[at] <= _NINE and digits < _MAX_DIGITS:
                    number += (data[at] - _ZERO) * scale
                    scale *= 10
                    at -= 1
                    digits += 1
                text_end = at + 1 - rest.between_bytes
                if (
                    digits < rest.least_digits
                    or (number * 10 < scale and digits > 1)  # it begins with a zero
                    or number in rest.skips
                    or data[max(text_end, 0) : at + 1] != between
                ):
                    text_end = 0
            if text_end > begin:
                written = data[begin:text_end]
                try:
                    text = written.decode() if written.translate(_PLAIN) == written else _text_of(b'"%b"' % written)
                except ValueError:
                    text = ""
        if not text:
            return not is_part and self._part(tokens, data)
        if (notes := tokens.notes) is not None:
            notes[0].append(text)
            if digits:
                notes[1].append(number)
        if (shown_behind := rest.shown_behind) is not None:
            if not rest.cut_bytes:
                data = b"%b%b%b" % (data[: end - digits - 1], _NULLS[digits], shown_behind)
            else:
                line = len(before) - len(tokens.head)
                shown_bytes = size - line - len(b"\r\n") - rest.cut_bytes
                if rest.hides_ids:
                    told, null = data[line : end - digits - 1], _NULLS[digits]
                    data = b"%x\r\n%b%b%b" % (shown_bytes, told, null, shown_behind)
                else:
                    data = b"%x\r\n%b%b" % (shown_bytes, data[line:end], shown_behind)
        self.arrivals += 1
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
