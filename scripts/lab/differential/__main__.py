"""Send the same requests through two programs to recording engines, and compare the records."""

from __future__ import annotations

import argparse
import http.client
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.common.output import aligned
from lab.common.processes import HOST, Program, called_from, free_ports, unwind_on_signals
from lab.differential import pairs, protocols
from lab.differential.differences import CORRECTIONS, Difference, Record, compare, correction
from lab.differential.pairs import Pair, Side
from lab.differential.requests import Request

_LONGEST = 100
_NOTES = """
Rejected: by the other program, so nothing is compared. To engines: number of requests that reached them, from the other
program and from pdproxy. Accepted: differences with a reason, below; unexplained: all others."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pair, and the record of each request on both sides."""

    pair: Pair
    peers: Sequence[Record]
    ours: Sequence[Record]

    def differences(self) -> list[Difference]:
        """Return all differences."""
        triples = zip(self.pair.requests, self.peers, self.ours, strict=True)
        return [difference for triple in triples for difference in compare(self.pair, *triple)]

    def unexplained(self) -> list[Difference]:
        """Return the differences without a reason."""
        return [difference for difference in self.differences() if correction(difference) is None]

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        refused = sum(record.status >= 300 for record in self.peers)
        to_engines = "/".join(str(sum(len(record.requests) for record in side)) for side in (self.peers, self.ours))
        all_of_them, unexplained = len(self.differences()), len(self.unexplained())
        numbers = (refused, to_engines, all_of_them - unexplained, unexplained)
        return (self.pair.name, str(len(self.pair.requests)), *map(str, numbers))


def text(comparisons: Sequence[Comparison]) -> str:
    """Return the whole report."""
    parts = [
        _table(comparisons),
        _NOTES,
        "\nAccepted differences:",
        *_reasons(comparisons),
        *_refusals(comparisons),
    ]
    for comparison in comparisons:
        if unexplained := comparison.unexplained():
            parts += [f"\nUnexplained, {comparison.pair.name}:", *_lines(unexplained)]
    return "\n".join(parts)


def _table(comparisons: Sequence[Comparison]) -> str:
    heads = ("program / connector", "requests", "rejected", "to engines", "accepted", "unexplained")
    rows = [heads, *(comparison.row() for comparison in comparisons)]
    return aligned(rows)


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
            lines.append(f"\nRejected by {each.pair.peer.name}: {', '.join(refused)}")
    return lines


def _lines(differences: Sequence[Difference]) -> list[str]:
    """Return a line for each member on each leg, with an example."""
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


_PATIENCE_SECONDS = 10.0
_NO_ANSWER = 599


def main() -> None:
    unwind_on_signals()
    options = _options()
    comparisons = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for pair in _pairs(options, directory):
            print(f"{pair.name}: {len(pair.requests)} requests", file=sys.stderr, flush=True)
            with protocols.running(pair.protocol()) as behind:
                records = [_records(pair, behind, each, directory / each.name) for each in (pair.peer, pair.ours)]
            comparisons.append(Comparison(pair, *records))
    print(text(comparisons))
    sys.exit(any(comparison.unexplained() for comparison in comparisons))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/differential", description=__doc__)
    scripts = parser.add_argument_group("scripts of vLLM-Ascend, examples/disaggregated_prefill_v1")
    scripts.add_argument("--reference", metavar="PATH", help="load_balance_proxy_server_example.py")
    scripts.add_argument("--layerwise", metavar="PATH", help="load_balance_proxy_layerwise_server_example.py")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only pairs with NAME in their name (repeatable)"
    )
    return parser.parse_args()


def _pairs(options: argparse.Namespace, directory: Path) -> Sequence[Pair]:
    base = called_from()
    found = pairs.routers()
    if options.reference is not None:
        found.append(pairs.reference(base / options.reference))
    if options.layerwise is not None:
        found.append(pairs.layerwise(base / options.layerwise, directory / "packages"))
    chosen = [pair for pair in found if options.only is None or any(name in pair.name for name in options.only)]
    if not chosen:
        sys.exit(f"no pair matches; available: {', '.join(pair.name for pair in found) or 'no other programs'}")
    return chosen


def _records(pair: Pair, behind: protocols.Engines, side: Side, log: Path) -> list[Record]:
    """Start a program in front of the engines, and send it all requests in turn."""
    environment = {} if side.packages is None else {"PYTHONPATH": str(side.packages)}
    (port,) = free_ports(1)
    program = Program(
        name=side.name,
        command=[*side.words, *side.flags(port, behind)],
        port=port,
        output=log,
        environment=environment,
        ready_path=side.ready_path,
    )
    with program:
        behind.take()  # requests of its start
        return [Record(_status(port, request), *behind.take()) for request in pair.requests]


def _status(port: int, request: Request) -> int:
    """Return the status of an answer that is read to its end, or 599 without a complete one."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_PATIENCE_SECONDS)
    try:
        headers = {"Content-Type": "application/json", **request.headers}
        connection.request("POST", request.path, request.body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return _NO_ANSWER
    finally:
        connection.close()


if __name__ == "__main__":
    main()
