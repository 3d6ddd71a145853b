"""Forward tokens from engine to client in the chunks of the engine, without parsing. No IO.

In a long answer nearly every read is one event in one HTTP/1.1 chunk, and differs from the one before only in text and
token ID. One function recognises it and sends the same bytes to the client, without parsing HTTP, events or JSON. IDs
that the client did not request are overwritten by a `null` of the same length. KV parameters that are null are removed.
All other bytes go through Relay and Delivery, with the same result.

Between two tokens of a stream the processor handles hundreds of others, so each object of the stream that a token
touches costs as much as a call. So a stream has only one object, TokenFormat, and all streams of an engine share the
bytes after the text. There are no regular expressions: matching one known byte takes as long as comparing all of them.
Text and ID are only noted, and processed later in batches.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import orjson

from proxy.upstream.answer_reader import MAX_CHUNK_BYTES, NO_LINE, SIZE_LINES
from proxy.upstream.gathering import FIRST_TOKENS, NEVER, TokenGathering
from proxy.wire.openai import NO_KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.sse import TokenShape

_MAX_DIGITS: Final = 9
_ZERO: Final = 48
_NINE: Final = 57
"""The ASCII codes of the digits 0 and 9."""
_text_of: Final = orjson.loads
"""Reads a JSON string."""
_PLAIN: Final = bytes(int(byte == 0) if byte < 0x20 or byte in b'"\\' else byte for byte in range(256))
"""A translation table that changes every text which JSON writes with escapes, and no other text."""
_NULLS: Final = [b"null".ljust(len(b"[]") + digits) for digits in range(_MAX_DIGITS + 1)]
"""The bytes that replace an ID and its brackets, by the number of the ID's digits."""
# End of a chunk with one event without carriage returns. It cannot occur inside the event.
_CHUNK_END: Final = b"\n\n\r\n"
_NO_PARTS: Final[list[bytes]] = []
_SIZE_LINES: Final = SIZE_LINES  # a name of this module is found faster


