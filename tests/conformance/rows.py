"""Which rows of a table of connectors the short suite runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.selection.covering import pairs

if TYPE_CHECKING:
    from collections.abc import Hashable


def all_of_one(row: tuple[object, ...]) -> set[Hashable]:
    """Everything of the connector that most clusters use, and every two values of the others, by the connector's name
    at the beginning of a row: what connectors have in common is not tested for each of them in every way.
    """
    return {tuple(map(repr, row))} if row[0] == "vllm_pull" else pairs(row)
