"""Copies of the project in which mistakes are made, and the tests that are run there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lab.mutation.mutants import Mutant

_PLUGIN = ("-p", "lab.mutation.watching", "-p", "no:cacheprovider")
_HANGS_AFTER_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    """A mutant of one module, named by its path from the project's root."""

    path: str
    mutant: Mutant

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:60] for text in (self.mutant.before, self.mutant.after))
        return f"{self.path}:{self.mutant.line}: {before}  ->  {after}"


class Tree:
    """A copy of what git has of the project, changes included."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._changed: dict[Path, bytes] = {}
        files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
        for name in files:
            if Path(name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, root / name)
        (root / ".venv").symlink_to(Path(".venv").absolute())

    def write(self, places: Iterable[Place]) -> None:
        """Make these mistakes and no others. Those in one module must not overlap."""
        for path, source in self._changed.items():
            path.write_bytes(source)
        self._changed.clear()
        for place in sorted(places, key=lambda place: -place.mutant.begin):  # so that offsets stay true
            path = self.root / place.path
            self._changed.setdefault(path, path.read_bytes())
            path.write_bytes(place.mutant.of(path.read_bytes()))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run pytest here."""
        return subprocess.run(
            [sys.executable, "-m", "pytest", *_PLUGIN, "-q", *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(self.root / "scripts"), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )

    def first_failure(self, tests: Sequence[str]) -> str:
        """The first of these tests that fails, twice in a row; empty when none does. A test that hangs fails."""
        left = list(tests)
        while left:
            failed = self._first_failure(left)
            if not failed or self._first_failure([failed]):
                return failed
            left = left[left.index(failed) + 1 :]
        return ""

    def _first_failure(self, tests: Sequence[str]) -> str:
        chosen, running = self.root / "chosen-tests", self.root / "running-test"
        chosen.write_text("\n".join(tests))
        running.write_text(tests[0])
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        ended = self.run(
            *("-x", "--full", "--timeout", str(_HANGS_AFTER_SECONDS), *files),
            MUTATION_TESTS=str(chosen),
            MUTATION_RUNNING=str(running),
        )
        return running.read_text() if ended.returncode else ""
