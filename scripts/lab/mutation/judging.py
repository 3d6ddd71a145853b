"""A pytest plugin that, instead of running the tests, makes one mistake after the other and runs those that reach it.

Everything is imported and collected once. For each mistake a fork of this process gives the function another code and
runs tests until one fails. `MUTATION_KEEP` names the directory with the places and with what was recorded; the verdicts
are added to a file in it, a line each, and what stands there already is not judged again.
"""

from __future__ import annotations

import gc
import os
import sys
from bisect import bisect
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Final

import pytest

from lab.mutation import places
from lab.mutation.reach import Reach, function_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.mutation.places import Place


_ALONE_SECONDS: Final = 10.0
"""The time of the processor that tests may take of one place alone."""


class Judge:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._functions: defaultdict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        self._items: dict[str, pytest.Item] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        root = session.config.rootpath
        self._items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # or nobody finds them
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(str(root / "proxy")):
                path = str(Path(thing.__code__.co_filename).relative_to(root))
                self._functions[path, thing.__code__.co_qualname].append(thing)
        gc.freeze()
        reach = Reach(self._keep, root)
        missed = [place for place in places.read(self._keep / "places") if not self._judged(place, reach)]
        rest = {test for place in missed for test in self._tests(place, reach)[1]}
        missed = self._left(missed, reach.ordered(rest), "short")
        functions = {function_of(test) for place in missed for test in reach.tests(place)}
        rows = [test for test in self._items if test not in reach.seconds and function_of(test) in functions]
        self._left(missed, rows, "full")
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
        caught = self._first_failure([place], tests)
        _note(self._keep / "short", place, caught)
        print(f"{'caught' if caught else 'missed'} {len(tests):4} {len(rest):4} {place}  {caught[-80:]}", flush=True)
        return caught

    def _left(self, missed: Sequence[Place], tests: Sequence[str], suite: str) -> list[Place]:
        """What these tests miss, too. They are tried on all at once, because hardly any of them is caught here."""
        print(f"{len(missed)} are missed; all at once by {len(tests)} more tests of the {suite} suite", flush=True)
        caught = dict(self._caught(missed, tests))
        for place, test in caught.items():
            _note(self._keep / suite, place, test)
            print(f"caught {place}  {test[-80:]}", flush=True)
        return [place for place in missed if place not in caught]

    def _caught(self, missed: Sequence[Place], rows: Sequence[str]) -> Iterator[tuple[Place, str]]:
        """Those that one of these tests catches: all at once, then halves of what is noticed."""
        failed = self._first_failure(missed, rows) if missed else ""
        if failed and len(missed) == 1:
            yield missed[0], failed
        elif failed:
            middle = len(missed) // 2
            yield from self._caught(missed[:middle], rows)
            yield from self._caught(missed[middle:], rows)

    def _first_failure(self, mistakes: Sequence[Place], tests: Sequence[str]) -> str:
        """The first test that fails twice in a row and not without them, because a busy machine fails tests, too;
        empty when none does.
        """
        left = list(tests)
        while left:
            failed = self._run(mistakes, left)
            if not failed or (self._run(mistakes, [failed]) and not self._run([], [failed])):
                return failed
            left = left[left.index(failed) + 1 :]
        return ""

    def _run(self, mistakes: Sequence[Place], tests: Sequence[str]) -> str:
        """In a fork: the first of the tests that fails, hangs or brings the process down; empty when all pass."""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reading)
                silence = os.open(os.devnull, os.O_RDWR)
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(silence, stream.fileno())
                self._make(mistakes)
                for item in (self._items[test] for test in tests):
                    os.write(writing, f"{item.nodeid}\n".encode())
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if item.session.testsfailed:
                        os._exit(1)
                os._exit(0)
            finally:
                os._exit(2)
        os.close(writing)
        with os.fdopen(reading) as lines:
            running = lines.read().splitlines()
        _, status = os.waitpid(pid, 0)
        return (running or tests)[-1] if status else ""

    def _make(self, mistakes: Sequence[Place]) -> None:
        """Give the functions the mistaken code. Raises LookupError when one is not there."""
        by_path: defaultdict[str, list[Place]] = defaultdict(list)
        for place in sorted(mistakes, key=lambda place: -place.mutant.begin):  # so that offsets stay true
            by_path[place.path].append(place)
        for path, of_path in by_path.items():
            source = Path(path).read_bytes()
            for place in of_path:
                source = place.mutant.of(source)
            codes = dict(_codes(compile(source, str(Path(path).absolute()), "exec", dont_inherit=True)))
            for name in {place.mutant.function for place in of_path}:
                if not self._functions[path, name]:
                    raise LookupError(f"{path} {name}")
                for function in self._functions[path, name]:
                    function.__code__ = codes[name]


def _codes(module: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in module.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def verdicts(file: Path) -> dict[str, str]:
    """Which test has caught each place, by what describes the place."""
    return dict(line.rsplit("\t", 1) for line in file.read_text().splitlines()) if file.exists() else {}


def _note(file: Path, place: Place, test: str) -> None:
    with file.open("a") as notes:
        notes.write(f"{place}\t{test}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(Path(os.environ["MUTATION_KEEP"])))
