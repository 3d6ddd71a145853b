"""A pytest plugin for the lab: what each test reaches and costs, or only the tests that are asked for, in an order.

`MUTATION_RECORD` names a directory: there each process leaves coverage data whose contexts are tests, and what each of
them cost. `MUTATION_TESTS` names a file with one test a line: these run, in this order, and no others;
`MUTATION_RUNNING` names the file that says which one is running.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


class Recorder:
    """Switches the context of coverage with each test."""

    def __init__(self, directory: Path) -> None:
        self._seconds: dict[str, float] = {}
        self._directory = directory
        self._coverage = coverage.Coverage(
            data_file=directory / "coverage", data_suffix=True, source=["proxy"], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        before = time.process_time()
        result = yield
        self._seconds[item.nodeid] = time.process_time() - before
        self._coverage.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        (self._directory / f"seconds-{os.getpid()}.json").write_text(json.dumps(self._seconds))


class Chooser:
    """Runs the tests that are asked for, and tells which one it is at: after a failure that is the last one."""

    def __init__(self, names: list[str], running: Path) -> None:
        self._order = {name: at for at, name in enumerate(names)}
        self._running = running

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.write_text(nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])


# Before the product is imported, or nobody sees what that reaches.
_recorder = Recorder(Path(os.environ["MUTATION_RECORD"])) if "MUTATION_RECORD" in os.environ else None


def pytest_configure(config: pytest.Config) -> None:
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
    if "MUTATION_TESTS" in os.environ:
        names = Path(os.environ["MUTATION_TESTS"]).read_text().splitlines()
        config.pluginmanager.register(Chooser(names, Path(os.environ["MUTATION_RUNNING"])))
