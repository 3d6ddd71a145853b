"""Where the compiled package goes nothing else is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.common.compiled import NotCompiled, compiled

if TYPE_CHECKING:
    from pathlib import Path


def test_a_directory_that_has_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(NotCompiled, match="is not empty"):
        compiled(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(NotCompiled, match="name another directory"):
        compiled(tmp_path / "letter.txt")
