"""Ordinary answers are read without a parser, and as httptools reads them; those that only look ordinary, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.upstream.answer_reader import AnswerReader
from proxy.upstream.any_answer import BadAnswer, UnusualAnswer
from tests.upstream.raw import OK, STREAM_HEAD, chunk

# Each list has common, unusual and broken parts.
STATUS_LINES = (
    [b"HTTP/1.1 200 OK", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 503 "],
    [
        *(b"HTTP/1.1 500 a\xc3\xbcb", b"HTTP/1.1 200", b"HTTP/1.1 204 X", b"HTTP/1.1 304 X", b"HTTP/1.1 205 X"),
        *(b"HTTP/1.1 100 Continue", b"HTTP/1.1 101 X", b"HTTP/1.0 200 OK", b"HTTP/2.0 200 OK", b"http/1.1 200 OK"),
        *(b"HTTP/1.1  200 OK", b"HTTP/1.1 600 X", b"HTTP/1.1 2000 X", b"", b" HTTP/1.1 200 OK", b"HTTP/1.1 200 a\tb"),
    ],
)
FIELDS = (
    [
        *(
            b"Content-Type: text/event-stream; charset=utf-8",
            b"Date: Sun, 22 Nov 2026 17:00:00 GMT",
            b"server: uvicorn",
        ),
        *(b"X-Odd!#$%&'*+.^_`|~: ", b"X-Empty:", b"X-Blank: \t ", b"X-A:\t a \t", b"x-a: b:c", b"X: \xc3\xa9"),
        *(b"Connection: keep-alive", b"connection: Close", b"Keep-Alive: timeout=5", b"X-Content-Length: 9"),
    ],
    [
        *(
            b" folded",
            b"\tfolded",
            b"no colon",
            b": 1",
            b"X : 1",
            b"X: \x01",
            b"X: \x7f",
            b"X: \0",
            b"X: a\rb",
            b"X: a\nb",
        ),
        *(
            b"Connection: close, X",
            b"Connection: upgrade",
            b"Connection:",
            b"Connection: close",
            b"Proxy-Connection: close",
        ),
        *(
            b"X-\xc3: 1",
            b"Upgrade: h2c",
            b"Trailer: X",
            b"Content-Length: 3",
            b"Transfer-Encoding: chunked",
            b"\r",
            b"",
        ),
    ],
)
LINE_ENDS = ([b"\r\n"], [b"\n", b"\r", b"\r\r\n", b"\n\r", b""])
SIZES = (
    [b"%x", b"%X", b"%06x"],
    [b"%012x", b"%x;a=b", b"%x ", b" %x", b"+%x", b"0x%x", b"_%x", b"1%x", b"-%x", b"%xg"],
)
LENGTHS = (
    [b"%d", b"\t %d"],
    [b"%d ", b"0%d", b"+%d", b"-%d", b"%d, %d", b"0x%d", b"%d0" + b"0" * 15, b"", b"1%d", b"%d;"],
)
CODINGS = ([b"chunked", b"Chunked"], [b"chunked ", b"gzip", b"gzip, chunked", b"chunked, chunked", b"", b"xchunked"])
END_MARKS = ([b"0\r\n\r\n"], [b"", b"00\r\n\r\n", b"0\r\nX: 1\r\n\r\n", b"0\n\n", b"0;a\r\n\r\n", b"0\r\n"])
TAILS = ([b""], [b"\r\n", b"x", OK, b"0\r\n\r\n"])
PARTS = (STATUS_LINES, FIELDS, LINE_ENDS, SIZES, LENGTHS, CODINGS, END_MARKS, TAILS)
BODIES = st.lists(
    st.sampled_from([b"x", b"data: {}\n\n", b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", bytes(300)]), max_size=5
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Ordinary ones, but for at most two of their parts, and perhaps a byte."""
    spoilt = draw(st.sets(st.integers(0, len(PARTS) - 1), max_size=2))

    def one_of(part: tuple[list[bytes], list[bytes]]) -> bytes:
        usual, odd = part
        return draw(st.sampled_from(usual + odd if PARTS.index(part) in spoilt else usual))

    def line(text: bytes) -> bytes:
        return text + one_of(LINE_ENDS)

    pieces = draw(BODIES)
    fields = [one_of(FIELDS) for _ in range(draw(st.integers(0, 4)))]
    is_chunked = draw(st.booleans())
    if is_chunked:
        fields.append(b"Transfer-Encoding: " + one_of(CODINGS))
        body = b"".join(line(one_of(SIZES) % len(piece)) + line(piece) for piece in pieces) + one_of(END_MARKS)
    else:
        body = b"".join(pieces)
        fields.append(b"content-length:" + one_of(LENGTHS).replace(b"%d", b"%d" % len(body)))
    head = line(one_of(STATUS_LINES)) + b"".join(map(line, draw(st.permutations(fields)))) + one_of(LINE_ENDS)
    whole = head + body + one_of(TAILS)
    if draw(st.integers(0, 4)) == 0:  # a byte that is another, missing or one too many
        at = draw(st.integers(0, len(whole)))
        other = draw(st.sampled_from([b"", b"\r", b"\n", b"0", b"f", b" ", b"\0"]))
        whole = whole[:at] + other + whole[at + draw(st.integers(0, 1)) :]
    return whole


