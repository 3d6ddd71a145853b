"""Advice on another split of prefillers and decoders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.replay.advising import split_of
from lab.replay.fleet import Fleet, Replay
from lab.replay.trace import Request


def test_split_measures_how_busy_both_roles_are(replayed: Callable[..., Replay], fleet: Fleet) -> None:
    """Two prefillers with 1.1 s of work every 2 s; two decoders make 200 of 12,800 tokens a second."""
    run = replayed([Request(2.0 * number, 1000, 400, ()) for number in range(101)])
    split = split_of(run, fleet)
    assert (split.split_name, split.prefill_busy) == ("2P2D", pytest.approx(101 * 1.1 / 200 / 2))
    assert split.decode_busy == pytest.approx(101 * 400 / 200 / (2 * 6400))


def test_program_prints_advice(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 20000, "output_length": 3}\n'
    (tmp_path / "trace.jsonl").write_text("".join(line % (100 * number) for number in range(60)))
    ran = subprocess.run(
        [sys.executable, "-m", "lab.replay", "trace.jsonl", "--advise", "--fleet", "1P2D", "--loads", "1.5"],
        env={"PYTHONPATH": "scripts", "CALLED_FROM": str(tmp_path)},
        capture_output=True,
        check=True,
        text=True,
    )
    assert "1P2D (now)" in ran.stdout
    assert "Prefillers are the bottleneck: moving a decoder to prefill (2P1D)" in ran.stdout
    assert "Replayed, 2P1D has" in ran.stdout
    assert "0P3D" not in ran.stdout
