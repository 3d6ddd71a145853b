"""Mutants: small mistakes in a source text, one place at a time."""

from __future__ import annotations

import ast
import gc
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGS: Final = ("logger", "logs")

PROBE: Final = "__reached__"
"""Function that a recording mutant calls with its number. It returns None."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place in a function.

    `function` is the outermost function around it, as `__qualname__` names it. `begin` and `end` are offsets in the
    UTF-8 bytes of the source.
    """

    function: str
    line: int
    last_line: int
    begin: int
    end: int
    before: str
    after: str
    is_statement: bool

    def of(self, source: bytes) -> bytes:
        """Return the source with the mistake in it."""
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def recording(self, number: int) -> Mutant:
        """Return a mutant that only records that its place is reached."""
        call = f"{PROBE}({number})"
        return replace(self, after=f"{call}; {self.before}" if self.is_statement else f"({call} or ({self.before}))")


def mutants(source: bytes) -> list[Mutant]:
    """Return all mutants of a module's functions.

    Annotations, defaults, patterns, docstrings and logging are left alone.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for name, function in _functions(ast.parse(source)):
        for node, after in _changes(function):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = source[begin:end].decode()
            is_statement = isinstance(node, ast.stmt)
            found.append(Mutant(name, node.lineno, node.end_lineno, begin, end, before, after, is_statement))
    return found


def _functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for child in _children(tree):
        if isinstance(child, ast.expr):
            yield from ((child, f"({ast.unparse(other)})") for other in _expressions(child))
        elif isinstance(child, ast.stmt):
            yield from ((child, ast.unparse(other)) for other in _statements(child))
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield child


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():  # Python 3.11 has no positions in it
            return True
        case ast.pattern():  # in which nothing can be called
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGS
    return False


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [operator], comparators) if type(operator) in _COMPARISONS:
            yield ast.Compare(left, [_COMPARISONS[type(operator)]()], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            yield from values[:2]
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            yield ast.BinOp(left, _OPERATORS[type(operator)](), right)
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.Call(ast.Name(name), args, keywords) if name in _FUNCTIONS:
            yield ast.Call(ast.Name(_FUNCTIONS[name]), args, keywords)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.Expr(ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(target, operator, value):
            yield ast.Pass()
            if type(operator) in _OPERATORS:
                yield ast.AugAssign(target, _OPERATORS[type(operator)](), value)
        case ast.Assign([ast.Attribute()], _):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.Delete():
            yield ast.Pass()


@dataclass(frozen=True, slots=True)
class Place:
    """A mutant of a module, whose path is relative to the project's root."""

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
    """Return a random sample of places of a package, no two on the same line."""
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


def write_places(places: Iterable[Place], file: Path) -> None:
    file.write_text(json.dumps([asdict(place) for place in places]))


def read_places(file: Path) -> list[Place]:
    return [Place(one["path"], Mutant(**one["mutant"])) for one in json.loads(file.read_text())]


class Functions:
    """The functions of the product that have been imported so far."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: defaultdict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # frozen objects are not listed
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(str(root / "proxy")):
                path = str(Path(thing.__code__.co_filename).relative_to(root))
                self._found[path, thing.__code__.co_qualname].append(thing)
        gc.freeze()

    def mutate(self, places: Iterable[Place]) -> None:
        """Give functions the code with these mutants, of which no two may overlap.

        Raises LookupError when a function is missing.
        """
        by_path: defaultdict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, key=lambda place: -place.mutant.begin):  # backwards, so that offsets stay valid
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
