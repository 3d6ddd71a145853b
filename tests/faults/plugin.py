"""Report of the fault table after a run of the whole suite, which fails if a row was not shown."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import pytest

from tests.faults import evidence, mistakes, read_table, summary

_PROPERTY = "fault"


class FaultTable:
    """Watches a run. Says nothing of one in which tests are left out.

    Tests may run in workers of pytest-xdist, whose collection this process does not see. So it learns what there is
    from the reports, which carry the rows that a test is marked with, and from a collection only where nothing runs.
    """

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._marked: dict[int, set[str]] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._lines: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            item.user_properties += [(_PROPERTY, number) for mark in item.iter_markers("fault") for number in mark.args]
            if item.config.option.collectonly:
                self._note(item.nodeid, item.user_properties)

    def _note(self, node: str, properties: Iterable[tuple[str, Any]]) -> None:
        self._nodes.add(node)
        for name, value in properties:
            if name == _PROPERTY:
                self._marked.setdefault(value, set()).add(node)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report.nodeid, report.user_properties)
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        is_ours = _is_whole(session) and not _is_worker(session.config)
        if is_ours and not self._is_in_order(session.config.option.collectonly):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        yield

    def _is_in_order(self, only_collected: bool) -> bool:
        rows = read_table()
        found = mistakes(rows, self._nodes, self._marked)
        self._lines = [f"faults: {mistake}" for mistake in found]
        if only_collected:
            return not found
        line, is_shown = summary(rows, evidence(rows, self._nodes, self._marked), self._passed, self._failed)
        self._lines.append(line)
        return is_shown and not found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(), "fault-table")


def _is_worker(config: pytest.Config) -> bool:
    """Return whether another process reports the results of this one."""
    return hasattr(config, "workerinput")


def _is_whole(session: pytest.Session) -> bool:
    """Return whether every test of the suite was selected, and none aborted."""
    option = session.config.option
    return (
        session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not (option.keyword or option.markexpr or option.deselect or option.ignore or option.ignore_glob)
        and not getattr(option, "lf", False)
        and not (session.shouldstop or session.shouldfail)
    )
