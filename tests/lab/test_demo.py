"""The demo: an answer whose decoder is killed equals an undisturbed one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lab.common.processes import clean_environment, quiet_ports

ROOT = Path(__file__).parents[2]


def test_demo_resumes_the_answer_of_a_killed_decoder() -> None:
    # Another demo on this machine may have port 1999.
    (port,) = quiet_ports(1)
    command = [sys.executable, "-c", f"from lab.demo import main; main({port})"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    before, killed, after = done.stdout.partition(", the source of this answer, is killed ===\n")
    assert killed
    assert len(before.partition("streamed:\n")[2].split()) > 5
    assert len(after.partition("The same question")[0].split()) > 5
    assert "undisturbed: the same answer" in after
    assert re.search(r"http://127\.0\.0\.1:\d+/metrics has", after)
    assert 'pdproxy_resumes_total{action="chat_tokens",cause="broken"} 1.0' in after
    assert after.endswith("everything is stopped\n")
