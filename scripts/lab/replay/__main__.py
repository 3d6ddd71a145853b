"""What another way of choosing instances would make of a trace.

The requests of a trace in Mooncake's format go through the gateway's own admission, pools and policies to simulated
engines, in virtual time. `load` is the work of all prompts without a cache over what the prefillers can do: traces are
made faster or slower for it. The rules of other gateways take part as policies, beside the gateway's own.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from lab.common.invocation import unwind_on_signals
from lab.replay import report, virtual_time
from lab.replay.figures import Run, Slo, figures
from lab.replay.fleet import Fleet, Replay, parse_fleet
from lab.replay.peers import peers
from lab.replay.trace import InvalidTrace, faster, read, spread
from proxy.balancer.policies import make_policy
from proxy.settings import POLICIES
from proxy.sim.hardware.machines import MACHINES, published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.replay.fleet import MakePolicy
    from lab.replay.trace import Request
    from proxy.sim.hardware.machines import Machine


def main() -> int:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    if options.fit:
        print(report.fits(list(published())))
        return 0
    prefillers, decoders = options.fleet
    fleet = Fleet(
        prefillers,
        decoders,
        prefill_machine=_machine(options),
        decode_machine=MACHINES[options.decode_machine],
        slow=options.slow,
    )
    try:
        requests = read(_from_caller(options.trace))[: options.requests]
    except (InvalidTrace, OSError) as error:
        print(f"scripts/replay: {error}", file=sys.stderr)
        return 2
    if requests[-1].at <= 0:
        print("scripts/replay: all requests of the trace come at once, so it has no load", file=sys.stderr)
        return 2
    runs = _runs(options, fleet, requests)
    print(_head(options, fleet, requests))
    print()
    print(report.table(runs))
    title = f"{options.trace.name}, {fleet.prefillers}P{fleet.decoders}D, {options.machine}"
    if options.json is not None:
        _from_caller(options.json).write_bytes(
            orjson.dumps([run.as_json() for run in runs], option=orjson.OPT_INDENT_2)
        )
    if options.svg is not None:
        _from_caller(options.svg).write_text(report.chart(runs, title))
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    machine = MACHINES[options.machine]
    if options.prefill_kv_tokens is None:
        return machine
    return replace(machine, prefill=replace(machine.prefill, kv_tokens=options.prefill_kv_tokens))


def _runs(options: argparse.Namespace, fleet: Fleet, requests: Sequence[Request]) -> list[Run]:
    policies = _policies(fleet)
    names = options.policies or list(policies)
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    plan = [(name, load, seed) for name in names for load in options.loads for seed in options.seeds]
    runs = []
    for number, (name, load, seed) in enumerate(plan, 1):
        began = time.monotonic()
        arrivals = _arrivals(fleet, requests, load, seed)
        progress = _Progress(f"{number}/{len(plan)} {name}, load {load:g}, seed {seed}", len(arrivals))
        replay = _replay(fleet, policies[name], arrivals, seed, options, progress)
        runs.append(Run(name, load, seed, figures(replay, fleet, slo)))
        progress.ended(time.monotonic() - began)
    return runs


def _arrivals(fleet: Fleet, requests: Sequence[Request], load: float, seed: int) -> list[Request]:
    evened = spread(requests, random.Random(seed))
    native = sum(map(fleet.work_seconds, evened)) / evened[-1].at / fleet.capacity
    return faster(evened, load / native)


def _replay(
    fleet: Fleet,
    policy: tuple[MakePolicy, MakePolicy],
    arrivals: Sequence[Request],
    seed: int,
    options: argparse.Namespace,
    progress: _Progress,
) -> Replay:
    made: list[Replay] = []

    async def course() -> None:
        made.append(
            Replay(
                fleet,
                *policy,
                seed=seed,
                max_running_prefill=options.max_running_prefill,
                max_running_decode=options.max_running_decode,
                tells_cached=not options.untold,
                on_end=progress.step,
            )
        )
        await made[0].run(arrivals)

    virtual_time.run(course(), virtual_time.VirtualLoop())
    return made[0]


def _policies(fleet: Fleet) -> dict[str, tuple[MakePolicy, MakePolicy]]:
    """The gateway's own for prefillers, with its default for decoders; and the rules of others."""
    decode = partial(make_policy, "least_load")
    own: dict[str, tuple[MakePolicy, MakePolicy]] = {name: (partial(make_policy, name), decode) for name in POLICIES}
    return own | peers(fleet.prefill_machine.cost)


