"""Start engines and programs on loopback, measure them in turns, and print one table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.bench.course import DIRECT, FIGURES, Course, Measurements, not_resuming, takes_part
from lab.bench.duel import dueller, fight, opponent, ratios, verdict
from lab.bench.fleets import compare_fleets
from lab.bench.kinds import compare
from lab.bench.report import NOTES, chart, judged, table
from lab.bench.scenarios import Scenario, scenarios
from lab.bench.tls import compare_tls
from lab.common import peers
from lab.common.compiled.build import NotCompiled, compiled
from lab.common.fleet import Fleet
from lab.common.processes import allow_many_files, called_from, unwind_on_signals


def main() -> None:
    unwind_on_signals()
    allow_many_files()  # each stream takes two connections of a program
    options = _options()
    base = called_from()
    chosen = [s for s in scenarios(options.seconds) if not options.scenario or s.name in options.scenario]
    try:
        package = compiled() if options.compiled else None
    except NotCompiled as error:
        sys.exit(f"--compiled: {error}")
    if options.kinds:
        compare(options.rounds, package)
        return
    if options.fleets:
        compare_fleets(options.rounds, package)
        return
    if options.tls:
        compare_tls(options.rounds, package)
        return
    if options.duel:
        _duel(options, base, package, [scenario for scenario in chosen if not scenario.saturates])
        return
    compared = [peers.ours(package), not_resuming(package), *peers.routers()]
    if options.reference is not None:
        compared.append(peers.reference(base / options.reference))
    measurements = _measured(compared, chosen, options.seconds, options.rounds)
    print(f"\nMedians of {options.rounds} rounds of {options.seconds:g} s.\n\n{table(chosen, measurements)}\n\n{NOTES}")
    print(judged(measurements))
    (base / options.chart).write_text(chart(chosen, measurements))
    print(f"\nThe chart is in {options.chart}.")
    if measurements.has_errors():
        sys.exit(1)


def _duel(options: argparse.Namespace, base: Path, package: Path | None, chosen: Sequence[Scenario]) -> None:
    """Run pdproxy, whose package is in `package`, against each peer, at the same time on one core."""
    with tempfile.TemporaryDirectory() as directory:
        ours = dueller(Path(directory), options.connector, package)
        opponents = [opponent(name, base, Path(directory), options.connector) for name in options.duel]
        duels = []
        for theirs in opponents:
            sends_ids = not options.without_token_ids
            duels.append(fight((ours, theirs), chosen, options.seconds, options.rounds, sends_ids=sends_ids))
            print(f"\nMedians of {options.rounds} rounds of {options.seconds:g} s, both on one core.\n")
            print(verdict(chosen, duels[-1]), flush=True)
    if len(duels) > 1:
        print(f"\n{ratios(chosen, duels)}")
    if any(measurements.has_errors() for measurements in duels):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the CPU time of requests and tokens: pdproxy and other programs, in one run.",
    )
    parser.add_argument(
        "--reference", type=Path, metavar="PATH", help="vllm-ascend's load_balance_proxy_server_example.py"
    )
    parser.add_argument(
        "--duel",
        action="append",
        metavar="PEER",
        help="measure only pdproxy and one peer, at the same time on one core: vllm-router, sglang-router, haproxy, or"
        " the directory of another checkout of pdproxy (repeatable: peers in turn, and a table of all)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="measure the compiled build, which is built first (seven minutes)",
    )
    parser.add_argument(
        "--kinds",
        action="store_true",
        help="measure only pdproxy: requests of each API, with n = 2, resumed, queued or read by aiohttp, as multiples"
        " of a chat",
    )
    parser.add_argument(
        "--fleets",
        action="store_true",
        help="measure only pdproxy: a request with 4, 64 and 512 engines",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="measure only pdproxy: requests and tokens with TLS, beside pdproxy without TLS and nginx in front of it",
    )
    parser.add_argument(
        "--connector",
        choices=("vllm_pull", "sglang_bootstrap"),
        default="vllm_pull",
        help="connector of pdproxy in a duel (default: vllm_pull, also beside sglang-router)",
    )
    parser.add_argument("--without-token-ids", action="store_true", help="in a duel, engines send no token ids")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, help="measurements per median (default: 3; 15 with --kinds)")
    parser.add_argument("--quick", action="store_true", help="run one round of one second")
    names = [scenario.name for scenario in scenarios(1.0)]
    parser.add_argument("--scenario", action="append", choices=names, help="run only this scenario (repeatable)")
    parser.add_argument(
        "--chart", type=Path, metavar="PATH", default=Path("bench.svg"), help="file for the chart (default: bench.svg)"
    )
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 1.0, 3 if options.kinds else 1
    elif options.rounds is None:
        options.rounds = 15 if options.kinds else 3
    if not 0.5 <= options.seconds <= 60 or not 1 <= options.rounds <= 20:
        parser.error("--seconds must be 0.5 to 60 and --rounds 1 to 20")
    return options


def _measured(compared: Sequence[peers.Peer], chosen: Sequence[Scenario], seconds: float, rounds: int) -> Measurements:
    """Measure all programs in each scenario and round, so that changes of the machine affect all of them."""
    measurements = Measurements((DIRECT, *(peer.name for peer in compared)))
    with Fleet() as fleet:
        course = Course(fleet, seconds)
        for number in range(1, rounds + 1):
            for scenario in chosen:
                if scenario.needs_fresh_program and number > 1:
                    continue
                if scenario.is_measured_directly:
                    measurements.add(DIRECT, scenario.name, course.measure_directly(scenario))
                for peer in compared:
                    if takes_part(peer, scenario):
                        measurements.add(peer.name, scenario.name, course.measure(peer, scenario))
                        _print_progress(
                            f"round {number}, {peer.name}, {scenario.title}", measurements, peer.name, scenario
                        )
    return measurements


def _print_progress(what: str, measurements: Measurements, program: str, scenario: Scenario) -> None:
    last = measurements.of(program, scenario.name)[-1]
    errors = f", errors: {last.result.errors}" if last.result.errors else ""
    figure = FIGURES[scenario.figures[0]]
    value = measurements.figure(program, scenario.name, scenario.figures[0])
    print(f"{what}: {last.result.completed} answers, {figure.label}: {value:,.1f}{errors}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
