"""Read traces, replay them, and print the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from lab.common.processes import allow_many_files, called_from, unwind_on_signals
from lab.replay import elastic, sessions, verdicts
from lab.replay.advising import advice
from lab.replay.drawn import DRAWN, drawn
from lab.replay.figures import Run, chart, fits, margins, table
from lab.replay.fleet import Fleet, parse_fleet
from lab.replay.policies import OURS, policy_names
from lab.replay.sockets import sweep_sockets
from lab.replay.sweep import AGENTS, HARDWARE, fleets, sweep, write_json
from lab.replay.trace import InvalidTrace, Request, read
from proxy.settings import POLICIES
from proxy.settings.model import Balance
from proxy.sim.hardware.machines import published
from proxy.tools.flag_numbers import positive_number, whole_number

_DRAWN_REQUESTS: Final = 2000

_DESCRIPTION = """Compare policies for choosing instances on a trace.

Requests of traces in Mooncake's format, or Azure's of 2023, pass the gateway's admission queue, pools and policies to
simulated engines, in virtual time. `load` is the prefill time of all prompts without a cache, divided by the capacity
of the prefillers. Arrivals are stretched or compressed to match it. Other gateways' rules are compared as policies.
With --sessions, concurrent conversations of agents take the place of a trace."""


def read_options() -> argparse.Namespace:
    """Parse the command line. Exits with a message if something is wrong."""
    names = policy_names()
    parser = argparse.ArgumentParser(prog="scripts/replay", description=_DESCRIPTION)
    add = parser.add_argument
    add("traces", type=Path, nargs="*", metavar="TRACE", help="files of requests in Mooncake's format or Azure's")
    add(
        "--drawn",
        choices=DRAWN,
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"loads drawn from distributions: {', '.join(DRAWN)} ({_DRAWN_REQUESTS} requests, or --requests)",
    )
    add("--fit", action="store_true", help="print published figures of the machines beside those of the model")
    add(
        "--fleet",
        dest="fleets",
        type=_fleet,
        nargs="+",
        default=[(8, 8, None)],
        metavar="8P8D",
        help="number of prefillers and decoders; 8P8D:0.5: one prefiller at half speed (default: 8P8D)",
    )
    add(
        "--machine",
        choices=HARDWARE,
        help="hardware of the prefillers (default: kimi-k2-thinking-a3, with --sessions agents)",
    )
    add(
        "--decode-machine",
        choices=HARDWARE,
        help="hardware of the decoders (default: kimi-k2.5-h200, with --sessions agents)",
    )
    add(
        "--loads", type=positive_number, nargs="+", default=[0.9], help="work without a cache / capacity (default: 0.9)"
    )
    add("--seeds", type=int, nargs="+", default=[1], help="seeds of random draws (default: 1)")
    add("--policies", nargs="+", choices=names, metavar="NAME", help=f"(default: all) {', '.join(names)}")
    add(
        "--decode-policy",
        choices=POLICIES,
        default=Balance().decode_policy,
        help="decode policy beside each of pdproxy's prefill policies (default: %(default)s)",
    )
    add(
        "--margins",
        choices=POLICIES,
        nargs="?",
        const=OURS,
        metavar="NAME",
        help=f"print a line for each trace, fleet and load: this policy ({OURS}), the former default and the best peer",
    )
    add(
        "--advise",
        action="store_true",
        help="print the bottleneck, and the effect of one endpoint more for prefill or decode, with the policy of"
        f" --policies ({OURS})",
    )
    add(
        "--sockets",
        action="store_true",
        help=f"run in real time over sockets: pdproxy with --policies ({OURS}), the routers of vLLM and SGLang, and"
        " --reference, in front of the same engines, beside pdproxy in virtual time; the machine must keep up",
    )
    add(
        "--speed",
        type=positive_number,
        help="speed of all engines relative to their hardware (default: 1, with --sockets 5)",
    )
    add(
        "--reference",
        type=Path,
        metavar="PATH",
        help="with --sockets: vllm-ascend's load_balance_proxy_server_example.py",
    )
    add("--requests", type=int, metavar="N", help="replay only the first N requests")
    add("--prefill-kv-tokens", type=int, metavar="N", help="size of a prefiller's KV cache (default: the machine's)")
    add("--untold", action="store_true", help="prefillers do not report cached tokens")
    add("--kv-events", action="store_true", help="prefillers publish KV events to the gateway")
    add("--workers", type=int, default=1, metavar="N", help="workers of each gateway (default: 1)")
    add(
        "--gateways",
        type=int,
        default=1,
        metavar="N",
        help="number of gateways; each request goes to a random one (default: 1)",
    )
    add(
        "--share",
        choices=("nothing", "exchanges", "news"),
        default="nothing",
        help="state that gateways share: nothing, everything every 0.1 s, or also changes (default: %(default)s)",
    )
    add("--bursts", type=int, metavar="N", help="send N requests at a time in a third of their time (default: evenly)")
    add(
        "--slow-links",
        type=whole_number,
        default=0,
        metavar="N",
        help="pairs with a slow link, drawn by the seed",
    )
    add(
        "--slow-factor",
        type=positive_number,
        default=10.0,
        help="transfer time over slow links (default: %(default)s times)",
    )
    add("--link-gbytes", type=positive_number, default=25.0, help="speed of other links in GB/s (default: %(default)s)")
    add(
        "--kv-kilobytes",
        type=positive_number,
        default=70.0,
        help="size of a token's KV cache in KB (default: %(default)s)",
    )
    add("--ignore-links", action="store_true", help="the gateway does not learn the times of handoffs")
    add("--max-running-prefill", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add("--max-running-decode", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add(
        "--slo-seconds",
        type=positive_number,
        default=10.0,
        help="objective for the first token, in seconds (default: 10)",
    )
    add("--slo-base", type=positive_number, default=2.0, help="in time: this number of seconds (default: 2) …")
    add(
        "--slo-factor",
        type=positive_number,
        default=3.0,
        help="… plus this multiple of the prompt's prefill time (default: 3)",
    )
    add(
        "--slo-token-ms",
        type=positive_number,
        default=100.0,
        help="objective for the time between two tokens (default: 100)",
    )
    add("--json", type=Path, metavar="FILE", help="write every run to this file")
    add("--svg", type=Path, metavar="FILE", help="draw answers in time over load to this file, for one trace and fleet")
    sessions.add_options(parser)
    elastic.add_options(parser)
    options = parser.parse_args()
    if options.sessions:
        if options.traces or options.drawn or options.sockets or options.margins or options.advise:
            parser.error("--sessions takes no trace, and no --sockets, --margins or --advise")
    elif not (options.traces or options.drawn or options.fit or options.elastic or options.elastic_worlds):
        parser.error("name at least one trace, one load of --drawn, or --sessions")
    options.machine = options.machine or (AGENTS.name if options.sessions else "kimi-k2-thinking-a3")
    options.decode_machine = options.decode_machine or (AGENTS.name if options.sessions else "kimi-k2.5-h200")
    if options.svg is not None and max(1, len(options.traces) + len(options.drawn)) * len(options.fleets) > 1:
        parser.error("--svg needs exactly one trace and one fleet")
    if options.advise:
        options.policies = options.policies or [OURS]
        if len(options.policies) > 1 or options.sockets or options.margins or options.json or options.svg:
            parser.error("--advise takes one policy, and no --sockets, --margins, --json or --svg")
    if options.sockets:
        options.policies = options.policies or [OURS]
        if not set(options.policies) <= set(POLICIES):
            parser.error("--sockets takes pdproxy's policies only")
        if options.margins or options.untold or options.kv_events:
            parser.error("--margins, --untold and --kv-events need virtual time")
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
    unwind_on_signals()
    options = read_options()
    if options.fit:
        print(fits(list(published())))
        return 0
    try:
        if options.sessions:
            print(sessions.report(options))
            return 0
        if options.elastic_worlds:
            print(verdicts.report(options))
            return 0
        if options.elastic:
            print(elastic.report(options))
            return 0
        traces = {path.name: read(called_from() / path)[: options.requests] for path in options.traces}
        traces |= {name: drawn(name, options.requests or _DRAWN_REQUESTS) for name in options.drawn}
    except (InvalidTrace, OSError) as error:
        print(f"scripts/replay: {error}", file=sys.stderr)
        return 2
    for name, requests in traces.items():
        if requests[-1].at <= 0:
            print(f"scripts/replay: all requests of {name} arrive at once, so its load is undefined", file=sys.stderr)
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
    write_json(options, [run.as_json() for run in runs])
    if options.svg is not None:
        title = f"{runs[0].case}, {options.machine}"
        (called_from() / options.svg).write_text(chart(runs, title))
    return 0


def _print(options: argparse.Namespace, traces: dict[str, list[Request]], runs: Sequence[Run]) -> None:
    cases = list(product(traces, fleets(options)))
    for trace, fleet in cases:
        print(_head(options, fleet, trace, traces[trace]))
        if not options.margins:
            mine = [run for run in runs if (run.case.trace, run.case.fleet) == (trace, fleet.name)]
            print(f"\n{table(mine)}\n")
    is_fast = options.speed != 1
    if options.margins:
        print(f"\n{margins(runs, options.margins)}")
    print(
        f"In time: first token within {options.slo_base:g} s + {options.slo_factor:g} × its uncached prefill time; "
        f"good: in time, and at most {options.slo_token_ms:g} ms per token."
        + (f" Engines run at {options.speed:g} times their speed; times are converted to speed 1." * is_fast)
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
        f"At load 1 the decoders are at {tokens / seconds_at_one / rate:.2f} of their saturation point."
    )


if __name__ == "__main__":
    sys.exit(main())
