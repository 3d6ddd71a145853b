"""Tests of the selection of rows: it covers all evidence."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.selection.covering import covering, pairs

ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.booleans(), st.integers(0, 1)), max_size=60, unique=True
)


def shown(rows: list[tuple[int, str, bool, int]]) -> set[object]:
    return set[object]().union(*map(pairs, rows))


@given(ROWS)
def test_selection_covers_every_pair_of_values(rows: list[tuple[int, str, bool, int]]) -> None:
    chosen = covering(rows, pairs)
    assert shown(chosen) == shown(rows)
    assert chosen == [row for row in rows if row in chosen]


def test_selection_of_a_product_is_near_its_two_longest_factors() -> None:
    rows = list(product(range(10), range(5), "ab", "xy", "!?"))
    assert len(covering(rows, pairs)) <= 10 * 5 * 1.2


def test_row_with_unique_evidence_is_always_selected() -> None:
    rows = list(product("abc", range(4)))
    chosen = covering(rows, lambda row: [row] if row[0] == "a" else [row[0]])
    assert chosen == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("c", 0)]
