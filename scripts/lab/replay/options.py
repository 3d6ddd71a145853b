"""What the command line of scripts/replay says."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.common.invocation import called_from
from lab.replay.fleet import parse_fleet
from lab.replay.policies import OURS, policy_names
from proxy.flag_numbers import positive
from proxy.settings import POLICIES
from proxy.settings.model import Balance
from proxy.sim.hardware.machines import MACHINES

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
