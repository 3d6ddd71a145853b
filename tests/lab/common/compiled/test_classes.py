"""Rewritten classes behave as the source, and every line stays where it is."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from lab.common.compiled.build import PORTS
from lab.common.compiled.classes import Refused, compilable, subclassed, with_subclasses
from lab.common.compiled.modules import MODULES

SOURCE: Final = '''"""A module."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Order:
    """One."""

    name: str
    """Its own."""
    count: int = 1
    parts: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0] * 3)
    hidden: dict[str, int] = field(default_factory=dict, init=False)
    total: int = field(init=False)
    last: float = field(default=-1.0, init=False)

    def __post_init__(self) -> None:
        self.total = self.count * 2


@dataclass(frozen=True, slots=True)
class Compared:
    number: int


class Base:
    pass
'''


def module(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}  # dataclasses resolve annotations there
    exec(compile(source, "written.py", "exec"), names)
    return names


def test_rewritten_dataclass_sets_the_same_fields() -> None:
    names = module(compilable(SOURCE))
    order = names["Order"]("a", parts=["x"])
    assert (order.name, order.count, order.parts, order.sizes) == ("a", 1, ["x"], [0] * 3)
    assert (order.hidden, order.total, order.last) == ({}, 2, -1.0)
    assert names["Order"]("b").parts is not names["Order"]("b").parts
    assert names["Order"]("c") != names["Order"]("c")
    again = replace(order, count=4)
    assert (again.name, again.count, again.parts, again.total) == ("a", 4, ["x"], 8)
    with pytest.raises(TypeError):
        names["Order"]()


def test_comparable_dataclass_stays_comparable() -> None:
    compared = module(compilable(SOURCE))["Compared"]
    assert compared(1) == compared(1) != compared(2)


def test_rewriting_keeps_line_numbers() -> None:
    before, after = SOURCE.splitlines(), compilable(SOURCE, {"Base"}).splitlines()
    assert len(before) == len(after)
    moved = [
        line for line in before if line.startswith(("class", "    def")) and before.index(line) != after.index(line)
    ]
    assert not moved


def test_class_with_interpreted_subclasses_permits_them() -> None:
    text = compilable(SOURCE, {"Base", "Order"})
    assert text.count("@mypyc_attr(allow_interpreted_subclasses=True)\nclass ") == 2
    assert list(subclassed("class A(b.Base, Generic[T]): pass")) == ["Base", "Generic"]


def test_annotation_that_mypyc_cannot_evaluate_is_rejected() -> None:
    source = SOURCE.replace("    number: int", "    number: Sequence[int]")
    with pytest.raises(Refused, match="eq=False"):
        compilable(source)


def test_union_in_a_struct_is_rejected() -> None:
    source = "class Message(msgspec.Struct):\n    role: str | None = None\n"
    with pytest.raises(Refused, match=r"Message\.role"):
        compilable(source)


def test_compiled_modules_exist_and_can_be_rewritten() -> None:
    for path in MODULES:
        assert compilable(Path(path).read_text())


def test_explicitly_comparable_dataclass_stays_comparable() -> None:
    compared = module(compilable(SOURCE.replace("eq=False", "eq=True")))["Order"]
    assert compared("a") == compared("a") != compared("b")


def test_class_of_one_line_is_rejected() -> None:
    with pytest.raises(Refused, match="Compared"):
        compilable(SOURCE.replace("frozen=True, slots=True", "slots=True, eq=False"))


def test_subclasses_of_open_classes_are_open() -> None:
    sources = ["class Leaf(Middle): ...\nclass Other(Enum): ...", "class Middle(Open): ...\nclass Open: ..."]
    assert with_subclasses({"Open", "Enum"}, sources) == {"Open", "Enum", "Middle", "Leaf"}


def test_every_port_is_a_class_of_a_compiled_module() -> None:
    classes = {
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert classes >= PORTS
