"""scripts/check-commits accepts and rejects messages as docs/contributing/style.md describes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(message: str, directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "message").write_text(message)
    command = [str(ROOT / "scripts" / "check-commits"), "--message", "message"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "message",
    [
        "wire: reject chunks without a length\n",
        "upstream, listener: name connections by their readers\n\nThe reason.\n",
        "docs/performance: add a row\n# a comment of git\n# ------- >8 -------\ndiff\n",
        f"a: {'b' * 69}\n",
        'Revert "wire: reject chunks without a length"\n',
        "fixup! wire: reject chunks without a length\n",
    ],
)
def test_message_is_accepted(message: str, tmp_path: Path) -> None:
    result = check(message, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Reject chunks without a length\n", "area: imperative summary"),
        ("wire: Reject chunks without a length\n", "area: imperative summary"),
        ("wire:reject chunks\n", "area: imperative summary"),
        ("\n", "area: imperative summary"),
        (f"a: {'b' * 70}\n", "73"),
        ("wire: reject chunks without a length.\n", "period"),
        ("wire: adds a check\n", "imperative"),
        ("wire: reject chunks\nThe reason.\n", "empty line"),
    ],
)
def test_message_is_rejected_with_a_hint(message: str, problem: str, tmp_path: Path) -> None:
    result = check(message, tmp_path)
    assert result.returncode == 1
    assert problem in result.stderr


def test_every_commit_of_a_range_is_checked(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "scripts").mkdir()
    for name in ("check-commits", "lib.sh"):
        (tmp_path / "scripts" / name).symlink_to(ROOT / "scripts" / name)
    git("init")
    for message in ("wire: begin", "Second", "wire: add a third", "Fourth"):
        git("commit", "--allow-empty", "--message", message)
    command = [str(tmp_path / "scripts" / "check-commits"), "HEAD~3..HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert [line.split(": ", 1)[1] for line in result.stderr.splitlines() if not line.startswith(" ")] == [
        "Second",
        "Fourth",
    ]
