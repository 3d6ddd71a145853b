"""A chunk that is passed on unparsed is read as a JSON parser would read it, or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.resume.transcript import Transcript
from proxy.wire.sse import TokenShape
from tests.gateway.forwarding import Client, Engine, PumpedEngine, framed, tokens_like
from tests.selection.covering import values
from tests.wire.test_token import event


class Forwarded:
    """Takes chunks after a parsed event."""

    def __init__(
        self,
        first: bytes,
        *,
        hides_ids: bool = False,
        keeps: bool = True,
        engine: Engine | PumpedEngine | None = None,
    ) -> None:
        self.client = Client()
        self.transcript = Transcript()
        self.engine = engine or Engine()
        shape = TokenShape.recognise(first)
        assert shape is not None
        self.tokens = tokens_like(shape, self.client, self.transcript if keeps else None, hides_ids=hides_ids)

    def take(self, data: bytes) -> bytes:
        """Take the bytes of a read, and return those that were left."""
        return self.engine.take(self.tokens, data)

    def took(self, data: bytes) -> tuple[str, list[int], bytes] | None:
        """Text, ids and what the client gets; None for a chunk that was not taken, of which nothing may be left."""
        before = len(self.transcript.ids)
        if left := self.take(data):
            assert left == data
            assert (self.client.written, self.transcript.has_text, len(self.transcript.ids)) == ([], False, before)
            return None
        (written,) = self.client.written
        return self.transcript.content_text or self.transcript.reasoning_text, self.transcript.ids.tolist(), written


@pytest.mark.covering(
    "token text spaces field",
    product(
        (10, 123456, 999_999_999),
        (
            " token",
            "a",
            "ü",
            "日本",
            "🙂",
            "{}[],:",
            "'",
            "\u2028",
            'a "quote"',
            "back\\slash",
            "line\nend",
            "\t\0\x7f",
        ),
        (False, True),
        ("content", "reasoning", "reasoning_content", "text"),
    ),
    values,
)
@pytest.mark.parametrize("hides_ids", [False, True])
def test_text_and_id_equal_those_of_a_json_parser(
    token: int, text: str, spaces: bool, field: str, hides_ids: bool
) -> None:
    like: dict[str, Any] = {"field": field, "spaces": spaces}
    data = framed(event(text, [token], **like))
    taken = Forwarded(event("first", [5], **like), hides_ids=hides_ids).took(data)
    assert taken is not None
    assert taken[:2] == (text, [token])
    line, written, end = taken[2].split(b"\r\n")
    assert int(line, 16) == len(written)
    assert end == b""
    assert json.loads(written[6:]) == json.loads(event(text, None if hides_ids else [token], **like)[6:])


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("text", [" token", "日本"])
def test_tokens_without_ids_pass_unchanged(text: str, keeps: bool) -> None:
    data = framed(event(text, None))
    assert Forwarded(event("first", None), keeps=keeps, hides_ids=True).took(data) == (text if keeps else "", [], data)


ONE = event("one", [10])
UNLIKE = {
    "no text": framed(event("", [10])),
    "an escape that is none": framed(ONE.replace(b"one", b"o\\xe")),
    "half an escape": framed(ONE.replace(b"one", b"one\\")),
    "a surrogate's escape": framed(ONE.replace(b"one", b"\\ud800")),
    "two texts": framed(ONE.replace(b"one", b'one","content":"two')),
    "two ids": framed(event("two", [1, 2])),
    "no ids": framed(event("none", [])),
    "null": framed(event("null", None)),
    "a negative id": framed(event("a", [-1])),
    "too large an id": framed(event("a", [1_000_000_000])),
    "a fraction": framed(event("a", [1.5])),
    "a zero before it": framed(event("a", [10]).replace(b"[10]", b"[010]")),
    "an id too short for null": framed(event("a", [7])),
    "another field": framed(event("a", [10], field="reasoning")),
    "more members": framed(event("a", [10], usage={"completion_tokens": 1})),
    "a finish": framed(event("a", [10]).replace(b'"finish_reason":null', b'"finish_reason":"stop"')),
    "a raw control byte": framed(ONE.replace(b"one", b"o\x01e")),
    "a raw line end": framed(ONE.replace(b"one", b"o\ne")),
    "a raw event end": framed(ONE.replace(b"one", b"o\n\ne")),
    "half a character": framed(ONE.replace(b"one", b"o\xc3")),
    "a surrogate": framed(ONE.replace(b"one", b"\xed\xa0\x80")),
    "two events in a chunk": framed(ONE + ONE),
    "half an event": framed(ONE[:-1]),
    "more behind": framed(ONE + b":"),
    "half a chunk": framed(ONE)[:-1],
    "no frame": ONE,
    "another size": b"0" + framed(ONE),
    "too small a size": b"%x\r\n%b\r\n" % (len(ONE) - 1, ONE),
    "too large a size": b"%x\r\n%b\r\n" % (len(ONE) + 1, ONE),
    "no size": b"\n" + ONE + b"\r\n",
    "an extension": b"%x;a\r\n%b\r\n" % (len(ONE), ONE),
    "one that is long": framed(event("x" * 5000, [10])),
    "the end mark": b"0\r\n\r\n",
    "the last event": framed(b"data: [DONE]\n\n"),
    "a comment": framed(b": note\n\n"),
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_events_of_another_shape_are_left_to_the_parser(data: bytes) -> None:
    assert Forwarded(event("first", [5]), hides_ids=True).took(data) is None


@pytest.mark.parametrize("data", [data for name, data in UNLIKE.items() if name != "one that is long"])
def test_pump_leaves_events_of_another_shape_to_the_parser(pump: Any, data: bytes) -> None:
    with closing(PumpedEngine(pump)) as engine:
        assert Forwarded(event("first", [5]), hides_ids=True, engine=engine).took(data) is None


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"0\r\n\r\n",
        framed(ONE)[:-1],
        framed(event("", [10])) + framed(ONE),
        framed(b"data: [DONE]\n\n") + framed(ONE),
    ],
)
def test_chunks_before_one_of_another_shape_are_taken(rest: bytes) -> None:
    forwarded = Forwarded(event("first", [5]))
    chunks = [framed(event(f" word{number}", [10**number])) for number in range(9)]
    assert forwarded.take(b"".join(chunks) + rest) == rest
    assert b"".join(forwarded.client.written) == b"".join(chunks)
    assert forwarded.transcript.ids.tolist() == [10**number for number in range(9)]


@pytest.mark.parametrize("size", range(1, 4200, 3))
def test_chunks_of_any_size_are_recognised(size: int) -> None:
    raw = event("x" * size, None)
    for wrong in (1, -1):
        assert Forwarded(event("first", None)).took(b"%x\r\n%b\r\n" % (len(raw) + wrong, raw)) is None
    taken = Forwarded(event("first", None)).took(framed(raw))
    assert (taken is None) is (len(framed(raw)) >= 4096)


def test_relay_writes_no_bytes_to_a_disconnected_client() -> None:
    forwarded = Forwarded(event("first", [5]))
    forwarded.client.has_left = True
    assert forwarded.take(framed(ONE)) == b""
    assert forwarded.client.written == []


TEXT = st.text(max_size=8)
IDS = st.one_of(st.none(), st.lists(st.integers(0, 2**31), max_size=2))


@given(first=TEXT, text=TEXT, ids=IDS, name=st.sampled_from(["content", "reasoning"]), spaces=st.booleans())
def test_taken_tokens_equal_those_of_a_json_parser(
    first: str, text: str, ids: Sequence[int] | None, name: str, spaces: bool
) -> None:
    if TokenShape.recognise(event(first, [3])) is None:
        return
    raw = event(text, ids, field=name, spaces=spaces)
    taken = Forwarded(event(first, [3])).took(framed(raw))
    if taken is not None:
        choice = json.loads(raw[6:])["choices"][0]
        assert taken == (choice["delta"]["content"], choice["token_ids"], framed(raw))


@given(raw=st.binary(max_size=60), text=TEXT, at=st.integers(0, 120), is_cut=st.booleans())
def test_pump_and_python_take_the_same_part_of_arbitrary_bytes(
    pump: Any, raw: bytes, text: str, at: int, is_cut: bool
) -> None:
    good = framed(event(text, [10]))
    data = good + good[:at] + raw + good[at + len(raw) if is_cut else at :]
    by_python = Forwarded(event("first", [5]), hides_ids=True)
    left = by_python.take(data)
    with closing(PumpedEngine(pump)) as engine:
        by_pump = Forwarded(event("first", [5]), hides_ids=True, engine=engine)
        assert by_pump.take(data) == left
    assert b"".join(by_pump.client.written) == b"".join(by_python.client.written)
    assert by_pump.tokens.token_notes == by_python.tokens.token_notes


@given(raw=st.binary(max_size=60), text=TEXT)
def test_arbitrary_bytes_raise_no_error(raw: bytes, text: str) -> None:
    TokenShape.recognise(raw)
    good = framed(event(text, [10]))
    for at in range(0, len(good), 7):
        data = good[:at] + raw + good[at + len(raw) :]
        # A chunk that is whole is taken, whatever comes behind it.
        assert data.endswith(Forwarded(event("first", [5]), hides_ids=True).take(data))
