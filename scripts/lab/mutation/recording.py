"""A pytest plugin that records the places and the CPU time of each test.

Every place of `MUTATION_KEEP` records when it is reached, which hardly slows tests down. Each process writes a file
there with a line for each test. Only tests of the places' packages run, since they catch nearly all mutants. The names
of all tests are written, too.
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

from lab.mutation.mutants import PROBE, Functions, read_places


class Recorder:
    """Records the numbers of the reached places."""

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
        """Begin with the first test, when nearly everything is imported."""
        setattr(builtins, PROBE, self._reached.add)
        Functions(session.config.rootpath).mutate(
            replace(place, mutant=place.mutant.recording(number)) for number, place in enumerate(self._places)
        )
        return self._directory / f"reached-{os.getpid()}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ["MUTATION_KEEP"])))
