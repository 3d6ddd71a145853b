"""Splitting a byte stream into events: the same events however the network cuts the bytes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.sse import Event, EventSplitter, EventTooLong

STREAMS = {
    "one event": b"data: 1\n\n",
    "several events": b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    "CRLF": b"data: 1\r\n\r\ndata: 2\r\n\r\n",
    "CR": b"data: 1\r\rdata: 2\r\r",
    "mixed line ends": b"data: 1\n\r\ndata: 2\r\n\ndata: 3\r\r\ndata: 4\n\rdata: 5\r\n\rdata: 6\r\r\n\ndata: 7\n\n",
    "LF, then CRLF": b"data: 1\n\ndata: 2\r\n\r\ndata: 3\n\n",
    "comments": b": ping\n\ndata: 1\n: in between\n\n:\n\n",
    "several data lines": b"data: 1\ndata: 2\r\ndata: 3\n\n",
    "no space": b"data:1\n\ndata:  2\n\n",
    "no value": b"data\n\ndata:\n\n",
    "other fields": b"event: token\nid: 7\ndata: 1\nretry: 3\n\nevent: nothing\n\n",
    "blank lines": b"\n\n\ndata: 1\n\n\n\n\r\n\ndata: 2\n\n",
    "UTF-8": "data: 你好, wörld 🙂\n\n".encode(),
    "not UTF-8": b"data: \xff\xfe\n\n",
    "unfinished": b"data: 1\n\ndata: 2",
    "line separators of Unicode": "data: a\u2028b\x85c\x0bd\n\n".encode(),
}


def events_of(*chunks: bytes) -> tuple[list[Event], bytes]:
    splitter = EventSplitter()
    return [event for chunk in chunks for event in splitter.split_chunk(chunk)], splitter.pending_bytes


def data_of(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


def reference(stream: bytes) -> list[bytes]:
    """Return the data of all events, read line by line as the WHATWG grammar describes."""
    dispatched: list[bytes] = []
    data: list[bytes] = []
    for line in re.findall(rb"([^\r\n]*)(?:\r\n|\n|\r)", stream):
        name, _, value = line.partition(b":")
        if line == b"":
            if data:
                dispatched.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return dispatched


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_uncut_stream_has_the_events_of_the_grammar(stream: bytes) -> None:
    events, pending = events_of(stream)
    assert data_of(events) == reference(stream)
    assert b"".join(event.raw for event in events) + pending == stream


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_splitter_result_does_not_depend_on_one_cut(stream: bytes) -> None:
    for cut in range(len(stream) + 1):
        assert events_of(stream[:cut], stream[cut:]) == events_of(stream)


@pytest.mark.parametrize("stream", [STREAMS["mixed line ends"], STREAMS["CRLF"]])
def test_splitter_result_does_not_depend_on_two_cuts(stream: bytes) -> None:
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            assert events_of(stream[:first], stream[first:second], stream[second:]) == events_of(stream)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_stream_byte_by_byte_has_the_same_events(stream: bytes) -> None:
    assert events_of(*(stream[i : i + 1] for i in range(len(stream)))) == events_of(stream)


LINES = st.sampled_from(
    [
        b"",
        b"data: x",
        b"data:y",
        b"data:  z",
        b"data",
        b"data:",
        b": note",
        b"id: 1",
        b"database: no",
        b"data: \xc3\xa9",
    ]
)
LINE_ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@given(lines=st.lists(st.tuples(LINES, LINE_ENDS)), cuts=st.lists(st.integers(0, 200)))
def test_splitter_reads_any_lines_with_any_line_ends_and_cuts(
    lines: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    # The colon at the end makes the last line end unambiguous: a CR alone might still become a CRLF.
    stream = b"".join(line + end for line, end in lines) + b":"
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events, pending = events_of(*(stream[start:end] for start, end in pairwise(edges)))
    assert (events, pending) == events_of(stream)
    assert b"".join(event.raw for event in events) + pending == stream
    assert data_of(events) == reference(stream)


@given(stream=st.binary(max_size=60), cut=st.integers(0, 60))
def test_splitter_accepts_any_bytes(stream: bytes, cut: int) -> None:
    stream += b":"
    assert events_of(stream[:cut], stream[cut:]) == events_of(stream)
    assert data_of(events_of(stream)[0]) == reference(stream)


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
def test_event_is_returned_as_soon_as_it_is_complete(blank: bytes) -> None:
    events, pending = events_of(b"data: [DONE]" + blank)
    assert events == [Event(b"[DONE]", b"data: [DONE]" + blank)]
    assert pending == b""


def test_splitter_waits_for_the_line_feed_of_a_crlf() -> None:
    splitter = EventSplitter()
    assert splitter.split_chunk(b"data: 1\r\n\r") == []
    assert splitter.split_chunk(b"\n") == [Event(b"1", b"data: 1\r\n\r\n")]
    assert splitter.pending_bytes == b""


def test_event_without_data_is_an_event() -> None:
    assert events_of(b": ping\n\nevent: x\n\n")[0] == [Event(None, b": ping\n\n"), Event(None, b"event: x\n\n")]


def test_pending_bytes_follow_the_last_complete_event() -> None:
    assert events_of(b"data: 1\n\ndata: 2\n")[1] == b"data: 2\n"
    assert events_of(b"data: 1\n\n")[1] == b""


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_event_that_does_not_end_is_refused(line_end: bytes) -> None:
    splitter = EventSplitter(max_event_bytes=20)
    assert len(splitter.split_chunk(b"data: 1" + line_end * 2 + b"data: 2345" + line_end)) == 1
    with pytest.raises(EventTooLong):
        splitter.split_chunk(b"data: 67890")


def test_chunk_of_many_events_may_be_longer_than_one_event_may_be() -> None:
    assert len(EventSplitter(max_event_bytes=20).split_chunk(b"data: 1\n\n" * 100)) == 100