class ClientOutput(Protocol):
    """The connection to a client, to which chunks are written unchanged."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...


TokenNotes = tuple[list[str], list[int]]
"""The texts of the tokens that were forwarded, and their IDs if there are any."""


class GapClock(Protocol):
    """Measures the gaps between the tokens of a stream."""

    gap_started_at: float
    """Time when the measured gap began."""
    now: Callable[[], float]
    """Returns the time in seconds."""

    def record_gap(self) -> None:
        """Record the gap between two tokens that ends now."""


class _TokenSuffix:
    """The bytes after the text of a token. All streams with the same bytes share one object."""

    def __init__(self, between: bytes | None, behind: bytes, skips: frozenset[int], *, hides_ids: bool) -> None:
        """Prepare the bytes. `between` and `behind` are those of a TokenShape; the others are those of TokenFormat."""
        self.bytes_before_id = between
        """The bytes between text and ID, including the opening bracket; None if there is no ID."""
        self.length_before_id = 0 if between is None else len(between)
        self.bytes_after_id = behind + b"\r\n"
        """The bytes after the ID, or after the text if there is no ID, including the end of the chunk."""
        self.length_after_id = len(self.bytes_after_id)
        self.hides_ids = hides_ids and between is not None
        shown = self.bytes_after_id.replace(NO_KV_PARAMS, b"")
        self.omitted_length = self.length_after_id - len(shown)
        """The number of bytes by which the chunk becomes shorter when KV parameters are removed."""
        self.shown_bytes_after_id: bytes | None = None
        """The bytes that the client receives after the text or `null`; None if the chunk stays unchanged."""
        if self.hides_ids:
            self.shown_bytes_after_id = shown.removeprefix(b"]")
        elif self.omitted_length:
            self.shown_bytes_after_id = shown
        self.least_digits = 2 if hides_ids else 1  # there is no room for `null` in `[7]`
        self.skips = skips
        """IDs of tokens that cannot be forwarded, because they need more than their text, such as special tokens."""


_rest_of: Final = lru_cache(maxsize=64)(_TokenSuffix)


class TokenFormat:
    """The format of the tokens of one stream, and their destination."""

    def __init__(
        self,
        shape: TokenShape,
        notes: TokenNotes | None,
        settle: Callable[[], None],
        output: ClientOutput | None,
        gap_clock: GapClock | None,
        *,
        skips: frozenset[int],
        hides_ids: bool,
        may_wait: bool = True,
    ) -> None:
        """Create the tokens.

        Args:
            shape: The bytes that all tokens share.
            notes: Receives the text and ID of each token; see Transcript.token_lists. None: they are not needed.
            settle: Called when the notes have grown long.
            output: Connection to the client; None: the answer is only kept.
            gap_clock: Measures gaps; None: they are not measured.
            skips: IDs of tokens that need more than their text, and so are not passed on.
            hides_ids: Whether to overwrite the IDs, because the client did not request them.
            may_wait: Whether several tokens may be read together, see TokenGathering.
        """
        self.bytes_before_text = shape.bytes_before_text
        self.token_suffix = _rest_of(shape.bytes_between, shape.bytes_after_id, skips, hides_ids=hides_ids)
        self.token_notes = notes
        self.client_output = output
        self.index = -1
        """The index of the last token that was forwarded, counted from 0; -1 if there is none."""
        self._settle_noted_tokens = settle
        self.token_clock = gap_clock
        self.first_waiting_index = FIRST_TOKENS if may_wait else NEVER
        """The index of the first token after which the next ones may wait."""

    def begin_gap(self) -> None:
        """Begin to measure the gap after the present token. One gap of eight is measured."""
        if (gap_clock := self.token_clock) is not None:
            gap_clock.gap_started_at = gap_clock.now()

    def sample(self) -> None:
        """Record the gap that ends with the present token."""
        if self.token_clock is not None:
            self.token_clock.record_gap()
        if not self.index & 8 and self.token_notes is not None:
            self._settle_noted_tokens()


class FastForward(asyncio.Protocol):
    """The base of connections to engines. It forwards tokens, and gives all other bytes to `_process_read`."""

    def __init__(self) -> None:
        self._passed_tokens: TokenFormat | None = None
        """The format of the tokens to forward; None if nothing is forwarded."""
        self._is_pump_available = False
        """Whether tokens are forwarded here and could be forwarded in C."""
        self.arrived_tokens = 0
        """The number of parts of a streamed answer since the last check of silence."""
        self._noted_parts: list[bytes] = _NO_PARTS
        """The tokens of the present read that are written together."""
        self.token_gathering: TokenGathering | None = None
        """Decides whether tokens wait; None: they never wait."""

    def _process_read(self, data: bytes) -> None:
        """Process bytes that are not forwarded. If tokens were forwarded before, the bytes begin with a chunk."""
        raise NotImplementedError

    def data_received(self, data: bytes, is_part: bool = False) -> bool:  # type: ignore[override]
        """Forward one token, or give the bytes to `_process_read`. Returns whether a token was forwarded.

        With `is_part`, other bytes are not processed, and the result is False. Event loops ignore the result.
        """
        tokens = self._passed_tokens
        if tokens is None:
            self._process_read(data)
            return False
        size = len(data)
        before = (_SIZE_LINES[size] if size <= MAX_CHUNK_BYTES else NO_LINE) + tokens.bytes_before_text
        rest = tokens.token_suffix
        text, number, digits, end = "", 0, 0, 0
        if data.startswith(before) and data.endswith(rest.bytes_after_id):
            begin, end = len(before), size - rest.length_after_id
            text_end = end
            if (between := rest.bytes_before_id) is not None:
                scale, at = 1, end - 1
                while _ZERO <= data[at] <= _NINE and digits < _MAX_DIGITS:
                    number += (data[at] - _ZERO) * scale
                    scale *= 10
                    at -= 1
                    digits += 1
                text_end = at + 1 - rest.length_before_id
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
            return not is_part and self._forward_leading_chunks(tokens, data)
        if (notes := tokens.token_notes) is not None:
            notes[0].append(text)
            if digits:
                notes[1].append(number)
        if (shown_behind := rest.shown_bytes_after_id) is not None:
            if not rest.omitted_length:
                data = b"%b%b%b" % (data[: end - digits - 1], _NULLS[digits], shown_behind)
            else:
                line = len(before) - len(tokens.bytes_before_text)
                shown_bytes = size - line - len(b"\r\n") - rest.omitted_length
                if rest.hides_ids:
                    before_id, null = data[line : end - digits - 1], _NULLS[digits]
                    data = b"%x\r\n%b%b%b" % (shown_bytes, before_id, null, shown_behind)
                else:
                    data = b"%x\r\n%b%b" % (shown_bytes, data[line:end], shown_behind)
        self.arrived_tokens += 1
        if is_part:
            self._noted_parts.append(data)
        elif (output := tokens.client_output) is not None and not output.is_closing():
            output.write(data)
        tokens.index = index = tokens.index + 1
        if not index & 6:
            if index & 1:
                tokens.sample()
                if self._is_pump_available:
                    self._pump_soon(tokens)
            elif (gap_clock := tokens.token_clock) is not None:
                gap_clock.gap_started_at = gap_clock.now()
        if (
            index >= tokens.first_waiting_index
            and self.token_gathering is not None
            and self.token_gathering.round_seconds
        ):
            self._wait_for_round(self.token_gathering)
        return True

    def _wait_for_round(self, gathering: TokenGathering) -> None:
        """Stop reading until the next round, unless reading is stopped already."""

    def _pump_soon(self, tokens: TokenFormat) -> None:
        """Let the next tokens be forwarded in C, if that is possible then."""

    def _forward_leading_chunks(self, tokens: TokenFormat, data: bytes) -> bool:
        """Forward the tokens at the beginning of a read with several chunks, and process the rest. Returns False.

        The transport of an engine sends chunks together that are written in one turn of its event loop.
        """
        begin = 0
        parts = self._noted_parts = []
        while begin < len(data):
            end = data.find(_CHUNK_END, begin) + len(_CHUNK_END)
            if end < len(_CHUNK_END) or end - begin == len(data) or not self.data_received(data[begin:end], True):
                break
            begin = end
            if self._passed_tokens is not tokens:  # the client disconnected, or the answer is no longer passed on
                break
        # One write, because the transport of a client makes a system call for each.
        if parts and (output := tokens.client_output) is not None and not output.is_closing():
            output.write(b"".join(parts))
        self._noted_parts = _NO_PARTS
        if begin < len(data):
            self._passed_tokens = None
            self._process_read(data[begin:])
        return False
