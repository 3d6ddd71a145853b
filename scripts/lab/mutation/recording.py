"""A pytest plugin that notes which places each test reaches, and what it costs.

Every place of `MUTATION_KEEP` tells when it is reached, which slows the tests down hardly at all. Each process leaves a
file there with a line for each test that has ended. Only the tests of the places' own packages are run: nearly all
mistakes are caught by them. The names of all tests are left there, too.
"""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.mutation.making import Functions
from lab.mutation.mutants import PROBE, read_places


class Recorder:
    """Collects the numbers of the places that are reached."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places = read_places(directory / "places")
        self._notes: Path | None = None
        self._reached: set[int] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        (self._directory / "short-suite").write_text("".join(f"{item.nodeid}\n" for item in items))
        mirrors = {f"tests/{place.package}/" for place in self._places}
        items[:] = [item for item in items if item.nodeid.startswith(tuple(mirrors))]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._notes is None:
            self._notes = self._begin(item.session)
        self._reached.clear()
        before = time.process_time()
        result = yield
        seconds = time.process_time() - before
        with self._notes.open("a") as notes:
            notes.write(json.dumps([item.nodeid, seconds, sorted(self._reached)]) + "\n")
        return result

    def _begin(self, session: pytest.Session) -> Path:
        """With the first test, when all are collected and so nearly everything is imported."""
        setattr(builtins, PROBE, self._reached.add)
        Functions(session.config.rootpath).say(
            replace(place, mutant=place.mutant.telling(number)) for number, place in enumerate(self._places)
        )
        return self._directory / f"reached-{os.getpid()}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ["MUTATION_KEEP"])))
