"""Records of tests that reach a place, and the order in which they are tried."""

from __future__ import annotations

import json
from pathlib import Path

from lab.mutation.judging import Reach
from lab.mutation.mutants import Place, mutants, write_places


def test_tests_of_a_place_alternate_between_functions(tmp_path: Path) -> None:
    here, there = (Place("proxy/a.py", mutant) for mutant in mutants(b"def f():\n    return 1\n"))
    write_places([here, there], tmp_path / "places")
    records = [("t::a[1]", 0.1, [0]), ("t::a[2]", 0.2, [0, 1]), ("t::a[3]", 0.3, [0])]
    (tmp_path / "reached-1").write_text("".join(json.dumps(line) + "\n" for line in records))
    records = [("t::b", 9.0, [0]), ("t::c[1]", 0.15, [0]), ("t::c[2]", 5.0, [0]), ("t::d", 0.1, [])]
    (tmp_path / "reached-2").write_text("".join(json.dumps(line) + "\n" for line in records))
    reach = Reach(tmp_path)
    assert reach.tests(here) == ["t::a[1]", "t::c[1]", "t::b", "t::a[2]", "t::c[2]", "t::a[3]"]
    assert reach.tests(there) == ["t::a[2]"]
    assert set(reach.seconds) == {"t::a[1]", "t::a[2]", "t::a[3]", "t::b", "t::c[1]", "t::c[2]", "t::d"}
