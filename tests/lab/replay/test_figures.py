"""Figures of runs: shares, percentiles, and the sustained load."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from lab.replay.figures import Case, Figures, Run, Slo, chart, figures, mean, sustained_load, table
from lab.replay.fleet import Fleet, Replay
from lab.replay.trace import Request


@pytest.fixture
def some(replayed: Callable[..., Replay], fleet: Fleet) -> Figures:
    """Return figures of a hundred requests, the last of which are queued."""
    calm = [Request(10.0 * number, 1000, 11, ()) for number in range(60)]
    burst = [Request(1000.0, 1000, 11, ()) for _ in range(40)]
    return figures(replayed(calm + burst), fleet, Slo())


def test_first_tenth_of_a_run_is_ignored(some: Figures) -> None:
    assert some.requests == 90


def test_answer_is_in_time_within_a_multiple_of_its_prefill_time(some: Figures) -> None:
    """2 s and three times 1.1 s: the fourth round of two in the burst is in time, and the fifth is not."""
    assert some.in_time == pytest.approx((50 + 8) / 90)
    assert some.good == some.in_time
    assert some.within == pytest.approx((50 + 18) / 90)
    assert some.served == 1.0


def test_answer_with_slow_tokens_is_not_good(replayed: Callable[..., Replay], fleet: Fleet) -> None:
    replay = replayed([Request(10.0 * number, 1000, 11, ()) for number in range(10)])
    output = figures(replay, fleet, Slo(token_seconds=0.005))
    assert (output.in_time, output.good) == (1.0, 0.0)


def test_rejected_requests_are_not_in_time(replayed: Callable[..., Replay], fleet: Fleet) -> None:
    replay = replayed([Request(0.0, 50_000, 1, ()) for _ in range(6)], max_running_prefill=1)
    output = figures(replay, fleet, Slo())
    assert (output.served, output.in_time) == (pytest.approx(4 / 6), pytest.approx(4 / 6))


def test_means_skip_missing_figures(some: Figures) -> None:
    both = mean([some, replace(some, mean=some.mean + 2, imbalance=float("nan"))])
    assert both.mean == pytest.approx(some.mean + 1)
    assert both.imbalance == some.imbalance
    assert isnan(mean([replace(some, p50=float("nan"))]).p50)


def test_sustained_load_is_interpolated(some: Figures) -> None:
    def loads(*shares: float) -> dict[float, Figures]:
        return {0.8 + 0.1 * number: replace(some, in_time=share) for number, share in enumerate(shares)}

    assert sustained_load(loads(0.97, 0.93, 0.5)) == pytest.approx(0.85)
    assert sustained_load(loads(0.99, 0.96)) == pytest.approx(0.9)
    assert sustained_load(loads(0.9, 0.96)) is None


def test_report_has_a_line_for_each_policy_and_load_and_a_chart(some: Figures) -> None:
    runs = [Run(Case("trace", "8P8D"), name, load, 1, some) for name in ("a<b", "c") for load in (0.8, 0.9)]
    assert [line.split()[:2] for line in table(runs).splitlines()[1:5]] == [
        *(["a<b", "0.8"], ["a<b", "0.9"], ["c", "0.8"], ["c", "0.9"])
    ]
    drawn = ElementTree.fromstring(chart(runs, "a trace"))
    assert len(drawn.findall("{*}polyline")) == 2


def test_program_reads_a_trace_and_writes_table_json_and_chart(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]}\n'
    (tmp_path / "trace.jsonl").write_text("".join(line % (100 * number) for number in range(40)))
    command = [
        sys.executable,
        "-m",
        "lab.replay",
        "trace.jsonl",
        "--fleet",
        "2P2D",
        "--policies",
        "least_tokens",
        "dynamo",
    ]
    ran = subprocess.run(
        [*command, "--json", "runs.json", "--svg", "chart.svg"],
        env={"PYTHONPATH": "scripts", "CALLED_FROM": str(tmp_path)},
        capture_output=True,
        check=True,
        text=True,
    )
    assert re.search(r"^dynamo +0\.9", ran.stdout, re.MULTILINE)
    assert "2/2 trace.jsonl, 2P2D, dynamo, load 0.9, seed 1: 40 requests" in ran.stderr
    assert (tmp_path / "runs.json").read_text().count('"policy"') == 2
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")


def test_invalid_trace_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("no\n")
    ran = subprocess.run(
        [sys.executable, "-m", "lab.replay", "trace.jsonl"],
        env={"PYTHONPATH": "scripts", "CALLED_FROM": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert "trace.jsonl, line 1" in ran.stderr
