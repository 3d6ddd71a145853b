"""Where mistakes are made: a sample of each package, and how it is handed from process to process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.mutation.mutants import Mutant, mutants


@dataclass(frozen=True, slots=True)
class Place:
    """A mutant of a module, which is named by its path from the project's root."""

    path: str
    mutant: Mutant

    @property
    def lines(self) -> range:
        return range(self.mutant.line, self.mutant.last_line + 1)

    @property
    def package(self) -> str:
        return Path(self.path).parts[1]

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:70] for text in (self.mutant.before, self.mutant.after))
        return f"{self.path}:{self.mutant.line} {self.mutant.function}: {before}  ->  {after}"


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
        lines = {(place.path, line) for line in place.lines}
        if len(chosen) < count and not lines & taken:
            taken |= lines
            chosen.append(place)
    return chosen


def write(places: Iterable[Place], file: Path) -> None:
    file.write_text(json.dumps([asdict(place) for place in places]))


def read(file: Path) -> list[Place]:
    return [Place(one["path"], Mutant(**one["mutant"])) for one in json.loads(file.read_text())]
