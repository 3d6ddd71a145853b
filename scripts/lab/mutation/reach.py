"""Which tests reach a place, and in which order to try them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from lab.mutation import places
from lab.mutation.places import Place


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


class Reach:
    """What a recorded run tells. Parts of tests that run in processes of their own are not seen."""

    def __init__(self, directory: Path) -> None:
        self.seconds: dict[str, float] = {}
        """Of the processor, of each test that was recorded."""
        self._places = places.read(directory / "places")
        self._tests: defaultdict[Place, set[str]] = defaultdict(set)
        for file in directory.glob("reached-*"):
            for line in file.read_text().splitlines():
                test, seconds, reached = json.loads(line)
                self.seconds[test] = seconds
                for number in reached:
                    self._tests[self._places[number]].add(test)

    def tests(self, place: Place) -> list[str]:
        """Those that reach it, in the order in which to try them."""
        return self.ordered(self._tests[place])

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """One row of each test function, the cheapest function first, then the second rows, and so on."""
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            rows[function_of(test)].append(test)
        return [test for turn in zip_longest(*rows.values()) for test in turn if test is not None]
