"""What mypyc gets instead of the source does the same, and every line is where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

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
    names: dict[str, Any] = {"__name__": __name__}  # where dataclasses look for what annotations name
    exec(compile(source, "written.py", "exec"), names)
    return names


def test_a_dataclass_is_a_class_that_sets_the_same_fields() -> None:
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


def test_one_that_can_be_compared_still_can() -> None:
    compared = module(compilable(SOURCE))["Compared"]
    assert compared(1) == compared(1) != compared(2)


def test_every_line_is_where_it_was() -> None:
    before, after = SOURCE.splitlines(), compilable(SOURCE, {"Base"}).splitlines()
    assert len(before) == len(after)
    moved = [
        line for line in before if line.startswith(("class", "    def")) and before.index(line) != after.index(line)
    ]
    assert not moved


def test_a_class_with_subclasses_elsewhere_is_open_to_them() -> None:
    text = compilable(SOURCE, {"Base", "Order"})
    assert text.count("@mypyc_attr(allow_interpreted_subclasses=True)\nclass ") == 2
    assert list(subclassed("class A(b.Base, Generic[T]): pass")) == ["Base", "Generic"]


def test_what_mypyc_would_evaluate_in_vain_is_refused() -> None:
    source = SOURCE.replace("    number: int", "    number: Sequence[int]")
    with pytest.raises(Refused, match="eq=False"):
        compilable(source)


def test_a_union_in_a_struct_is_refused() -> None:
    source = "class Message(msgspec.Struct):\n    role: str | None = None\n"
    with pytest.raises(Refused, match=r"Message\.role"):
        compilable(source)


def test_what_is_compiled_is_there_and_can_be() -> None:
    for path in MODULES:
        assert compilable(Path(path).read_text())


def test_one_that_says_that_it_can_be_compared_still_can() -> None:
    compared = module(compilable(SOURCE.replace("eq=False", "eq=True")))["Order"]
    assert compared("a") == compared("a") != compared("b")


def test_a_class_of_one_line_is_refused() -> None:
    with pytest.raises(Refused, match="Compared"):
        compilable(SOURCE.replace("frozen=True, slots=True", "slots=True, eq=False"))


def test_classes_may_have_subclasses_if_a_class_that_they_inherit_from_may() -> None:
    sources = ["class Leaf(Middle): ...\nclass Other(Enum): ...", "class Middle(Open): ...\nclass Open: ..."]
    assert with_subclasses({"Open", "Enum"}, sources) == {"Open", "Enum", "Middle", "Leaf"}
