"""A pytest plugin that, instead of running the tests, makes one mistake after the other and runs those that reach it.

Everything is imported and collected once. For each mistake a fork of this process gives the function another code and
runs tests until one fails. `MUTATION_KEEP` names the directory with the places and with what was recorded; the verdicts
are added to a file in it, a line each, and what stands there already is not judged again.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Final

import pytest

from lab.mutation.making import Functions
from lab.mutation.mutants import Place, read_places


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


class Reach:
    """What a recorded run tells. Parts of tests that run in processes of their own are not seen."""

    def __init__(self, directory: Path) -> None:
        self.seconds: dict[str, float] = {}
        """Of the processor, of each test that was recorded."""
        self._places = read_places(directory / "places")
        self._tests: defaultdict[Place, set[str]] = defaultdict(set)
        for file in directory.glob("reached-*"):
            for line in file.read_text().splitlines():
                test, seconds, reached = json.loads(line)
                self.seconds[test] = seconds
                for number in reached:
                    self._tests[self._places[number]].add(test)

    def tests(self, place: Place) -> list[str]:
        """Those that reach it, in the order in which to try them."""
        return self.ordered(self._tests[place])

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """One row of each test function, the cheapest function first, then the second rows, and so on."""
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            rows[function_of(test)].append(test)
        return [test for turn in zip_longest(*rows.values()) for test in turn if test is not None]


_ALONE_SECONDS: Final = 20.0
"""The time of the processor that tests may take of one place alone. Those that it is too short for are tried, too: on
all at once that is missed by then.
"""


_HANGS_AFTER_SECONDS: Final = 120.0
"""Longer than pytest's own limit, which does not end every test that hangs. One that does has failed."""


class Judge:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._functions: Functions
        self._items: dict[str, pytest.Item] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._functions = Functions(session.config.rootpath)
        reach = Reach(self._keep)
        short = set((self._keep / "short-suite").read_text().splitlines())
        missed = [place for place in read_places(self._keep / "places") if not self._judged(place, reach)]
        left = {test for place in missed for test in self._tests(place, reach)[1]}
        left |= {test for test in short if test not in reach.seconds}
        missed = self._left(missed, [test for test in self._items if test in left], "short")
        self._left(missed, [test for test in self._items if test not in short], "full")
        return True

    def _tests(self, place: Place, reach: Reach) -> tuple[list[str], list[str]]:
        """The short suite's tests that reach it, first those for which there is time for one place alone."""
        tests = [test for test in reach.tests(place) if test in self._items]
        seconds = list(accumulate(reach.seconds[test] for test in tests))
        alone = bisect(seconds, _ALONE_SECONDS)
        return tests[:alone], tests[alone:]

    def _judged(self, place: Place, reach: Reach) -> str:
        """The test that catches it, in the time that there is for it alone; empty when none does."""
        if (known := verdicts(self._keep / "short").get(str(place))) is not None:
            return known
        tests, rest = self._tests(place, reach)
        caught = self._first_failure(place, tests)
        _note(self._keep / "short", place, caught)
        print(f"{'caught' if caught else 'missed'} {len(tests):4} {len(rest):4} {place}  {caught[-80:]}", flush=True)
        return caught

    def _left(self, missed: Sequence[Place], tests: Sequence[str], suite: str) -> list[Place]:
        """What these tests miss, too. They run with all mistakes at once; where one fails it is tried on ever fewer."""
        print(f"{len(missed)} are missed; all at once by {len(tests)} more tests of the {suite} suite", flush=True)
        missed, left = list(missed), list(tests)
        while missed and (failed := self._run(missed, left)):
            left = left[left.index(failed) + 1 :]
            for place in self._culprits(missed, failed):
                missed.remove(place)
                _note(self._keep / suite, place, failed)
                print(f"caught {place}  {failed[-80:]}", flush=True)
        return missed

    def _culprits(self, places: Sequence[Place], test: str) -> list[Place]:
        """Those that the test catches, of places with which it has failed. It has to fail with each again, and not
        without, because a busy machine fails tests, too.
        """
        if not self._run(places, [test]):
            return []
        if len(places) == 1:
            return [] if self._run([], [test]) else list(places)
        middle = len(places) // 2
        return self._culprits(places[:middle], test) + self._culprits(places[middle:], test)

    def _first_failure(self, place: Place, tests: Sequence[str]) -> str:
        """The first test that catches it; empty when none does."""
        left = list(tests)
        while failed := self._run([place], left):
            if self._culprits([place], failed):
                return failed
            left = left[left.index(failed) + 1 :]
        return ""

    def _run(self, mistakes: Sequence[Place], tests: Sequence[str]) -> str:
        """In a fork: the first of the tests that fails, hangs or brings the process down; empty when all pass."""
        if not tests:
            return ""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reading)
                silence = os.open(os.devnull, os.O_RDWR)
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(silence, stream.fileno())
                self._functions.say(mistakes)
                for item in (self._items[test] for test in tests):
                    os.write(writing, f"{item.nodeid}\n".encode())
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if item.session.testsfailed:
                        os._exit(1)
                os._exit(0)
            finally:
                os._exit(2)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            running = b""
            while select.select([pipe], [], [], _HANGS_AFTER_SECONDS)[0]:
                if not (told := pipe.read(1 << 16)):
                    break
                running += told
            else:
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return (running.decode().splitlines() or tests)[-1] if status else ""


def verdicts(file: Path) -> dict[str, str]:
    """Which test has caught each place, by what describes the place; the last word counts."""
    return dict(line.rsplit("\t", 1) for line in file.read_text().splitlines()) if file.exists() else {}


def _note(file: Path, place: Place, test: str) -> None:
    with file.open("a") as notes:
        notes.write(f"{place}\t{test}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(Path(os.environ["MUTATION_KEEP"])))
