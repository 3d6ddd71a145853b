"""A pytest plugin that notes what each test reaches and costs.

`MUTATION_RECORD` names a directory: there each process leaves coverage data whose contexts are tests, and what each of
them cost.
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


# Before the product is imported, or nobody sees what that reaches.
_recorder = Recorder(Path(os.environ["MUTATION_RECORD"]))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_recorder)
