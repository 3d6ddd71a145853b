"""mypyc reads the source, except for the changes to classes that DESIGN.md lists."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

import pytest

from lab.common.compiled.build import rewritten
from lab.common.compiled.modules import MODULES

ROOT: Final = Path(__file__).parents[4]
READ: Final = dict(rewritten(ROOT))
"""What mypyc reads, by the path of the module."""
ADDED_STATEMENTS: Final = {
    "import dataclasses, typing",
    "import typing as _typing",
    "if _typing.TYPE_CHECKING:\n    from mypy_extensions import mypyc_attr",
}
ADDED_MEMBERS: Final = {"__init__", "__dataclass_fields__"}
"""Members that a rewritten dataclass has instead of its fields."""


def is_rewritten(node: ast.AST) -> bool:
    """Return whether this is a dataclass with eq=False."""
    return isinstance(node, ast.ClassDef) and any(
        "dataclass(" in text and "eq=False" in text for text in map(ast.unparse, node.decorator_list)
    )


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def is_added(node: ast.stmt) -> bool:
    return (isinstance(node, ast.FunctionDef) and node.name in ADDED_MEMBERS) or (
        isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ADDED_MEMBERS
    )


class WithoutListedChanges(ast.NodeTransformer):
    """Removes what the build may change. `names`: those of the dataclasses with eq=False."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [each for each in node.body if ast.unparse(each) not in ADDED_STATEMENTS]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = [each for each in node.decorator_list if "mypyc_attr" not in ast.unparse(each)]
        if node.name in self.names:
            node.decorator_list = [each for each in node.decorator_list if "dataclass" not in ast.unparse(each)]
            node.body = [each for each in node.body if not is_field(each) and not is_added(each)]
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
                decorator.keywords = [word for word in decorator.keywords if word.arg != "slots"]
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.annotation, ast.Constant):
                each.annotation = ast.parse(str(each.annotation.value), mode="eval").body
        return node


def functions(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the names and lines of all functions but constructors."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [(n.name, n.lineno) for n in ast.walk(tree) if isinstance(n, kinds) and n.name != "__init__"]


@pytest.mark.parametrize("path", MODULES)
def test_compiler_reads_the_source_except_for_the_listed_changes(path: str) -> None:
    source, read = ast.parse((ROOT / path).read_text()), ast.parse(READ[path])
    assert functions(source) == functions(read)
    names = {node.name for node in ast.walk(source) if isinstance(node, ast.ClassDef) and is_rewritten(node)}
    texts = [ast.unparse(WithoutListedChanges(names).visit(tree)) for tree in (source, read)]
    assert texts[0] == texts[1]


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every dataclass that the build rewrites."""
    for path in MODULES:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and is_rewritten(node):
                yield path, node.name


def is_alike(one: object, other: object) -> bool:
    """Return whether two values are equal, the same code, or objects of a class with the same name."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__.co_code == other.__code__.co_code
    return one == other or type(one).__qualname__ == type(other).__qualname__ != "object"


@pytest.mark.interpreted
@pytest.mark.parametrize(("path", "name"), list(pairs()))
def test_rewritten_dataclass_is_constructed_as_in_the_source(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = import_module(path.removesuffix(".py").replace("/", "."))
    copy = ModuleType(original.__name__ + "_rewritten")
    monkeypatch.setitem(sys.modules, copy.__name__, copy)  # dataclasses look the module up
    vars(copy)["mypyc_attr"] = lambda **_: lambda cls: cls  # mypyc reads it and does not call it
    exec(compile(READ[path], path, "exec"), vars(copy))
    ours, theirs = getattr(original, name), getattr(copy, name)
    factories = {each.name: each.default_factory for each in fields(ours)}
    assert [(each.name, each.init) for each in fields(theirs)] == [(each.name, each.init) for each in fields(ours)]
    signatures = [inspect.signature(each).parameters for each in (ours, theirs)]
    expected, found = [[(each.name, each.kind) for each in one.values()] for one in signatures]
    assert found == expected
    for parameter in signatures[1].values():
        factory = factories[parameter.name]
        if factory is not MISSING:
            assert parameter.default is None  # then the constructor calls the factory
        else:
            assert is_alike(parameter.default, signatures[0][parameter.name].default)
    if hasattr(ours, "__post_init__"):
        return  # it uses its arguments
    given = {p.name: object() for p in signatures[0].values() if p.default is p.empty}
    one, other = ours(**given), theirs(**given)
    for each in fields(ours):
        if hasattr(one, each.name):
            assert is_alike(getattr(one, each.name), getattr(other, each.name))
        else:
            assert not hasattr(other, each.name)
