"""Splitting arbitrary streams into events, with arbitrary cuts."""

from __future__ import annotations

from typing import Final

from proxy.wire.sse import Event, EventSplitter, EventTooLong
from tests.fuzz.cutting import cut, singly, spelled, words
from tests.wire.test_sse import reference

_SHORT_BYTES = 24

WORDS: Final = words(
    r"""
    data:\x20 data: data event:\x20x :\x20ping id:\x201 retry:\x202 [DONE] {} \n\n \r\n \r\n\r\n \r\r \n\r
    \xef\xbb\xbf \xff \xe2\x80\xa8 x*30
    """
)


def check_events(data: bytes) -> None:
    """Check that all cuts of the same bytes give the events of the grammar, and lose no byte."""
    stream = spelled(data[1:], WORDS)
    pieces = cut(data[0] if data else 0, stream)
    events, rest = _split([stream])
    assert _split(pieces) == _split(singly(stream)) == (events, rest)
    assert b"".join(event.raw for event in events) + rest == stream

    # Only the next byte shows whether a last CR is a complete line end.
    data_of_events = [event.data for event in _split([stream, b":"])[0] if event.data is not None]
    assert data_of_events == reference(stream + b":")

    longest = max(map(len, (*(event.raw for event in events), rest)))
    assert longest > _SHORT_BYTES or not _is_too_long(pieces)
    assert longest <= _SHORT_BYTES + 4 or _is_too_long(singly(stream))


def _split(pieces: list[bytes]) -> tuple[list[Event], bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.split_chunk(piece)], splitter.pending_bytes


def _is_too_long(pieces: list[bytes]) -> bool:
    splitter = EventSplitter(_SHORT_BYTES)
    try:
        for piece in pieces:
            splitter.split_chunk(piece)
    except EventTooLong:
        return True
    return False
