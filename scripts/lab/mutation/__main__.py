"""Makes small mistakes in the gateway, one at a time, and tells which of them the tests catch.

A run of the short suite records which tests reach which lines. Then each place of a sample says something else, and the
short suite's tests that reach it run until one fails. What they all let pass is tried with the rows that only the full
suite runs. Parts of tests that run in processes of their own are not seen, and not affected.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.common.invocation import called_from
from lab.common.table import aligned
from lab.mutation import places
from lab.mutation.judging import verdicts

_PACKAGES = ("balancer", "flow", "resume", "connectors", "wire", "upstream")
_HANGS_AFTER_SECONDS = 60


def run_pytest(plugin: str, *arguments: str, **environment: str) -> None:
    """Run the suite under one of our plugins. Raises CalledProcessError when a test fails, or pytest itself."""
    options = ("-q", "-p", f"lab.mutation.{plugin}", "-p", "no:cacheprovider", f"--timeout={_HANGS_AFTER_SECONDS}")
    subprocess.run([sys.executable, "-m", "pytest", *options, *arguments], check=True, env=os.environ | environment)


def report(drawn: list[places.Place], short: dict[str, str], full: dict[str, str]) -> None:
    """Say what was caught, by package, and name what was not."""
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
    parser.add_argument("--count", type=int, default=24, help="places of each package (24)")
    parser.add_argument("--seed", type=int, default=1, help="another sample")
    parser.add_argument("--package", action="append", choices=_PACKAGES, help="only this one; may be repeated")
    parser.add_argument("--keep", type=Path, help="leave records and verdicts here, and begin with those that are here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        keep = (called_from() / options.keep).absolute() if options.keep else Path(temporary)
        keep.mkdir(exist_ok=True)
        drawn = [
            place
            for package in options.package or _PACKAGES
            for place in places.sample(package, options.count, options.seed)
        ]
        places.write(drawn, keep / "places")
        if not list(keep.glob("seconds-*.json")):
            run_pytest("recording", "-n", "auto", "--dist", "worksteal", MUTATION_RECORD=str(keep))
        run_pytest("judging", "--full", "-s", MUTATION_KEEP=str(keep))
        report(drawn, verdicts(keep / "short"), verdicts(keep / "full"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
