"""A summary after a run with all connectors and cases: the number of passed tests of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from proxy.connectors import CONNECTORS

_FAILURES = r"test_failures\.py::test_outcome_of_a_failing_engine\[(\w+)"
_CASES = {
    "ok": r"test_answers\.py::test_answer_is_complete_and_its_kv_cache_is_transferred\[(\w+)-",
    "prefill fails": _FAILURES + "-(?:exact|restart-only)-prefill-",
    "decode fails": _FAILURES + "-(?:exact|restart-only)-decode-",
    "leg missing": _FAILURES + r"-.*-(?:down|hang_\w+|missing_kv_params)-",
    "client leaves": r"test_leaving_clients\.py::test_leaving_client_frees_the_engines\[(\w+)-",
    "mixture": r"test_any_mixture\.py::test_answers_are_correct_under_any_mixture_of_faults\[(\w+)-",
}
_PREFILLERS_ONLY = ("prefill fails",)


class ConnectorTable:
    """Counts results by connector and case."""

    def __init__(self) -> None:
        self._passed: Counter[tuple[str, str]] = Counter()
        self._failed: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "/conformance/" not in report.nodeid or not (report.failed or report.when == "call"):
            return
        for case, pattern in _CASES.items():
            if match := re.search(pattern, report.nodeid):
                (self._failed if report.failed else self._passed)[match[1], case] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if all(self._passed[cell] + self._failed[cell] for cell in _cells()):
            for line in self._lines():
                terminalreporter.write_line(line)

    def _lines(self) -> Iterator[str]:
        yield f"{'connectors':20}" + "".join(f"{case:>16}" for case in _CASES)
        for connector in CONNECTORS:
            yield f"{connector:20}" + "".join(f"{self._cell(connector, case):>16}" for case in _CASES)

    def _cell(self, connector: str, case: str) -> str:
        passed, failed = self._passed[connector, case], self._failed[connector, case]
        return f"{passed}, {failed} failed" if failed else str(passed) if passed else "-"


def _cells() -> Iterator[tuple[str, str]]:
    """Yield the expected connectors and cases. Without prefillers, no prefill fails."""
    for connector in CONNECTORS:
        yield from ((connector, case) for case in _CASES if connector != "plain" or case not in _PREFILLERS_ONLY)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ConnectorTable(), "connector-table")
