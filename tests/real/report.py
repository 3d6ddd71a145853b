"""A pytest plugin that prints one line per test: the test's name as a sentence, and what the test passed to `show`.

At the end it prints a line for each stack: the engine, and the number of tests that passed. With `--record` it adds the
results to results.json, from which docs/reference/real-engines.md is generated.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

import pytest

from tests.real import results

Show = Callable[[str], None]
"""Type of the fixture `show`, whose argument is printed in the line of the test."""

_REPORTS: Final[dict[tuple[str, str, str], list[pytest.TestReport]]] = defaultdict(list)
"""Reports by stack, the variable that names its virtual environment, and the test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", action="append", help="test only this stack; may be repeated")
    parser.addoption("--record", action="store_true", help="add the results to tests/real/results.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(*stacks): run with these stacks and no others")
    # SIGTERM ends the run as Ctrl-C does, so that fixtures are torn down and the engines stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        name, _, parameter = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
        sentence = name.removeprefix("test_").replace("_", " ")
        print(f"{'ok  ' if report.passed else 'FAIL'} {parameter}  {sentence}{_seen(report)}", flush=True)
        where = dict(report.user_properties)
        if "stack" in where and not report.skipped:
            _REPORTS[str(where["stack"]), str(where["venv"]), name.removeprefix("test_")].append(report)


def _seen(report: pytest.TestReport) -> str:
    return "".join(f": {text}" for key, text in report.user_properties if key == "seen")


def _results() -> Iterator[results.Result]:
    date = datetime.now(UTC).date().isoformat()
    for (stack, venv, test), reports in sorted(_REPORTS.items()):
        yield results.Result(
            stack=stack,
            test=test,
            engine=results.installed(venv),
            date=date,
            passed=all(report.passed for report in reports),
            seen="; ".join(filter(None, (_seen(report).removeprefix(": ") for report in reports))),
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    made = list(_results())
    for stack, engine in dict.fromkeys((each.stack, each.engine) for each in made):
        mine = [each.passed for each in made if each.stack == stack]
        print(f"{stack}: {engine}: {sum(mine)} of {len(mine)} tests passed", flush=True)
    if session.config.getoption("--record"):
        results.record(made)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    """Count like pytest, but print no dots between the lines of the report."""
    if report.when == "call":
        return report.outcome, "", ""
    return ("error" if report.failed else ""), "", ""
