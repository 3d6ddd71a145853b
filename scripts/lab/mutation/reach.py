"""Which tests reach a place, and in which order to try them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING

import coverage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from lab.mutation.places import Place


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


class Reach:
    """What a recorded run tells. Parts of tests that run in processes of their own are not seen."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._root = root
        self.seconds: dict[str, float] = {}
        for file in directory.glob("seconds-*.json"):
            self.seconds.update(json.loads(file.read_text()))
        combined = coverage.Coverage(data_file=directory / "combined", config_file=False)
        combined.combine([str(file) for file in directory.glob("coverage.*")], keep=True)
        self._data = combined.get_data()

    def tests(self, place: Place) -> list[str]:
        """Those that reach a line of it, in the order in which to try them."""
        contexts = self._data.contexts_by_lineno(str(self._root / place.path))
        return self.ordered({test for line in place.lines for test in contexts.get(line, ()) if test})

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """One row of each test function, the cheapest function first, then the second rows, and so on."""
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            rows[function_of(test)].append(test)
        return [test for turn in zip_longest(*rows.values()) for test in turn if test is not None]
