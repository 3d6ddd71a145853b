"""A line for each test, as a pytest plugin: the test's name is the sentence, followed by what the test has seen."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", action="append", help="only these engines; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(*stacks): about these engines")
    # Leave as after an interrupt: fixtures are unwound, and so the engines are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        name, _, parameter = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
        sentence = name.removeprefix("test_").replace("_", " ")
        seen = "".join(f": {text}" for key, text in report.user_properties if key == "seen")
        print(f"{'ok  ' if report.passed else 'FAIL'} {parameter}  {sentence}{seen}", flush=True)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    """Counted as ever, but without dots between the lines."""
    if report.when == "call":
        return report.outcome, "", ""
    return ("error" if report.failed else ""), "", ""
