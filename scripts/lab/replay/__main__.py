"""Reads traces, replays them, and prints what came of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import orjson

from lab.common.invocation import allow_many_files, called_from, unwind_on_signals
from lab.replay import report
from lab.replay.advising import advice
from lab.replay.figures import Run
from lab.replay.fleet import Fleet, parse_fleet
from lab.replay.policies import OURS, policy_names
from lab.replay.report import margins
from lab.replay.sockets import sweep_sockets
from lab.replay.sweep import fleets, sweep
from lab.replay.trace import InvalidTrace, Request, read
from proxy.settings import POLICIES
from proxy.settings.model import Balance
from proxy.sim.hardware.machines import MACHINES, published
from proxy.tools.flag_numbers import positive

_DESCRIPTION = """What another way of choosing instances would make of a trace.

The requests of traces in Mooncake's format, or Azure's of 2023, go through the gateway's own admission, pools and
policies to simulated engines, in virtual time. `load` is the work of all prompts without a cache over what the
prefillers can do: traces are made faster or slower for it. The rules of other gateways take part as policies, beside
the gateway's own."""


def read_options() -> argparse.Namespace:
    """Exits with a message if something is wrong."""
    names = policy_names()
    parser = argparse.ArgumentParser(prog="scripts/replay", description=_DESCRIPTION)
    add = parser.add_argument
    add("traces", type=Path, nargs="*", metavar="TRACE", help="files of requests in Mooncake's format or Azure's")
    add("--fit", action="store_true", help="print what was published of the machines beside what the model says")
    add(
        "--fleet",
        dest="fleets",
        type=_fleet,
        nargs="+",
        default=[(8, 8, None)],
        metavar="8P8D",
        help="prefillers and decoders; 8P8D:0.5: one prefiller is half as fast as the others (default: 8P8D)",
    )
    add("--machine", choices=MACHINES, default="kimi-k2-thinking-a3", help="of the prefillers (default: %(default)s)")
    add("--decode-machine", choices=MACHINES, default="kimi-k2.5-h200", help="(default: %(default)s)")
    add("--loads", type=positive, nargs="+", default=[0.9], help="work without a cache / capacity (default: 0.9)")
    add("--seeds", type=int, nargs="+", default=[1], help="of all that is drawn (default: 1)")
    add("--policies", nargs="+", choices=names, metavar="NAME", help=f"(default: all) {', '.join(names)}")
    add(
        "--decode-policy",
        choices=POLICIES,
        default=Balance().decode_policy,
        help="of the gateway's own, beside each one for prefillers (default: %(default)s)",
    )
    add(
        "--margins",
        choices=POLICIES,
        nargs="?",
        const=OURS,
        metavar="NAME",
        help=f"a line for each trace, fleet and load: this policy ({OURS}) beside today's and the best of the peers",
    )
    add(
        "--advise",
        action="store_true",
        help="which side is the bottleneck, and what one endpoint more for prefill or decode would do, by the policy of"
        f" --policies ({OURS})",
    )
    add(
        "--sockets",
        action="store_true",
        help=f"in real time: this gateway by --policies ({OURS}), the routers of vLLM and SGLang, and --reference, each"
        " in front of the same engines, and what virtual time says of the gateway; the machine has to keep up",
    )
    add("--speed", type=positive, help="all engines are so many times as fast (default: 1, with --sockets 5)")
    add(
        "--reference",
        type=Path,
        metavar="PATH",
        help="with --sockets: vllm-ascend's load_balance_proxy_server_example.py",
    )
    add("--requests", type=int, metavar="N", help="only the first so many")
    add("--prefill-kv-tokens", type=int, metavar="N", help="that fit into a prefiller's cache (default: the machine's)")
    add("--untold", action="store_true", help="prefillers do not tell how much of a prompt they had in their caches")
    add("--kv-events", action="store_true", help="prefillers publish KV events, and the gateway hears them")
    add("--workers", type=int, default=1, metavar="N", help="of the gateway (default: 1)")
    add("--gateways", type=int, default=1, metavar="N", help="any of them gets a request (default: 1)")
    add(
        "--share",
        choices=("nothing", "exchanges", "news"),
        default="nothing",
        help="what gateways tell each other: all that they have every 0.1 s, or changes, too (default: %(default)s)",
    )
    add("--bursts", type=int, metavar="N", help="so many requests come in a third of their time each (default: evenly)")
    add("--max-running-prefill", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add("--max-running-decode", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add("--slo-seconds", type=positive, default=10.0, help="to the first token (default: 10)")
    add("--slo-base", type=positive, default=2.0, help="in time: this and so many … (default: 2)")
    add("--slo-factor", type=positive, default=3.0, help="… times the prompt's own work (default: 3)")
    add("--slo-token-ms", type=positive, default=100.0, help="between two tokens (default: 100)")
    add("--json", type=Path, metavar="FILE", help="write every run there")
    add("--svg", type=Path, metavar="FILE", help="draw answers in time over load there, of one trace and fleet")
    options = parser.parse_args()
    if not options.traces and not options.fit:
        parser.error("which trace?")
    if options.svg is not None and len(options.traces) * len(options.fleets) > 1:
        parser.error("--svg is of one trace and one fleet")
    if options.advise:
        options.policies = options.policies or [OURS]
        if len(options.policies) > 1 or options.sockets or options.margins or options.json or options.svg:
            parser.error("--advise is of one policy, and not with --sockets, --margins, --json or --svg")
    if options.sockets:
        options.policies = options.policies or [OURS]
        if not set(options.policies) <= set(POLICIES):
            parser.error("--sockets is of the gateway's own policies, and of the programs that there are")
        if options.margins or options.untold or options.kv_events:
            parser.error("--margins, --untold and --kv-events are of virtual time")
        if options.reference is not None:
            options.reference = called_from() / options.reference
    if options.speed is None:
        options.speed = 5.0 if options.sockets else 1.0
    return options


def _fleet(text: str) -> tuple[int, int, float | None]:
    try:
        return parse_fleet(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
