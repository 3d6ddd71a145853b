"""scripts/fuzz: search for failing inputs, for each target in a separate process, starting from the corpus.

Interesting new inputs are stored in a temporary directory, and failing ones in `build/fuzz/`.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fuzz.targets import CORPUS, TARGETS, check_of

_FOUND: Final = Path("build/fuzz")
_MAX_BYTES: Final = 600
_SLOW_SECONDS: Final = 25
_MAX_MEGABYTES: Final = 1500


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description="Look for inputs for which something does not hold."
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all unless given")
    parser.add_argument("--seconds", type=float, default=60, help="for all of them together (60)")
    parser.add_argument(
        "--seed", type=int, default=0, help="the same one tries the same inputs; 0: one is drawn and printed (0)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try one input of one target, without atheris")
    options = parser.parse_args(argv)
    targets = options.targets or TARGETS
    if unknown := set(targets).difference(TARGETS):
        parser.error(f"no target is called {', '.join(sorted(unknown))}")
    if options.replay:
        (target,) = targets
        check_of(target)(options.replay.read_bytes())
        print(f"{target}: nothing is wrong with {options.replay}")
        return 0
    seconds = max(1, round(options.seconds / len(targets)))
    seed = options.seed or random.randrange(1, 2**31)
    print(f"seed {seed}: scripts/fuzz --seconds {options.seconds:g} --seed {seed} repeats this run", flush=True)
    return max(hunt(target, seconds, seed) for target in targets)


def hunt(target: str, seconds: int, seed: int) -> int:
    """Fuzz a target for a time. Return 1 if an input fails."""
    _FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdproxy-fuzz-") as new:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.hunt", target),
                *(f"-max_total_time={seconds}", f"-max_len={_MAX_BYTES}", "-print_final_stats=1", f"-seed={seed}"),
                *(f"-timeout={_SLOW_SECONDS}", f"-rss_limit_mb={_MAX_MEGABYTES}"),
                *(f"-artifact_prefix={_FOUND}/{target}-", new, str(CORPUS / target)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    executions = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    print(f"{target:10} {int(executions[1]) if executions else 0:>10,} executions in {seconds} s", flush=True)
    if done.returncode == 0:
        return 0
    _, _, trouble = done.stdout.partition("=== Uncaught Python exception: ===")
    print((trouble or done.stdout[-4000:]).partition("==")[0].strip())
    if written := re.search(r"Test unit written to (\S+)", done.stdout):
        print(f"{target} fails: scripts/fuzz {target} --replay {written[1]}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
