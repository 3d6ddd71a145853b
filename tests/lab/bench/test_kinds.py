"""Kinds of requests beside a chat: requests, checks of answers, and the table."""

from __future__ import annotations

import re
from collections import Counter

import orjson
import pytest

from lab.bench.kinds import TOKENS, Figures, Kind, kinds, problem
from lab.common.load import Answer

KINDS = kinds()
NAMES = [f"{kind.title}, {kind.stream}" for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_request_has_the_form_of_its_kind(kind: Kind) -> None:
    head, _, body = kind.request(8000).partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    assert int(length[1]) == len(body)
    assert head.startswith(b"POST %b HTTP/1.1\r\n" % kind.path.encode())
    asked = orjson.loads(body)
    assert asked["stream"] is kind.stream
    assert str(TOKENS) in body.decode()
    assert kind.requests % kind.connections == 0


def test_kinds_have_unique_titles_and_bases_of_the_same_gateway() -> None:
    assert set(Counter((kind.title, kind.stream) for kind in KINDS).values()) == {1}
    by_title = {(kind.title, kind.stream): kind for kind in KINDS}
    for kind in KINDS:
        base = by_title[kind.beside[0], kind.stream]
        assert KINDS.index(base) <= KINDS.index(kind)
        assert base.gateway == kind.gateway or base.title == "chat"


def test_table_has_medians_and_multiples_of_the_same_round() -> None:
    figures = Figures()
    forms = [(Kind("chat", stream), Kind("other", stream, beside=("chat", 2))) for stream in (True, False)]
    for own, of in ((100.0, 300.0), (200.0, 800.0), (400.0, 800.0)):
        for chat, other in forms:
            figures.add(chat, own)
            figures.add(other, of)
    assert [figures.ratios(other) for _, other in forms] == [[1.5, 2.0, 1.0]] * 2
    lines = [re.split(r" {2,}", line.rstrip()) for line in figures.table().splitlines()]
    assert lines[1] == ["chat", "200", "200"]
    assert lines[2] == ["other", *["800", "× 1.50 (1.00 to 2.00)"] * 2, "2 × chat"]


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, b"data: {}\n\n" * TOKENS, None),
        (200, b"data: {}\n\n", "hardly any events"),
        (200, b'data: {"error":{"message":"lost"}}\n\n' * TOKENS, "an error in the answer"),
        (503, b"busy", "status 503: busy"),
    ],
)
def test_incomplete_answer_is_a_problem(status: int, body: bytes, found: str | None) -> None:
    problem_text = problem(KINDS[0], Answer(status, body, 0.0, None, 0.0, True))
    assert problem_text is None if found is None else str(problem_text).startswith(found)
