"""A pytest plugin that prints one line per test: the test's name as a sentence, and what the test passed to `show`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Show = Callable[[str], None]
    """Type of the fixture `show`, whose argument is printed in the line of the test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", action="append", help="test only this stack; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(*stacks): run with these stacks and no others")
    # SIGTERM ends the run as Ctrl-C does, so that fixtures are torn down and the engines stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        name, _, parameter = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
        sentence = name.removeprefix("test_").replace("_", " ")
        seen = "".join(f": {text}" for key, text in report.user_properties if key == "seen")
        print(f"{'ok  ' if report.passed else 'FAIL'} {parameter}  {sentence}{seen}", flush=True)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    """Count like pytest, but print no dots between the lines of the report."""
    if report.when == "call":
        return report.outcome, "", ""
    return ("error" if report.failed else ""), "", ""
