"""Reading traces in Mooncake's and Azure's formats."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.replay.drawn import DRAWN, drawn
from lab.replay.trace import BLOCK_TOKENS, InvalidTrace, Request, faster, read, spread

LINE = '{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}\n'


def test_line_of_a_trace_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n")
    assert read(path) == [Request(3.0, 1100, 7, (4, 5, 6))]


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + LINE.replace("3000", "2000"))
    assert [request.at for request in read(path)] == [2.0, 3.0]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", LINE.replace("1100", "0"), LINE.replace("7", "-7"), LINE.replace("[4, 5, 6]", '"x"')]
)
def test_invalid_request_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + line)
    with pytest.raises(InvalidTrace, match="line 2"):
        read(path)


def test_empty_trace_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(InvalidTrace, match="no requests"):
        read(tmp_path / "trace.jsonl")


def test_arrivals_of_one_timestamp_are_spread() -> None:
    requests = [Request(3.0 * (number // 100), 10, 1, ()) for number in range(300)]
    moved = spread(requests, random.Random(1))
    assert len({request.at for request in moved[:200]}) == 200
    assert [int(request.at // 3) for request in moved] == [0] * 100 + [1] * 100 + [2] * 100


def test_faster_trace_has_the_same_requests_in_less_time() -> None:
    assert [request.at for request in faster([Request(3.0, 10, 1, ()), Request(6.0, 10, 1, ())], 3.0)] == [1.0, 2.0]


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9819600,400,0\n"
)


def test_azure_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read(path)
    assert (first.at, first.input_tokens, first.output_tokens) == (0.0, 400, 1)
    assert (second.at, second.input_tokens, second.output_tokens) == (pytest.approx(0.05), 3180, 8)


def test_prompts_without_ids_share_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert [len(request.blocks) for request in read(path)] == [1, 7]
    path.write_text(LINE + LINE.replace(', "hash_ids": [4, 5, 6]', "") * 2)
    blocks = [block for request in read(path) for block in request.blocks]
    assert len(set(blocks)) == len(blocks) == 9


def test_invalid_azure_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16,3180\n")
    with pytest.raises(InvalidTrace, match="line 4: not a request of Azure's format"):
        read(path)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_load_has_requests_in_order_that_share_nothing(name: str) -> None:
    requests = drawn(name, 200)
    assert requests == drawn(name, 200)
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    blocks = [block for request in requests for block in request.blocks]
    assert len(blocks) == len(set(blocks))
    assert all(len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS) for request in requests)
    assert all(request.output_tokens > 1 for request in requests)
