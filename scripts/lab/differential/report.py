"""The table, and what nobody has explained."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lab.differential.corrections import CORRECTIONS, correction
from lab.differential.differences import Difference, Record, compare
from lab.differential.pairs import Pair

_LONGEST = 100
_NOTES = """
Refused: by the other program, so that there is nothing to compare. To engines: the requests that reached them, from the
other program and from pdproxy. Meant: differences with a reason, below; unexplained: all others."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pair, and what became of each of its requests on either side."""

    pair: Pair
    peers: Sequence[Record]
    ours: Sequence[Record]

    def differences(self) -> list[Difference]:
        """All of them."""
        triples = zip(self.pair.requests, self.peers, self.ours, strict=True)
        return [difference for triple in triples for difference in compare(self.pair, *triple)]

    def unexplained(self) -> list[Difference]:
        """Those that no correction covers."""
        return [difference for difference in self.differences() if correction(difference) is None]

    def row(self) -> tuple[str, ...]:
        """For the table."""
        refused = sum(record.status >= 300 for record in self.peers)
        to_engines = "/".join(str(sum(len(record.heard) for record in side)) for side in (self.peers, self.ours))
        all_of_them, unexplained = len(self.differences()), len(self.unexplained())
        numbers = (refused, to_engines, all_of_them - unexplained, unexplained)
        return (self.pair.name, str(len(self.pair.requests)), *map(str, numbers))


def text(comparisons: Sequence[Comparison]) -> str:
    """The whole report."""
    parts = [
        _table(comparisons),
        _NOTES,
        "\nDifferences that are meant:",
        *_reasons(comparisons),
        *_refusals(comparisons),
    ]
    for comparison in comparisons:
        if unexplained := comparison.unexplained():
            parts += [f"\nUnexplained, {comparison.pair.name}:", *_lines(unexplained)]
    return "\n".join(parts)


def _table(comparisons: Sequence[Comparison]) -> str:
    heads = ("program / connector", "requests", "refused", "to engines", "meant", "unexplained")
    rows = [heads, *(comparison.row() for comparison in comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _reasons(comparisons: Sequence[Comparison]) -> list[str]:
    counts = Counter(correction(difference) for each in comparisons for difference in each.differences())
    return [f"- {each.title} ({counts[each]}): {each.reason}" for each in CORRECTIONS if counts[each]]


def _refusals(comparisons: Sequence[Comparison]) -> list[str]:
    lines = []
    for each in comparisons:
        refused = [
            f"{request.name} ({', '.join([str(record.status), *record.problems])})"
            for request, record in zip(each.pair.requests, each.peers, strict=True)
            if record.status >= 300
        ]
        if refused:
            lines.append(f"\nRefused by {each.pair.peer.name}: {', '.join(refused)}")
    return lines


def _lines(differences: Sequence[Difference]) -> list[str]:
    """One for each member on each leg, with an example."""
    alike: defaultdict[tuple[str, str], list[Difference]] = defaultdict(list)
    for difference in differences:
        alike[difference.leg, re.sub(r"\[\d+\]", "[]", difference.member)].append(difference)
    return [
        f"  {leg}, {member} ({len(all_of_them)}): {_example(all_of_them[0])}"
        for (leg, member), all_of_them in alike.items()
    ]


def _example(difference: Difference) -> str:
    theirs, ours = ("nothing" if value is None else value[:_LONGEST] for value in (difference.peers, difference.ours))
    return f"{theirs} from the other program, {ours} from pdproxy ({difference.request})"
