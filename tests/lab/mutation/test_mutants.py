"""Mistakes are made in one place at a time, and where tests can see them."""

from __future__ import annotations

import pytest

from lab.mutation.mutants import mutants


def texts(source: str) -> list[str]:
    return [mutant.of(source.encode()).decode() for mutant in mutants(source.encode())]


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a is None", ["x = (a is not None)"]),
        ("x = not a", ["x = (a)"]),
        ("x = a and b", ["x = (a or b)", "x = (a)", "x = (b)"]),
        ("x = a + 7", ["x = (a - 7)", "x = a + (8)"]),
        ("x = a if b else c", ["x = (a)", "x = (c)"]),
        ("x = min(a, b)", ["x = (max(a, b))"]),
        ("x = True", ["x = (False)"]),
        ("f(a)", ["pass"]),
        ("x += a", ["pass", "x -= a"]),
        ("self.x = a", ["pass"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("for x in y:\n    break", ["for x in y:\n    continue"]),
    ],
)
def test_a_mistake_is_a_small_one(source: str, others: list[str]) -> None:
    assert texts(source) == others


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "x: Literal[1]",
        "@dataclass(slots=True)\nclass A: pass",
        "logger.info(text, 1)",
        "x = f'{a + 1}'",
        "if TYPE_CHECKING:\n    x = 1",
        "def f():\n    return",
        "def f():\n    return None",
    ],
)
def test_what_no_test_should_see_is_left_alone(source: str) -> None:
    assert texts(source) == []


def test_a_place_is_found_behind_other_alphabets() -> None:
    assert texts("x = 'ü日'; y = a < b\n") == ["x = 'ü日'; y = (a <= b)\n"]


def test_a_mistake_over_several_lines_is_one() -> None:
    (first, *_) = mutants(b"x = (\n    a\n    and b\n)\n")
    assert (first.line, first.last_line, first.before) == (2, 3, "a\n    and b")
