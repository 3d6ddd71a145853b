"""Cheap tests that differ are tried first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lab.mutation.reach import Reach

if TYPE_CHECKING:
    from pathlib import Path


def test_every_function_has_its_turn_before_any_has_another(tmp_path: Path) -> None:
    (tmp_path / "seconds-1.json").write_text(json.dumps({"t::a[1]": 0.1, "t::a[2]": 0.2, "t::a[3]": 0.3}))
    (tmp_path / "seconds-2.json").write_text(json.dumps({"t::b": 9.0, "t::c[1]": 0.15, "t::c[2]": 5.0}))
    reach = Reach(tmp_path, tmp_path)
    assert reach.ordered(reach.seconds) == ["t::a[1]", "t::c[1]", "t::b", "t::a[2]", "t::c[2]", "t::a[3]"]
