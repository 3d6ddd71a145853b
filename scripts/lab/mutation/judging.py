"""A pytest plugin that tries mutants: it runs the tests that reach each one.

Everything is imported and collected once. For each mutant a fork of this process replaces the function's code, and runs
tests until one fails. `MUTATION_KEEP` is the directory with places and records. Verdicts are added to a file in it, a
line each, and existing ones are kept.
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

from lab.mutation.mutants import Functions, Place, read_places


def function_of(test: str) -> str:
    """Return a test id without its parameters."""
    return test.partition("[")[0]


class Reach:
    """The places that each test reached in a recorded run, except in other processes."""

    def __init__(self, directory: Path) -> None:
        self.seconds: dict[str, float] = {}
        """CPU seconds of each recorded test."""
        self._places = read_places(directory / "places")
        self._tests: defaultdict[Place, set[str]] = defaultdict(set)
        for file in directory.glob("reached-*"):
            for line in file.read_text().splitlines():
                test, seconds, reached = json.loads(line)
                self.seconds[test] = seconds
                for number in reached:
                    self._tests[self._places[number]].add(test)

    def tests(self, place: Place) -> list[str]:
        """Return the tests that reach a place, in the order to try them."""
        return self.ordered(self._tests[place])

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """Return one row of each test function, the cheapest function first, then the second rows, and so on."""
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            rows[function_of(test)].append(test)
        return [test for turn in zip_longest(*rows.values()) for test in turn if test is not None]


_ALONE_SECONDS: Final = 20.0
"""CPU time for the tests of a single mutant. Further tests run with all missed mutants at once."""


_HANGS_AFTER_SECONDS: Final = 120.0
"""Limit for a test, longer than pytest's, which does not end every hanging test. A hang is a failure."""


class Judge:
    """Replaces pytest's loop over the tests."""

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
        """Return the short suite's tests that reach a place: those in the time limit, and the others."""
        tests = [test for test in reach.tests(place) if test in self._items]
        seconds = list(accumulate(reach.seconds[test] for test in tests))
        alone = bisect(seconds, _ALONE_SECONDS)
        return tests[:alone], tests[alone:]

    def _judged(self, place: Place, reach: Reach) -> str:
        """Return the test that catches a mutant within the time limit, or an empty string."""
        if (known := verdicts(self._keep / "short").get(str(place))) is not None:
            return known
        tests, rest = self._tests(place, reach)
        caught = self._first_failure(place, tests)
        _note(self._keep / "short", place, caught)
        print(f"{'caught' if caught else 'missed'} {len(tests):4} {len(rest):4} {place}  {caught[-80:]}", flush=True)
        return caught

    def _left(self, missed: Sequence[Place], tests: Sequence[str], suite: str) -> list[Place]:
        """Return the mutants that these tests miss, too.

        All mutants are active at once. When a test fails, it is repeated with ever fewer of them.
        """
        print(
            f"{len(missed)} are missed; trying all at once with {len(tests)} more tests of the {suite} suite",
            flush=True,
        )
        missed, left = list(missed), list(tests)
        while missed and (failed := self._run(missed, left)):
            left = left[left.index(failed) + 1 :]
            for place in self._culprits(missed, failed):
                missed.remove(place)
                _note(self._keep / suite, place, failed)
                print(f"caught {place}  {failed[-80:]}", flush=True)
        return missed

    def _culprits(self, places: Sequence[Place], test: str) -> list[Place]:
        """Return the mutants that a test catches, after it failed with all of them.

        It has to fail again with each one, and to pass without, because a busy machine fails tests, too.
        """
        if not self._run(places, [test]):
            return []
        if len(places) == 1:
            return [] if self._run([], [test]) else list(places)
        middle = len(places) // 2
        return self._culprits(places[:middle], test) + self._culprits(places[middle:], test)

    def _first_failure(self, place: Place, tests: Sequence[str]) -> str:
        """Return the first test that catches a mutant, or an empty string."""
        left = list(tests)
        while failed := self._run([place], left):
            if self._culprits([place], failed):
                return failed
            left = left[left.index(failed) + 1 :]
        return ""

    def _run(self, mistakes: Sequence[Place], tests: Sequence[str]) -> str:
        """Run tests in a fork. Return the first one that fails, hangs or crashes, or an empty string."""
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
                self._functions.mutate(mistakes)
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
                if not (chunk := pipe.read(1 << 16)):
                    break
                running += chunk
            else:
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return (running.decode().splitlines() or tests)[-1] if status else ""


def verdicts(file: Path) -> dict[str, str]:
    """Return the test that caught each place, by the place's description. Later lines replace earlier ones."""
    return dict(line.rsplit("\t", 1) for line in file.read_text().splitlines()) if file.exists() else {}


def _note(file: Path, place: Place, test: str) -> None:
    with file.open("a") as notes:
        notes.write(f"{place}\t{test}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(Path(os.environ["MUTATION_KEEP"])))
