"""Mutants change one place at a time, where tests can detect it."""

from __future__ import annotations

from typing import Any

import pytest

from lab.mutation.mutants import PROBE, mutants

BEGIN = "def f(x, a=1):\n    "


def texts(source: str) -> list[str]:
    """Return the mutated texts of a function's body."""
    whole = (BEGIN + source).encode()
    return [mutant.of(whole).decode().removeprefix(BEGIN) for mutant in mutants(whole)]


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
        ("g(a)", ["pass"]),
        ("x += a", ["pass", "x -= a"]),
        ("self.x = a", ["pass"]),
        ("return a", ["return None"]),
        ("for x in y: break", ["for x in y: continue"]),
    ],
)
def test_mutant_is_a_small_change(source: str, others: list[str]) -> None:
    assert texts(source) == others


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "x: Literal[1]",
        "logger.info(text, 1)",
        "x = f'{a + 1}'",
        "return",
        "return None",
    ],
)
def test_logging_and_annotations_have_no_mutants(source: str) -> None:
    assert texts(source) == []


def test_module_level_code_has_no_mutants() -> None:
    assert mutants(b"A = 1\n@dataclass(slots=True)\nclass B:\n    c = 1\n") == []


def test_mutant_names_its_outermost_function() -> None:
    source = b"class A:\n    def b(self):\n        def c():\n            return 1\n"
    assert {(mutant.function, mutant.line) for mutant in mutants(source)} == {("A.b", 4)}


def test_mutant_has_byte_offsets_behind_other_alphabets() -> None:
    assert texts("x = 'ü日'; y = a < b") == ["x = 'ü日'; y = (a <= b)"]


def test_mutant_may_span_several_lines() -> None:
    (first, *_) = mutants((BEGIN + "x = (\n    a\n    and b\n    )\n").encode())
    assert (first.line, first.last_line, first.before) == (3, 4, "a\n    and b")


@pytest.mark.parametrize(
    "source",
    [
        "return a if b else c",
        "return 1 + (yield 2)",
        "x = 1; return x",
        "x = a and (\n    b\n    )",
        "for x in y: continue",
        "if (x := not a): self.x = 7",
        "return [1 for x in y if x == 2]",
        "match x:\n        case 1: return 2",
    ],
)
def test_recording_mutant_calls_the_probe(source: str) -> None:
    whole = (BEGIN + source + "\n").encode()
    for mutant in mutants(whole):
        told = mutant.recording(7).of(whole).decode()
        compile(told, "x", "exec")
        assert told.count("__reached__(7)") == 1


def test_recording_mutant_keeps_the_result() -> None:
    whole = b"def f(x):\n    y = 0\n    y += x\n    return y if x > 1 else -y\n"
    for number, mutant in enumerate(mutants(whole)):
        reached: list[int] = []
        names: dict[str, Any] = {PROBE: reached.append}
        exec(mutant.recording(number).of(whole), names)
        assert [names["f"](x) for x in (1, 2)] == [-1, 2]
        assert set(reached) == {number}
