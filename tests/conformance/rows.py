"""Selection of rows from tables of connectors for the short suite."""

from __future__ import annotations

from collections.abc import Hashable

from tests.selection.covering import pairs


def all_of_one(row: tuple[object, ...]) -> set[Hashable]:
    """Return the features of a row that the short suite must cover.

    The most common connector is covered completely. For the others, each pair of values is enough, because most of the
    code is common. A row begins with the name of its connector.
    """
    return {tuple(map(repr, row))} if row[0] == "vllm_pull" else pairs(row)
