"""Mutation testing: make small mistakes in the gateway, one at a time, and report which ones the tests catch.

Each place of a sample is mutated, and tests run until one fails or hangs. First run the tests of the package that reach
the place, by a recorded run. Then, with all missed mutants active at once, run the rest of the short suite, and finally
the tests that only the full suite has. Code that tests run in other processes is neither seen nor mutated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.common.output import aligned
from lab.common.processes import called_from
from lab.mutation.judging import verdicts
from lab.mutation.mutants import Place, read_places, sample, write_places

_PACKAGES = ("balancer", "gateway", "resume", "connectors", "wire", "upstream")
_HANGS_AFTER_SECONDS = 60
_TESTS_FAILED = 1


def run_pytest(plugin: str, keep: Path, *arguments: str) -> None:
    """Run the suite under a plugin of this package. Tests may fail, because the machine may be busy.

    Raises CalledProcessError when pytest itself fails.
    """
    options = ("-q", "-p", f"lab.mutation.{plugin}", "-p", "no:cacheprovider", f"--timeout={_HANGS_AFTER_SECONDS}")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        check=False,
        env={**os.environ, "MUTATION_KEEP": str(keep)},
    )
    if ran.returncode != _TESTS_FAILED:
        ran.check_returncode()


def report(drawn: list[Place], short: dict[str, str], full: dict[str, str]) -> None:
    """Print the number of caught mutants by package, and the missed ones."""
    rows = [("package", "places", "caught by the short suite", "by the full one")]
    for package in (*dict.fromkeys(place.package for place in drawn), ""):
        here = [str(place) for place in drawn if package in ("", place.package)]
        by_short = sum(bool(short[place]) for place in here)
        rows.append(
            (package or "all", str(len(here)), str(by_short), str(by_short + sum(place in full for place in here)))
        )
    print(aligned(rows))
    for place in map(str, drawn):
        if not short[place]:
            print(f"by {full[place]} alone:" if place in full else "by no test:", place)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=24, help="places of each package (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--package", action="append", choices=_PACKAGES, help="only this package (repeatable)")
    parser.add_argument("--keep", type=Path, help="keep records and verdicts in this directory, and reuse those in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        keep = (called_from() / options.keep).absolute() if options.keep else Path(temporary)
        keep.mkdir(exist_ok=True)
        drawn = [
            place for package in options.package or _PACKAGES for place in sample(package, options.count, options.seed)
        ]
        if (keep / "places").exists() and read_places(keep / "places") != drawn:
            parser.error(f"{options.keep} has another sample, or a sample of other sources")
        write_places(drawn, keep / "places")
        if not list(keep.glob("reached-*")):
            run_pytest("recording", keep, "-n", "auto", "--dist", "worksteal")
        run_pytest("judging", keep, "--full", "-s")
        report(drawn, verdicts(keep / "short"), verdicts(keep / "full"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
