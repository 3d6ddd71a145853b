"""The progress of a roll in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.settings import SettingsError
from proxy.tools.roll import RollProgress


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "roll.json"
    before = RollProgress.resumed(path, "decode", "yesterday")
    assert not before.is_begun
    before.taking("a:1")
    before.note_done()
    before.taking("b:1")
    after = RollProgress.resumed(path, "decode", "today")
    assert (after.began, after.done, after.current) == ("yesterday", ["a:1"], "b:1")
    assert [each.name for each in tmp_path.iterdir()] == ["roll.json"]
    after.forget()
    assert not RollProgress.resumed(path, "decode", "today").is_begun


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"role": "decode", "done": 1, "began": "now", "current": null}'])
def test_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(SettingsError, match="does not contain the progress of a roll"):
        RollProgress.resumed(tmp_path / "x", "decode", "now")
    with pytest.raises(SettingsError, match="cannot be read: is a directory"):
        RollProgress.resumed(tmp_path, "decode", "now")


def test_progress_of_another_role_is_refused(tmp_path: Path) -> None:
    RollProgress(tmp_path / "x", "prefill", "now").taking("a:1")
    with pytest.raises(SettingsError, match="belongs to a roll of prefill instances"):
        RollProgress.resumed(tmp_path / "x", "decode", "now")


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    progress = RollProgress(tmp_path / "gone" / "state", "decode", "now")
    with pytest.raises(SettingsError, match=r"^--state .*/gone/state cannot be written: no such file or directory$"):
        progress.taking("d:1")
