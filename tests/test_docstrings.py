"""Compare docstrings with the code: the parameters below `Args:`, and the exceptions behind `Raises`."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"( *)(?:Args|Raises|Returns|Yields):$")
ENTRY = re.compile(r"( *)[*`]*(\w+)[*`]*: ")
RAISES = re.compile(r"\bRaises ((?:_?[A-Z]\w+(?:, | and | or )?)+)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def syntax_trees() -> dict[str, ast.Module]:
    paths = [path for root in ("proxy", "scripts", "tests") for path in sorted((ROOT / root).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def described_parameters(docstring: str) -> Iterator[str]:
    """Yield the names below `Args:`. Lines that go on with an entry are indented further than the entry."""
    entry_indent = None
    for line in docstring.splitlines():
        if section := SECTION.match(line):
            entry_indent = len(section[1]) + 4 if line.strip() == "Args:" else None
        elif entry_indent is not None and (entry := ENTRY.match(line)) and len(entry[1]) == entry_indent:
            yield entry[2]


def parameters_of(node: Function | ast.ClassDef) -> set[str]:
    """Return the parameters of a function, or those of all methods of a class."""
    if isinstance(node, ast.ClassDef):
        return set().union(*(parameters_of(each) for each in node.body if isinstance(each, Function)))
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {argument.arg for argument in named if argument is not None}


def known_exceptions(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names of all classes that the project defines or imports, and those of Python."""
    names = {*dir(builtins), "CalledProcessError", "TimeoutExpired"}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def mistakes_in(tree: ast.Module, exceptions: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef) or (docstring := ast.get_docstring(node)) is None:
            continue
        for name in described_parameters(docstring):
            if name not in parameters_of(node):
                yield f"{node.lineno}: {node.name} has no parameter {name}"
        for match in RAISES.finditer(docstring):
            for name in re.findall(r"_?[A-Z]\w+", match[1]):
                if name not in exceptions:
                    yield f"{node.lineno}: {node.name} raises {name}, which does not exist"


def test_docstrings_name_existing_parameters_and_exceptions() -> None:
    trees = syntax_trees()
    exceptions = known_exceptions(trees)
    mistakes = [f"{path}:{text}" for path, tree in trees.items() for text in mistakes_in(tree, exceptions)]
    assert not mistakes, "\n".join(mistakes)


def test_mistakes_in_docstrings_are_found() -> None:
    source = '''
def wait(seconds: float) -> None:
    """Wait. Raises TimeoutError or PatienceError.

    Args:
        seconds: The time limit:
            none: is an ordinary word here.
        delay: An older name.

    Raises:
        OSError: A reason.
    """
'''
    assert list(mistakes_in(ast.parse(source), known_exceptions({}))) == [
        "2: wait has no parameter delay",
        "2: wait raises PatienceError, which does not exist",
    ]
