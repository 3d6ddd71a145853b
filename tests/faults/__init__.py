"""The fault table, `tests/faults.yaml`: failures, the behaviour of the gateway, and the tests that show it.

The tests of a row have node ids that begin like its entries, or the marker `@pytest.mark.fault(number)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

TABLE: Final = Path(__file__).parent.parent / "faults.yaml"


@dataclass(frozen=True)
class Row:
    """One fault. `tests` are beginnings of pytest's node ids. `not_testable` says why no test can show it here."""

    number: int
    fault: str
    behaviour: str
    tests: tuple[str, ...] = ()
    not_testable: str = ""


def read_table() -> list[Row]:
    """All rows, in the order of the file."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Row(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows]


def evidence(
    rows: Iterable[Row], nodes: Iterable[str], marked: Mapping[int, Collection[str]]
) -> dict[int, frozenset[str]]:
    """Return the tests that show each row. `nodes`: all tests. `marked`: tests with a marker, by row number."""
    nodes = list(nodes)
    return {
        row.number: frozenset(marked.get(row.number, ())).union(node for node in nodes if node.startswith(row.tests))
        for row in rows
    }


def mistakes(rows: Sequence[Row], nodes: Iterable[str], marked: Mapping[int, Collection[str]]) -> list[str]:
    """Return the mismatches between the table and the existing tests."""
    nodes = list(nodes)
    numbers = {row.number for row in rows}
    tests_by_row = evidence(rows, nodes, marked)
    return [
        *(
            f"row {row.number} names {beginning}, which is no test"
            for row in rows
            for beginning in row.tests
            if not any(node.startswith(beginning) for node in nodes)
        ),
        *(f"row {row.number} has no test" for row in rows if not tests_by_row[row.number] and not row.not_testable),
        *(
            f"row {row.number} has tests, and a reason why not"
            for row in rows
            if tests_by_row[row.number] and row.not_testable
        ),
        *(
            f"{node} is marked with {number}, which is no row"
            for number in marked.keys() - numbers
            for node in marked[number]
        ),
    ]


def summary(
    rows: Iterable[Row], shown_by: Mapping[int, Collection[str]], passed: Collection[str], failed: Collection[str]
) -> tuple[str, bool]:
    """Return a line about the rows that a run of the whole suite has shown, and whether these are all rows.

    A row is shown if tests for it have passed and none has failed.
    """
    excused, missing, total = [], [], 0
    for row in rows:
        total += 1
        tests = shown_by[row.number]
        if row.not_testable:
            excused.append(row.number)
        elif not any(test in passed for test in tests) or any(test in failed for test in tests):
            missing.append(row.number)
    line = f"faults: {total - len(missing)}/{total} rows shown"
    if excused:
        line += f" ({_listed(excused)} cannot be tested)"
    if missing:
        line += f"; not by tests that pass: {_listed(missing)}"
    return line, not missing


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