@st.composite
def cut_answers(draw: st.DrawFn) -> list[bytes]:
    whole = draw(answers())
    if draw(st.booleans()):  # as engines write: the head, and each chunk
        head, blank, body = whole.partition(b"\r\n\r\n")
        places = draw(st.sets(st.integers(0, len(body)), max_size=6))
        return [head + blank, *pieces_of(body, places)]
    return pieces_of(whole, draw(st.sets(st.integers(0, len(whole)), max_size=8)))


def pieces_of(data: bytes, places: set[int]) -> list[bytes]:
    ends = [*sorted(places), len(data)]
    return [piece for begin, end in zip([0, *ends], ends, strict=False) if (piece := data[begin:end])]


def told(reader: AnswerReader | UnusualAnswer, pieces: Sequence[bytes]) -> list[Any]:
    """Return the state of an answer after each piece, until it is complete or broken."""
    steps: list[Any] = []
    for piece in pieces:
        try:
            body: bytes | None = reader.add_bytes(piece)
        except BadAnswer:
            body = None
        headers = list(reader.headers.items()) if reader.status else []
        ending = reader.keeps_alive if reader.is_complete else None
        steps.append((body, reader.status, headers, reader.is_complete, ending))
        if body is None or reader.is_complete:
            break
    reader.close_parser()
    return steps


@settings(max_examples=400)
@given(cut_answers())
def test_answer_reader_agrees_with_httptools(pieces: list[bytes]) -> None:
    assert told(AnswerReader(), pieces) == told(UnusualAnswer(), pieces)


def with_one_oddity() -> Iterator[bytes]:
    """Each oddity, at each place where it can be."""
    for is_chunked in (True, False):
        for odd in range(len(PARTS)):
            for value in PARTS[odd][1]:
                parts = [part[0][0] for part in PARTS]
                parts[odd] = value
                status_line, field, line_end, size, length, coding, end_mark, tail = parts
                framing = (
                    b"Transfer-Encoding: " + coding if is_chunked else b"Content-Length:" + length.replace(b"%d", b"2")
                )
                body = size % 2 + b"\r\nok\r\n" + end_mark if is_chunked else b"ok"
                lines = [status_line, field, framing, b"", body]
                for changed in range(len(lines) - 1) if odd == PARTS.index(LINE_ENDS) else (0,):
                    ends = [b"\r\n"] * 4 + [b""]
                    ends[changed] = line_end
                    yield b"".join(line + end for line, end in zip(lines, ends, strict=True)) + tail
    for end in (b"\r\n", b"\rx", b"x\n", b"\n", b"\rx\r\n", b"\r\r\n"):
        yield STREAM_HEAD + b"1\r\na" + end + b"0\r\n\r\n"


def test_answer_reader_judges_unusual_answers_like_httptools() -> None:
    for answer in with_one_oddity():
        head = answer.find(b"\r\n\r\n") + 4
        cuts = [set[int](), set(range(len(answer))), *({head, at} for at in range(head, len(answer)))]
        for pieces in (pieces_of(answer, places) for places in cuts):
            assert told(AnswerReader(), pieces) == told(UnusualAnswer(), pieces), pieces


UVICORN = b"HTTP/1.1 200 OK\r\ndate: Sun, 22 Nov 2026 17:00:00 GMT\r\nserver: uvicorn\r\n"
TOKENS = [chunk(b'data: {"choices": [{"text": "%d"}]}\n\n' % number) for number in range(20)]
ORDINARY = {
    "a stream, chunk by chunk": [
        UVICORN + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        *TOKENS,
        b"0\r\n\r\n",
    ],
    "several chunks in one read": [STREAM_HEAD + b"".join(TOKENS[:3]), b"".join(TOKENS[3:]) + b"0\r\n\r\n"],
    "chunks that are cut anywhere": pieces_of(STREAM_HEAD + b"".join(TOKENS) + b"0\r\n\r\n", {200, 210, 220, 245, 300}),
    "a body in pieces": [UVICORN + b"content-length: 6\r\ncontent-type: application/json\r\n\r\n{", b'"":', b"1}"],
    "a connection that closes": [b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"],
}


@pytest.mark.parametrize("pieces", ORDINARY.values(), ids=ORDINARY)
def test_common_answers_need_no_parser(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = told(UnusualAnswer(), pieces)
    assert expected[-1][3]
    monkeypatch.setattr("proxy.upstream.answer_reader.UnusualAnswer", None)
    assert told(AnswerReader(), pieces) == expected


def test_one_reader_reads_the_answers_of_many_exchanges() -> None:
    odd = b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n1"
    reader = AnswerReader()
    for answer in (OK, odd, STREAM_HEAD + chunk(b"a") + b"0\r\n\r\n", OK):
        assert told(reader, [answer]) == told(UnusualAnswer(), [answer])
