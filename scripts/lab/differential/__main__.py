"""Send the same requests through two programs to engines that write them down, and compare what they got."""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lab.common.invocation import called_from, unwind_on_signals
from lab.common.processes import HOST, Program, free_ports
from lab.differential import engines, pairs, report
from lab.differential.differences import Record
from lab.differential.pairs import Pair, Side
from lab.differential.requests import Request

_PATIENCE_SECONDS = 10.0
_NO_ANSWER = 599


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    comparisons = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for pair in _pairs(options, directory):
            print(f"{pair.name}: {len(pair.requests)} requests", file=sys.stderr, flush=True)
            with engines.running(pair.hearings()) as behind:
                records = [_records(pair, behind, each, directory / each.name) for each in (pair.peer, pair.ours)]
            comparisons.append(report.Comparison(pair, *records))
    print(report.text(comparisons))
    sys.exit(any(comparison.unexplained() for comparison in comparisons))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/differential", description=__doc__)
    scripts = parser.add_argument_group("scripts of vLLM-Ascend, examples/disaggregated_prefill_v1")
    scripts.add_argument("--reference", metavar="PATH", help="load_balance_proxy_server_example.py")
    scripts.add_argument("--layerwise", metavar="PATH", help="load_balance_proxy_layerwise_server_example.py")
    parser.add_argument("--only", action="append", metavar="NAME", help="pairs with this in their name (repeatable)")
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
        sys.exit(
            f"there is nothing to compare; there are {', '.join(pair.name for pair in found) or 'no other programs'}"
        )
    return chosen


def _records(pair: Pair, behind: engines.Engines, side: Side, log: Path) -> list[Record]:
    """Start a program in front of the engines, and send it everything, one request after the other."""
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
        behind.take()  # what it asked to warm up
        return [Record(_status(port, request), *behind.take()) for request in pair.requests]


def _status(port: int, request: Request) -> int:
    """Of the answer, which is read to its end; 599 when none comes, or not all of it."""
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
