"""Rewrite classes for mypyc, which has no dataclasses with slots and evaluates annotations.

Every line stays where it is, so that tracebacks of compiled code name lines of the source.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterator
from typing import Final

_FUTURE: Final = "from __future__ import annotations\n\n"
# Only the build knows that a class has interpreted subclasses.
_ATTRIBUTES: Final = (
    "from __future__ import annotations; import typing as _typing\n"
    "if _typing.TYPE_CHECKING: from mypy_extensions import mypyc_attr\n"
)
_OPEN: Final = "@mypyc_attr(allow_interpreted_subclasses=True)\n"
_IMPORTS: Final = "import dataclasses, typing\n"
_ANYTHING: Final = "'typing.ClassVar[typing.Any]'"
_FIELDS: Final = "vars(dataclasses.make_dataclass({!r}, [{}]))['__dataclass_fields__']"
_NOT_GIVEN: Final = ", dataclasses.field(init=False)"
# mypyc must not evaluate the annotations of these classes, which are read at run time.
_ANNOTATED_BASES: Final = {"NamedTuple", "Struct"}


class Refused(Exception):
    """A class that cannot be rewritten."""


def compilable(source: str, has_subclasses: Collection[str] = ()) -> str:
    """Return the source of a module for mypyc, with the same line numbers. Raises Refused.

    `has_subclasses`: names of classes with interpreted subclasses.
    """
    lines = source.splitlines(keepends=True)
    is_open = False
    tree = ast.parse(source)
    known_names = {*dir(builtins), *_defined(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if _name(decorator) == "dataclass":
                _rewrite(node, decorator, lines, known_names)
        bases = set(map(_name, node.bases))
        if bases & _ANNOTATED_BASES:
            for field in _fields(node):
                if "Struct" in bases and isinstance(field.annotation, ast.BinOp):
                    raise Refused(f"{node.name}.{ast.unparse(field.target)} would not be a union: let it be Any")
                _quote(field.annotation, lines)
        if node.name in has_subclasses:
            first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
            if lines[first - 2].strip():
                raise Refused(f"{node.name} has no blank line before it")
            if lines[first - 1] == _IMPORTS:
                lines[first - 2], first = _IMPORTS, first + 1
            lines[first - 2] = _OPEN
            is_open = True
    text = "".join(lines)
    return text.replace(_FUTURE, _ATTRIBUTES, 1) if is_open else text


def subclassed(source: str) -> Iterator[str]:
    """Yield the names of classes that are subclassed in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from map(_name, node.bases)


def with_subclasses(names: Collection[str], sources: Collection[str]) -> set[str]:
    """Return the names, with those of all classes in the sources that inherit from a named class in the sources.

    mypyc calls `__init__` in `tp_new` of a class that may have no interpreted subclasses, and such a class inherits
    `tp_init` from one that may: its objects would be initialised twice, and keep what the first time has made.
    """
    bases = {
        node.name: set(map(_name, node.bases))
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    found = bases.keys() & names
    while more := {name for name, its in bases.items() if name not in found and its & found}:
        found |= more
    return found.union(names)


def _rewrite(node: ast.ClassDef, decorator: ast.expr, lines: list[str], known_names: Collection[str]) -> None:
    """Turn a dataclass with eq=False into a class that sets its fields; drop the slots of others."""
    words = {word.arg: word.value for word in getattr(decorator, "keywords", ())}
    at = decorator.lineno - 1
    if not ("eq" in words and ast.unparse(words["eq"]) == "False"):
        for field in _fields(node):
            for name in ast.walk(field.annotation):
                if isinstance(name, ast.Name) and name.id not in known_names:
                    raise Refused(
                        f"{node.name} can be compared, and mypyc would evaluate {name.id}: let it be eq=False"
                    )
        lines[at] = re.sub(r"(, )?slots=True(, )?", lambda match: ", " if match[1] and match[2] else "", lines[at])
        return
    lines[at] = _IMPORTS
    parameters, steps = [], []
    fields = [field for field in _fields(node) if "ClassVar" not in ast.unparse(field.annotation)]
    for field in fields:
        parameter, step = _step(field)
        if parameter:
            parameters.append(parameter)
        steps.append(step)
        for line in range(field.lineno - 1, field.end_lineno or field.lineno):
            lines[line] = "\n"
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
        steps.append("self.__post_init__()")
    parameter_list = ", ".join(["self", *(["*"] if "kw_only" in words else []), *parameters])
    free = [line for field in fields for line in range(field.lineno - 1, field.end_lineno or field.lineno)]
    if len(free) < 2:
        raise Refused(f"{node.name} has no two lines of fields")
    first, second = free[:2]
    lines[first] = f"    def __init__({parameter_list}) -> None: {'; '.join(steps)}\n"
    # For `dataclasses.replace`.
    names = ", ".join(
        f"({ast.unparse(field.target)!r}, object{_NOT_GIVEN if not _step(field)[0] else ''})" for field in fields
    )
    lines[second] = f"    __dataclass_fields__: {_ANYTHING} = {_FIELDS.format(node.name, names)}\n"


def _step(field: ast.AnnAssign) -> tuple[str, str]:
    """Return the parameter of a dataclass's field, empty if it has none, and the assignment."""
    name, kind, value = ast.unparse(field.target), ast.unparse(field.annotation), field.value
    if value is None:
        return f"{name}: {kind}", f"self.{name}: {kind} = {name}"
    if _name(value) != "field":
        return f"{name}: {kind} = {ast.unparse(value)}", f"self.{name}: {kind} = {name}"
    assert isinstance(value, ast.Call)
    words = {word.arg: word.value for word in value.keywords}
    made = words.get("default_factory")
    if made is None:
        default = f" = {ast.unparse(words['default'])}" if "default" in words else ""
        if "init" in words:
            return "", f"self.{name}: {kind}{default}"
        return f"{name}: {kind}{default}", f"self.{name}: {kind} = {name}"
    new = ast.unparse(made.body if isinstance(made, ast.Lambda) else ast.Call(made, [], []))
    if "init" in words:
        return "", f"self.{name}: {kind} = {new}"
    return f"{name}: {kind} | None = None", f"self.{name}: {kind} = {new} if {name} is None else {name}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, except by assignment."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            yield node.name


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (each for each in node.body if isinstance(each, ast.AnnAssign))


def _quote(annotation: ast.expr, lines: list[str]) -> None:
    if annotation.lineno != annotation.end_lineno:
        raise Refused(f"line {annotation.lineno}: an annotation of several lines")
    line, first, last = lines[annotation.lineno - 1], annotation.col_offset, annotation.end_col_offset
    lines[annotation.lineno - 1] = line[:first] + repr(line[first:last]) + line[last:]


def _name(node: ast.expr) -> str:
    """Return the name without its module, arguments and parameters."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
