"""Reads traces, replays them, and prints what came of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product

import orjson

from lab.common.invocation import allow_many_files, called_from, unwind_on_signals
from lab.replay import report
from lab.replay.advising import advice
from lab.replay.figures import Run
from lab.replay.fleet import Fleet
from lab.replay.margins import margins
from lab.replay.options import read_options
from lab.replay.sockets import sweep_sockets
from lab.replay.sweep import fleets, sweep
from lab.replay.trace import InvalidTrace, Request, read
from proxy.sim.hardware.machines import published


def main() -> int:
    """The whole run."""
    unwind_on_signals()
    options = read_options()
    if options.fit:
        print(report.fits(list(published())))
        return 0
    try:
        traces = {path.name: read(called_from() / path)[: options.requests] for path in options.traces}
    except (InvalidTrace, OSError) as error:
        print(f"scripts/replay: {error}", file=sys.stderr)
        return 2
    for name, requests in traces.items():
        if requests[-1].at <= 0:
            print(f"scripts/replay: all requests of {name} come at once, so it has no load", file=sys.stderr)
            return 2
    if options.advise:
        print(advice(options, traces))
        return 0
    if options.sockets:
        allow_many_files()
        runs, strain = sweep_sockets(options, traces)
        _print(options, traces, runs)
        print(strain)
    else:
        runs = sweep(options, traces)
        _print(options, traces, runs)
    if options.json is not None:
        told = orjson.dumps([run.as_json() for run in runs], option=orjson.OPT_INDENT_2)
        (called_from() / options.json).write_bytes(told)
    if options.svg is not None:
        title = f"{runs[0].case}, {options.machine}"
        (called_from() / options.svg).write_text(report.chart(runs, title))
    return 0


def _print(options: argparse.Namespace, traces: dict[str, list[Request]], runs: Sequence[Run]) -> None:
    cases = list(product(traces, fleets(options)))
    for trace, fleet in cases:
        print(_head(options, fleet, trace, traces[trace]))
        if not options.margins:
            mine = [run for run in runs if (run.case.trace, run.case.fleet) == (trace, fleet.name)]
            print(f"\n{report.table(mine)}\n")
    is_fast = options.speed != 1
    if options.margins:
        print(f"\n{margins(runs, options.margins)}")
    print(
        f"In time: the first token within {options.slo_base:g} s + {options.slo_factor:g} × its prompt's own work; "
        f"good: also {options.slo_token_ms:g} ms a token or less."
        + (f" Engines are {options.speed:g} times as fast; times are told as they would be at speed 1." * is_fast)
    )


def _head(options: argparse.Namespace, fleet: Fleet, name: str, requests: Sequence[Request]) -> str:
    decode = fleet.decode_machine
    tokens = sum(request.output_tokens for request in requests)
    prompt_tokens = sum(request.input_tokens for request in requests) // len(requests)
    rate = fleet.decoders * decode.cost.knee_rate(decode.decode.max_num_seqs, prompt_tokens)
    seconds_at_one = sum(map(fleet.work_seconds, requests)) / fleet.capacity
    return (
        f"{name}: {len(requests)} requests in {requests[-1].at:.0f} s, "
        f"{prompt_tokens} + {tokens // len(requests)} tokens; "
        f"{fleet.name}: prefillers {fleet.prefill_machine.name}, decoders {decode.name}. "
        f"At load 1 the decoders are at {tokens / seconds_at_one / rate:.2f} of what they can make at their knee."
    )


if __name__ == "__main__":
    sys.exit(main())
