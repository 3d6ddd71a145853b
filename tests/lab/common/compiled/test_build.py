"""The build deletes no foreign files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.common.compiled import NotCompiled, compiled

if TYPE_CHECKING:
    from pathlib import Path


def test_build_leaves_directory_with_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(NotCompiled, match="is not empty"):
        compiled(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_build_rejects_a_file_as_directory(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(NotCompiled, match="name another directory"):
        compiled(tmp_path / "letter.txt")
