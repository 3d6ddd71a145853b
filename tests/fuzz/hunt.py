"""Run one target under atheris: `python -m tests.fuzz.hunt TARGET [arguments of libFuzzer]`."""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.targets import INSTRUMENTED, check_of

if __name__ == "__main__":
    _, target, *arguments = sys.argv
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        check = check_of(target)
    atheris.Setup([sys.argv[0], *arguments], check)
    atheris.Fuzz()
