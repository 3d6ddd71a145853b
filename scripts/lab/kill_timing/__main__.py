"""Kill an engine under load, and see for how long requests still go to it. One program after the other."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from lab.common import peers
from lab.common.invocation import called_from, unwind_on_signals
from lab.common.output import aligned
from lab.common.processes import HOST, free_ports, running, wait_until_ready
from lab.kill_timing.requests import REQUESTS_PER_SECOND, Requests
from lab.kill_timing.sniffer import Sniffer

_WARM_UP_SECONDS = 2.0
_NOUNS = {"prefill": "prefiller", "decode": "decoder"}
_NOTES = f"""
2 prefillers and 2 decoders, {REQUESTS_PER_SECOND} streamed requests a second; then `kill -9` of one of them.
Last touch: the last time a connection to it was opened, or bytes were sent to it. pdproxy runs without periodic health
checks, so all of these are requests, and it is by them alone that it learns that the engine is gone.
Errors: statuses other than 200, streams with an error event or without [DONE], broken connections."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kill. `last_touch_seconds` counts from the kill; None if nothing went there any more."""

    last_touch_seconds: float | None
    touches: int
    errors: dict[str, int]
    asked: int


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    compared = [_without_health_checks(peers.ours())]
    if options.reference is not None:
        compared.append(peers.reference(called_from() / options.reference))
    rows: list[tuple[str, ...]] = [("program", "killed", "last touch, s", "touches", "errors", "of requests")]
    for role in _NOUNS:
        for peer in compared:
            measured = []
            for number in range(1, options.rounds + 1):
                measured.append(_measure(peer, role, options.seconds))
                print(f"round {number}, {peer.name}, {_NOUNS[role]}: {measured[-1]}", file=sys.stderr, flush=True)
            rows.append((peer.name, _NOUNS[role], *_row(measured, options.seconds)))
    print(f"\nMedians of {options.rounds}.\n")
    print(aligned(rows))
    print(_NOTES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/kill-timing", description=__doc__)
    parser.add_argument(
        "--reference", type=Path, metavar="PATH", help="vllm-ascend's load_balance_proxy_server_example.py"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to watch after the kill (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="kills of which the median counts (default: 3)")
    options = parser.parse_args()
    if not 1 <= options.seconds <= 60 or not 1 <= options.rounds <= 20:
        parser.error("--seconds must be 1 to 60 and --rounds 1 to 20")
    return options


def _without_health_checks(peer: peers.Peer) -> peers.Peer:
    """But for the first one: what touches an engine are then requests."""
    never = [f"PROXY_HEALTH__{name}=3600" for name in ("INTERVAL_SECONDS", "CHANGING_INTERVAL_SECONDS")]
    return peers.Peer(peer.name, ("env", *never, *peer.words), peer.ready_path)


def _measure(peer: peers.Peer, role: str, seconds: float) -> Measurement:
    """Start everything anew, and kill the first engine of a role."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = dict(zip(_NOUNS, (free_ports(2), free_ports(2)), strict=True))
        pids = {}
        for engine_role, port in ((r, port) for r in _NOUNS for port in ports[r]):
            command = [sys.executable, "-m", "proxy", "mock-engine", "--role", engine_role, "--port", str(port)]
            command += ["--decode-step-ms", "10", "--prefill-ms-per-1k-tokens", "100"]
            pids[port] = stack.enter_context(running(f"engine {port}", command, port, logs / f"{port}.log"))
        (gateway,) = free_ports(1)
        command = peer.command(gateway, ports["prefill"], ports["decode"])
        stack.enter_context(running(peer.name, command, gateway, logs / "gateway.log"))
        wait_until_ready(peer.name, gateway, peer.ready_path)
        victim = ports[role][0]
        return uvloop.run(_kill(f"http://{HOST}:{gateway}", victim, pids[victim], seconds))


async def _kill(url: str, port: int, pid: int, seconds: float) -> Measurement:
    requests = Requests()
    is_over = asyncio.Event()
    asking = asyncio.create_task(requests.ask(url, is_over))
    await asyncio.sleep(_WARM_UP_SECONDS)
    if requests.errors:
        sys.exit(f"there are errors without a kill: {requests.reasons(0.0)}")
    with Sniffer(port) as sniffer:
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        asked_before = requests.asked
        await asyncio.sleep(seconds)
        asked = requests.asked - asked_before
        is_over.set()
        touches = [at - killed for at in sniffer.touches if at > killed]
        await asking
    return Measurement(max(touches, default=None), len(touches), dict(requests.reasons(killed)), asked)


def _row(measured: list[Measurement], seconds: float) -> tuple[str, ...]:
    # What was touched until the end, or half a second before, is touched for ever.
    last = median(m.last_touch_seconds or 0.0 for m in measured)
    touched = "until the end" if last > seconds - 0.5 else f"{last:.3f}"
    errors = f"{median(sum(m.errors.values()) for m in measured):.0f}"
    return touched, f"{median(m.touches for m in measured):.0f}", errors, f"{median(m.asked for m in measured):.0f}"


if __name__ == "__main__":
    main()
