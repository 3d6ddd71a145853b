"""The controller of elastic instances in virtual time, beside fixed splits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson


def replayed(words: Sequence[str], directory: Path) -> str:
    """Run scripts/replay in a directory. Return its output."""
    command = [sys.executable, "-m", "lab.replay", *words]
    environment = {"PYTHONPATH": "scripts", "CALLED_FROM": str(directory)}
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout


def test_controller_beats_a_split_for_another_load(tmp_path: Path) -> None:
    """The load has long prompts, and the fleet begins with too few prefillers."""
    words = [
        *("--elastic", "coding", "--fleet", "2P6D", "--phase-seconds", "1200", "--loads", "0.5"),
        *("--machine", "kimi-k2-thinking-a3", "--decode-machine", "kimi-k2-thinking-a3"),
        *("--fixed-splits", "2", "4", "--elastic-options", "window_seconds=30", "--json", "rows.json"),
    ]
    output = replayed(words, tmp_path)
    rows = {row["policy"]: row for row in orjson.loads((tmp_path / "rows.json").read_bytes())}
    assert rows.keys() == {"2P6D", "4P4D", "elastic", "clairvoyant"}
    elastic = rows["elastic"]
    assert elastic["moves"] >= 2
    assert elastic["phases"] == {"1 coding": elastic["goodput"]}
    assert elastic["goodput"] > 2 * rows["2P6D"]["goodput"]
    assert rows["clairvoyant"]["goodput"] == max(rows["2P6D"]["goodput"], rows["4P4D"]["goodput"])
    assert "2P6D to 3P5D: prefillers " in output
    assert "times the best fixed split (4P4D)" in output


def test_drawn_worlds_compare_the_controller_with_fixed_splits(tmp_path: Path) -> None:
    words = ["--elastic-worlds", "1", "--shapes", "idle", "wrong start", "--json", "rows.json"]
    output = replayed(words, tmp_path)
    rows = orjson.loads((tmp_path / "rows.json").read_bytes())
    assert [row["day"] for row in rows] == ["1 idle"] * 3 + ["1 wrong start"] * 3
    by_policy = {row["policy"]: row for row in rows[:3]}
    assert by_policy["elastic"]["goodput"] > rows[1]["goodput"]
    assert by_policy["elastic"]["goodput"] == sum(by_policy["elastic"]["phases"].values()) / 2
    assert by_policy["clairvoyant"]["goodput"] >= by_policy["elastic"]["goodput"] - 0.05
    assert output.splitlines()[-1].startswith("2 worlds: goodput ")
