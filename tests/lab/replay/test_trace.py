"""Reading traces of Mooncake's format."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from lab.replay.trace import InvalidTrace, Request, faster, read, spread

if TYPE_CHECKING:
    from pathlib import Path

LINE = '{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}\n'


def test_a_line_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n")
    assert read(path) == [Request(3.0, 1100, 7, (4, 5, 6))]


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + LINE.replace("3000", "2000"))
    assert [request.at for request in read(path)] == [2.0, 3.0]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", LINE.replace("1100", "0"), LINE.replace("7", "-7"), LINE.replace("[4, 5, 6]", '"x"')]
)
def test_what_is_no_request_is_told_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + line)
    with pytest.raises(InvalidTrace, match="line 2"):
        read(path)


def test_a_trace_has_requests(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(InvalidTrace, match="no requests"):
        read(tmp_path / "trace.jsonl")


def test_arrivals_of_one_tick_are_spread_over_it() -> None:
    requests = [Request(3.0 * (number // 100), 10, 1, ()) for number in range(300)]
    moved = spread(requests, random.Random(1))
    assert len({request.at for request in moved[:200]}) == 200
    assert [int(request.at // 3) for request in moved] == [0] * 100 + [1] * 100 + [2] * 100


def test_a_faster_trace_has_the_same_requests_in_less_time() -> None:
    assert [request.at for request in faster([Request(3.0, 10, 1, ()), Request(6.0, 10, 1, ())], 3.0)] == [1.0, 2.0]
