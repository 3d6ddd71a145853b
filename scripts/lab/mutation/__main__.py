"""Makes small mistakes in the gateway, one at a time, and tells which of them the tests catch.

A run of the short suite records which tests reach which lines. Then each place of a sample says something else, and the
short suite's tests that reach it run until one fails. What they all let pass is tried with the rows that only the full
suite runs, all of it at once. What fails is run again before it counts, because a busy machine fails tests, too.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from lab.common.invocation import called_from
from lab.common.table import aligned
from lab.mutation.mutants import mutants
from lab.mutation.reach import Reach, function_of
from lab.mutation.trees import Place, Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PACKAGES = ("balancer", "flow", "connectors", "wire", "upstream")


def sample(package: str, count: int, seed: int) -> list[Place]:
    """So many places of a package, drawn at random; no two of them share a line."""
    every = [
        Place(str(path), mutant)
        for path in sorted(Path("proxy", package).rglob("*.py"))
        for mutant in mutants(path.read_bytes())
    ]
    random.Random(f"{seed} {package}").shuffle(every)
    taken: set[tuple[str, int]] = set()
    chosen: list[Place] = []
    for place in every:
        lines = {(place.path, line) for line in range(place.mutant.line, place.mutant.last_line + 1)}
        if len(chosen) < count and not lines & taken:
            taken |= lines
            chosen.append(place)
    return chosen


def record(tree: Tree, directory: Path) -> Reach:
    """Run the short suite and note what its tests reach."""
    directory.mkdir(exist_ok=True)
    if not list(directory.glob("coverage.*")):
        ended = tree.run("-n", "auto", "--dist", "worksteal", MUTATION_RECORD=str(directory))
        print(*ended.stdout.splitlines()[-5:], sep="\n", flush=True)
    return Reach(directory, tree.root)


def judge(trees: Sequence[Tree], places: Sequence[Place], reach: Reach, notes: Path) -> dict[Place, str]:
    """Which test of the short suite catches each; empty when none does. What was judged before is in the notes."""
    known = dict(line.split("\t") for line in notes.read_text().splitlines()) if notes.exists() else {}
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(place: Place) -> str:
        if str(place) in known:
            return known[str(place)]
        tree = free.get()
        try:
            tree.write([place])
            tests = reach.tests(place)
            caught = tree.first_failure(tests)
        finally:
            tree.write([])
            free.put(tree)
        with notes.open("a") as file:
            file.write(f"{place}\t{caught}\n")
        print(f"{'caught ' if caught else 'missed '} {len(tests):5} {place}  {caught[-70:]}", flush=True)
        return caught

    with ThreadPoolExecutor(len(trees)) as threads:
        return dict(zip(places, threads.map(one, places), strict=True))


def only_in_full(tree: Tree, missed: Iterable[Place], reach: Reach) -> list[str]:
    """The rows that only the full suite runs, of the tests that reach any of these places."""
    functions = {function_of(test) for place in missed for test in reach.tests(place)}
    listed = tree.run("--collect-only", "--full").stdout.splitlines()
    return [test for test in listed if "::" in test and test not in reach.seconds and function_of(test) in functions]


def caught_by_full(tree: Tree, missed: Sequence[Place], tests: Sequence[str]) -> set[Place]:
    """Those of the places that one of these tests notices: of all at once, then of halves of what is noticed."""
    if not missed or not tests:
        return set()
    tree.write(missed)
    try:
        failed = tree.first_failure(tests)
    finally:
        tree.write([])
    if not failed:
        return set()
    print(f"{len(missed)} places: {failed}", flush=True)
    if len(missed) == 1:
        return set(missed)
    middle = len(missed) // 2
    return caught_by_full(tree, missed[:middle], tests) | caught_by_full(tree, missed[middle:], tests)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=24, help="places of each package (24)")
    parser.add_argument("--seed", type=int, default=1, help="another sample")
    parser.add_argument("--package", action="append", choices=_PACKAGES, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes that are tried at a time (1)")
    parser.add_argument("--keep", type=Path, help="leave records and verdicts here, and begin with those that are here")
    options = parser.parse_args()
    packages = options.package or _PACKAGES
    with tempfile.TemporaryDirectory() as temporary:
        keep = called_from() / options.keep if options.keep else Path(temporary)
        keep = keep.absolute()
        trees = [Tree(Path(temporary, str(number))) for number in range(options.jobs)]
        reach = record(trees[0], keep)
        places = {package: sample(package, options.count, options.seed) for package in packages}
        drawn = [place for of_package in places.values() for place in of_package]
        verdicts = judge(trees, drawn, reach, keep / "verdicts")
        missed = [place for place in drawn if not verdicts[place]]
        saved = caught_by_full(trees[0], missed, only_in_full(trees[0], missed, reach))
    lost = Counter(package for package, of_package in places.items() for place in of_package if place in saved)
    open_ = Counter(package for package, of_package in places.items() for place in of_package if place in missed)
    rows = [("package", "places", "caught by short", "caught by full")]
    for package, of_package in places.items():
        short = len(of_package) - open_[package]
        rows.append((package, str(len(of_package)), str(short), str(short + lost[package])))
    print(*aligned(rows), sep="\n")
    for place in missed:
        print("caught by full alone:" if place in saved else "caught by neither:", place)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
