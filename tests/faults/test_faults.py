"""The fault table names existing tests, and a run of the whole suite reports the rows that they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import TABLE, Row, evidence, mistakes, read_table, summary


def test_rows_are_complete_and_in_order() -> None:
    numbers = [row.number for row in read_table()]
    assert numbers == sorted(set(numbers))
    # YAML would take the last of two rows under one number.
    assert TABLE.read_text(encoding="utf-8").count("\n  fault:") == len(numbers)


def test_row_names_a_failure_and_a_behaviour() -> None:
    assert [row.number for row in read_table() if not (row.fault and row.behaviour)] == []


def test_row_names_each_test_once() -> None:
    assert [row.number for row in read_table() if len(set(row.tests)) < len(row.tests)] == []


def test_row_names_existing_tests() -> None:
    """Checked without a run of the whole suite, which says the same of parametrized tests, too."""
    missing = []
    for row in read_table():
        for beginning in row.tests:
            path, _, name = beginning.partition("[")[0].partition("::")
            file = TABLE.parent.parent / path
            end = r"\(" if "[" in beginning else ""
            if not file.exists() or (
                name and not re.search(rf"^(async )?def {name}{end}", file.read_text(), re.MULTILINE)
            ):
                missing.append((row.number, beginning))
    assert missing == []


# How that is judged

TWO = [Row(1, "f", "b", ("a::x",)), Row(2, "f", "b", not_testable="r"), Row(3, "f", "b", ("a::x[1]", "b::"))]
NODES = ["a::x[1]", "a::x[2]", "b::y", "c::z"]


def test_rows_match_tests_by_prefix_or_marker() -> None:
    assert evidence(TWO, NODES, {1: {"c::z"}}) == {
        1: {"a::x[1]", "a::x[2]", "c::z"},
        2: frozenset(),
        3: {"a::x[1]", "b::y"},
    }


@pytest.mark.parametrize(
    ("row", "marked", "mistake"),
    [
        (Row(1, "f", "b", ("a::x", "d::")), {}, "row 1 names d::, which is no test"),
        (Row(1, "f", "b"), {}, "row 1 has no test"),
        (Row(1, "f", "b", not_testable="r"), {1: {"c::z"}}, "row 1 has tests, and a reason why not"),
        (Row(1, "f", "b", ("a::x",)), {2: {"c::z"}}, "c::z is marked with 2, which is no row"),
    ],
)
def test_mismatches_between_rows_and_tests_are_reported(row: Row, marked: dict[int, set[str]], mistake: str) -> None:
    assert mistakes([row], NODES, marked) == [mistake]
    assert mistakes(TWO, NODES, {3: {"c::z"}}) == []


@pytest.mark.parametrize(
    ("passed", "failed", "line", "is_shown"),
    [
        ({"a::x[1]"}, set(), "faults: 3/3 rows shown (2 cannot be tested)", True),
        ({"a::x[2]"}, set(), "faults: 2/3 rows shown (2 cannot be tested); not by tests that pass: 3", False),
        (
            {"a::x[1]", "b::y"},
            {"a::x[2]"},
            "faults: 2/3 rows shown (2 cannot be tested); not by tests that pass: 1",
            False,
        ),
    ],
)
def test_row_is_shown_if_its_tests_passed_and_none_failed(
    passed: set[str], failed: set[str], line: str, is_shown: bool
) -> None:
    assert summary(TWO, evidence(TWO, NODES, {}), passed, failed) == (line, is_shown)


# In a run

PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["suite"]\nmarkers = ["fault(number): …"]\n',
    "suite/conftest.py": (
        "import pathlib\n"
        "from tests import faults\n"
        'pytest_plugins = ["tests.faults.plugin"]\n'
        'faults.TABLE = pathlib.Path(__file__).parent / "faults.yaml"\n'
    ),
    "suite/faults.yaml": (
        "- {number: 1, fault: f, behaviour: b, tests: ['suite/test_it.py::test_good']}\n"
        "- {number: 2, fault: f, behaviour: b, not_testable: r}\n"
        "- {number: 3, fault: f, behaviour: b}\n"
    ),
    "suite/test_it.py": "import pytest\ndef test_good(): pass\n",
}
MARKED = "@pytest.mark.fault(3)\ndef test_other(): assert {}\n"
SHOWN = "faults: 3/3 rows shown (2 cannot be tested)"
NO_TEST = "faults: row 3 has no test"
NOT_SHOWN = "faults: 2/3 rows shown (2 cannot be tested); not by tests that pass: 3"


@pytest.mark.parametrize(
    ("code", "arguments", "lines", "exit_code"),
    [
        (MARKED.format(True), (), [SHOWN], 0),
        (MARKED.format(False), (), [NOT_SHOWN], 1),
        (MARKED.format(True), ("-n", "2"), [SHOWN], 0),
        (MARKED.format(False), ("-n", "2"), [NOT_SHOWN], 1),
        ("", (), [NO_TEST, NOT_SHOWN], 1),
        ("", ("--collect-only",), [NO_TEST], 1),
        ("", ("suite/test_it.py",), [], 0),
        ("", ("-k", "good"), [], 0),
    ],
    ids=[
        "all shown",
        "one fails",
        "by workers",
        "a worker's fails",
        "one not shown",
        "only collected",
        "a file",
        "a choice",
    ],
)
def test_run_of_the_whole_suite_must_show_every_row(
    tmp_path: Path, code: str, arguments: tuple[str, ...], lines: list[str], exit_code: int
) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + code if name.endswith("test_it.py") else text)
    run = pytest_in(tmp_path, "-q", *arguments)
    assert (table_lines(run), run.returncode) == (lines, exit_code)


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(TABLE.parent.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def table_lines(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines about the table."""
    return [line for line in run.stdout.splitlines() if line.startswith("faults:")]
