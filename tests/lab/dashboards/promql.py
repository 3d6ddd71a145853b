"""The metrics and labels of PromQL queries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

# Grafana replaces these variables before it sends a query.
_VARIABLES = {"$__rate_interval": "1m", "$__range": "1h"}


@dataclass(frozen=True, slots=True)
class QueryNames:
    """Names in a query.

    `selectors`: name and matched labels of each series; `grouped`: labels of `by` and `on`.
    """

    selectors: tuple[tuple[str, frozenset[str]], ...]
    grouped: frozenset[str]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.selectors}


def names_of_query(expr: str) -> QueryNames:
    """Return the names in a query. Raises ValueError for invalid PromQL."""
    for variable, text in _VARIABLES.items():
        expr = expr.replace(variable, text)
    nodes = list(_walk(promql_parser.parse(re.sub(r"\$\{?\w+\}?", ".+", expr))))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    modifiers = [modifier for node in nodes if (modifier := getattr(node, "modifier", None)) is not None]
    return QueryNames(
        tuple((node.name or "", frozenset(m.name for m in node.matchers.matchers)) for node in selectors),
        frozenset(label for modifier in modifiers for label in _labels(modifier)),
    )


def _labels(modifier: Any) -> list[str]:
    matching = getattr(modifier, "matching", modifier)
    return list(getattr(matching, "labels", None) or [])


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        inner = getattr(node, name, None)
        if isinstance(inner, promql_parser.Expr):
            yield from _walk(inner)
    for argument in getattr(node, "args", None) or ():
        yield from _walk(argument)
