"""Assignment of a sample's frames to parts of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.profile.__main__ import PARTS, functions, part_of

ROOT = Path(__file__).parents[3]
NAMED = [
    f"{directory}{name}"
    for _, pattern in PARTS
    for directory, names in re.findall(r"(proxy(?:/\w+)*/?)(?:\(([\w|]+)\))?", pattern.pattern)
    for name in names.split("|")
]


@pytest.mark.parametrize("path", NAMED)
def test_paths_of_parts_exist(path: str) -> None:
    assert (ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file()


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        (["run (asyncio/runners.py:118)"], "system calls: reading and waiting; the event loop"),
        (["run (asyncio/runners.py:118)", "_handle (proxy/listener/http_listener.py:1)"], "client side: aiohttp"),
        (["open (proxy/connectors/sequential.py:1)", "dumps (json/encoder.py:1)"], "legs: connectors and"),
        (
            ["received (proxy/gateway/relay.py:1)", "ClientWriter.write (proxy/gateway/client_writer.py:1)"],
            "system calls: writing",
        ),
        (["main (proxy/__main__.py:1)"], "everything else"),
    ],
)
def test_standard_library_frame_belongs_to_its_caller(frames: list[str], part: str) -> None:
    assert part_of(frames).startswith(part)


def test_function_has_the_time_of_its_lines_and_foreign_calls() -> None:
    loop, begin = "run (asyncio/runners.py:118)", "begin (proxy/gateway/intake.py"
    stacks = [f"{loop};{begin}:7) 2", f"{loop};{begin}:8);loads (json/decoder.py:1) 1", f"{loop} 1"]
    assert functions(stacks, 100.0, 1) == "     75.0  begin (proxy/gateway/intake.py)\n"
    assert functions(stacks, 100.0, 2).endswith("     25.0  (outside the gateway)\n")