def _head(options: argparse.Namespace, fleet: Fleet, requests: Sequence[Request]) -> str:
    decode = fleet.decode_machine
    tokens = sum(request.output_tokens for request in requests)
    prompt_tokens = sum(request.input_tokens for request in requests) // len(requests)
    rate = fleet.decoders * decode.cost.knee_rate(decode.decode.max_num_seqs, prompt_tokens)
    seconds_at_one = sum(map(fleet.work_seconds, requests)) / fleet.capacity
    return (
        f"{options.trace.name}: {len(requests)} requests in {requests[-1].at:.0f} s, "
        f"{prompt_tokens} + {tokens // len(requests)} tokens; "
        f"{fleet.prefillers} prefillers {fleet.prefill_machine.name}, {fleet.decoders} decoders {decode.name}.\n"
        f"At load 1 the decoders are at {tokens / seconds_at_one / rate:.2f} of what they can make at their knee. "
        f"In time: the first token within {options.slo_base:g} s + {options.slo_factor:g} × its prompt's own work; "
        f"good: also {options.slo_token_ms:g} ms a token or less."
    )


class _Progress:
    """A line on standard error, rewritten while a run goes on if somebody looks at it."""

    def __init__(self, name: str, requests: int) -> None:
        self._name = name
        self._requests = requests
        self._ended = 0
        self._is_live = sys.stderr.isatty()

    def step(self) -> None:
        self._ended += 1
        if self._is_live and self._ended % 200 == 0:
            print(f"\r{self._name}: {self._ended} of {self._requests}", end="", file=sys.stderr, flush=True)

    def ended(self, seconds: float) -> None:
        start = "\r" if self._is_live else ""
        print(f"{start}{self._name}: {self._ended} requests in {seconds:.1f} s", file=sys.stderr, flush=True)


def _from_caller(path: Path) -> Path:
    return Path(os.environ.get("CALLED_FROM", ".")) / path


def _fleet(text: str) -> tuple[int, int]:
    try:
        return parse_fleet(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _options() -> argparse.Namespace:
    names = [*POLICIES, *peers(MACHINES["kimi-k2-thinking-a3"].cost)]
    parser = argparse.ArgumentParser(prog="scripts/replay", description=__doc__)
    add = parser.add_argument
    add("trace", type=Path, nargs="?", help="a file of requests in Mooncake's format")
    add("--fit", action="store_true", help="print what was published of the machines beside what the model says")
    add("--fleet", type=_fleet, default=(8, 8), metavar="8P8D", help="prefillers and decoders (default: 8P8D)")
    add("--machine", choices=MACHINES, default="kimi-k2-thinking-a3", help="of the prefillers (default: %(default)s)")
    add("--decode-machine", choices=MACHINES, default="kimi-k2.5-h200", help="(default: %(default)s)")
    add("--slow", type=_positive, metavar="SPEED", help="one prefiller is so many times as fast as the others")
    add("--loads", type=_positive, nargs="+", default=[0.9], help="work without a cache / capacity (default: 0.9)")
    add("--seeds", type=int, nargs="+", default=[1], help="of all that is drawn (default: 1)")
    add("--policies", nargs="+", choices=names, metavar="NAME", help=f"(default: all) {', '.join(names)}")
    add("--requests", type=int, metavar="N", help="only the first so many")
    add("--prefill-kv-tokens", type=int, metavar="N", help="that fit into a prefiller's cache (default: the machine's)")
    add("--untold", action="store_true", help="prefillers do not tell how much of a prompt they had in their caches")
    add("--max-running-prefill", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add("--max-running-decode", type=int, metavar="N", help="as the option of the gateway (default: no limit)")
    add("--slo-seconds", type=_positive, default=10.0, help="to the first token (default: 10)")
    add("--slo-base", type=_positive, default=2.0, help="in time: this and so many … (default: 2)")
    add("--slo-factor", type=_positive, default=3.0, help="… times the prompt's own work (default: 3)")
    add("--slo-token-ms", type=_positive, default=100.0, help="between two tokens (default: 100)")
    add("--json", type=Path, metavar="FILE", help="write every run there")
    add("--svg", type=Path, metavar="FILE", help="draw answers in time over load there")
    options = parser.parse_args()
    if options.trace is None and not options.fit:
        parser.error("which trace?")
    return options


if __name__ == "__main__":
    sys.exit(main())
