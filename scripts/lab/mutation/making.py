"""Mistakes in a running process: its functions are given the code of a source text that says something else."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

from lab.mutation.mutants import Place


class Functions:
    """Those of the product that have been imported. What is imported later stays as it is."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: defaultdict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # or nobody finds them
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(str(root / "proxy")):
                path = str(Path(thing.__code__.co_filename).relative_to(root))
                self._found[path, thing.__code__.co_qualname].append(thing)
        gc.freeze()

    def say(self, places: Iterable[Place]) -> None:
        """Have them say what is said at these places, of which no two may overlap.

        Raises LookupError when a function is not there.
        """
        by_path: defaultdict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, key=lambda place: -place.mutant.begin):  # so that offsets stay true
            by_path[place.path].append(place)
        for path, of_path in by_path.items():
            source = (self._root / path).read_bytes()
            for place in of_path:
                source = place.mutant.of(source)
            codes = dict(_codes(compile(source, str(self._root / path), "exec", dont_inherit=True)))
            for name in {place.mutant.function for place in of_path}:
                if not self._found[path, name]:
                    raise LookupError(f"{path} {name}")
                for function in self._found[path, name]:
                    function.__code__ = codes[name]


def _codes(module: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in module.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)
