"""Decisions use the monotonic clock, so that setting the system's time changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def banned(*paths: str, source: str | None = None) -> int:
    """Count the uses of functions that `banned-api` in pyproject.toml names."""
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise", "--quiet", *paths],
        input=source,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert not ran.stderr
    return ran.stdout.count("TID251")


def test_no_decision_uses_the_time_of_day() -> None:
    assert banned("proxy") == 0


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow = time.time()\n",
        "from time import time_ns\nnow = time_ns()\n",
        "import datetime\nnow = datetime.datetime.now()\n",
        "from datetime import UTC, datetime\nnow = datetime.now(UTC)\n",
    ],
)
def test_use_of_the_time_of_day_is_detected(source: str) -> None:
    assert banned("--stdin-filename", "proxy/gateway/late.py", "-", source=source) == 1
