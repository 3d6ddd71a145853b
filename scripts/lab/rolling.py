"""Restart engines, and replace the gateway, while clients stream answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import orjson
import uvloop

from lab.common.fleet import Fleet, Gateway
from lab.common.load import DONE, Answer, Connections, Histogram, Load, ask, post
from lab.common.output import aligned
from lab.common.processes import allow_many_files, unwind_on_signals
from proxy.sim.engine import SimulatedEngine
from proxy.tools.roll import GatewayGroup, RestartWalk, RollLimits, RollProgress

_STEP_MS: Final = 100.0
_TAKEN_OVER: Final = r"takeover: complete: process (\d+)"
_TAKE_OVER_SECONDS: Final = 120.0


def main() -> None:
    """Run all replacements. The exit code is 1 if a client saw a failure."""
    unwind_on_signals()
    allow_many_files()
    options = _options()
    rows: list[tuple[str, ...]] = [("replaced", "seconds", "answers", "failed", "longest gap, ms")]
    failures = 0
    for name, evacuate_after_seconds in (("engines, evacuated", 0.0), ("engines, drained", None)):
        if options.what in ("engines", "both"):
            seconds, records = uvloop.run(_roll(options, evacuate_after_seconds))
            rows.append(_row(name, seconds, records))
            failures += len(records.load.problems)
    if options.what in ("gateway", "both"):
        seconds, records = uvloop.run(_take_over(options))
        rows.append(_row(f"gateway, {options.replacements} times", seconds, records))
        failures += len(records.load.problems)
    print(aligned(rows))
    print(
        f"\n{options.prefillers}P{options.decoders}D, {options.streams} streams of {options.tokens} tokens, one in "
        f"{_STEP_MS:g} ms; an engine is away for {options.down_seconds:g} s."
    )
    sys.exit(failures > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/rolling", description=__doc__)
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        choices=["engines", "gateway", "both"],
        default="both",
        help="components to replace (default: both)",
    )
    add("--prefillers", type=int, default=4, help="number of prefillers (default: 4)")
    add("--decoders", type=int, default=8, help="number of decoders (default: 8)")
    add("--streams", type=int, default=200, help="concurrent streams (default: 200)")
    add("--tokens", type=int, default=120, help="length of each answer (default: 120)")
    add("--down-seconds", type=float, default=2.0, help="start time of an engine (default: 2)")
    add("--replacements", type=int, default=10, help="replacements of the gateway (default: 10)")
    options = parser.parse_args()
    if min(options.prefillers, options.decoders) < 2 or options.streams < 1 or options.replacements < 1:
        parser.error("two engines of each role, one stream and one replacement are the minimum")
    return options


@dataclass(frozen=True, slots=True)
class ClientRecords:
    """Records of all clients."""

    load: Load
    gaps: Histogram
    """Times between two arrivals of tokens."""


def _row(name: str, seconds: float, records: ClientRecords) -> tuple[str, ...]:
    failures_text = ", ".join(f"{count} × {why}" for why, count in records.load.failures().items()) or "0"
    return name, f"{seconds:.0f}", str(records.load.ended), failures_text, f"{records.gaps.milliseconds(1.0):.0f}"


@asynccontextmanager
async def _clients(options: argparse.Namespace, port: int) -> AsyncIterator[ClientRecords]:
    """Run concurrent streams of the same request during the block.

    Each answer must be complete, and equal to that of an engine without a gateway. Half of the clients reuse their
    connections.
    """
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": "What is replaced while this is written?"}],
        "max_tokens": options.tokens,
        "stream": True,
    }
    async with SimulatedEngine(role="both") as engine:
        expected = _text(await ask(engine.port, post(engine.port, body)))
    gaps = Histogram()
    connections = Connections(port, gaps)
    keeping, closing = post(port, body), post(port, body, Connection="close")

    async def one(number: int) -> str:
        answer = await connections.ask(closing if number % 2 else keeping)
        return answer.problem() or ("" if _text(answer) == expected else "another answer")

    load = Load(one)
    # The clients begin at different times, so that requests are sent all the time.
    async with load.at_a_time(options.streams, spread_seconds=1.0):
        await asyncio.sleep(options.tokens * _STEP_MS / 1000)
        yield ClientRecords(load, gaps)


def _text(answer: Answer) -> str:
    """Return the text of a stream."""
    events = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line and not line.startswith(DONE)]
    choices = [choice for event in events for choice in orjson.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def _gateway(options: argparse.Namespace) -> AsyncIterator[tuple[Gateway, list[SimulatedEngine]]]:
    """Run a gateway in front of engines in this process."""
    async with AsyncExitStack() as stack:
        engines = [SimulatedEngine(role="prefill") for _ in range(options.prefillers)]
        engines += [SimulatedEngine(role="decode", decode_step_ms=_STEP_MS) for _ in range(options.decoders)]
        for engine in engines:
            await stack.enter_async_context(engine)
        fleet = stack.enter_context(Fleet())
        words = [word for engine in engines for word in (f"--{engine.options.role}", engine.url)]
        # The default value: idle connections must not be closed while clients reuse them.
        gateway = fleet.gateway(*words, environment={"PROXY_DRAIN__NOT_READY_SECONDS": "5"})
        try:
            yield await asyncio.to_thread(fleet.keep, gateway), engines
        finally:
            await asyncio.to_thread(fleet.close)


async def _roll(options: argparse.Namespace, evacuate_after_seconds: float | None) -> tuple[float, ClientRecords]:
    """Restart all engines in turn. Return the duration and the records."""
    loop = asyncio.get_running_loop()
    async with _gateway(options) as (gateway, engines):
        by_address = {f"{engine.host}:{engine.port}": engine for engine in engines}

        def restart(address: str) -> None:
            asyncio.run_coroutine_threadsafe(_restart(by_address[address], options.down_seconds), loop).result()

        async with _clients(options, gateway.port) as records:
            began = time.monotonic()
            for role in ("prefill", "decode"):
                limits = RollLimits(evacuate_after_seconds=evacuate_after_seconds, settle_seconds=1.0)
                walk = RestartWalk(
                    GatewayGroup([gateway.url], role, None), RollProgress(None, role, ""), limits, restart, _print
                )
                await asyncio.to_thread(_walk, walk)
            seconds = time.monotonic() - began
    return seconds, records


def _walk(walk: RestartWalk) -> None:
    walk.run(walk.plan())


async def _restart(engine: SimulatedEngine, down_seconds: float) -> None:
    await engine.kill()
    await asyncio.sleep(down_seconds)
    await engine.start()


async def _take_over(options: argparse.Namespace) -> tuple[float, ClientRecords]:
    """Replace the gateway several times. Return the duration and the records."""
    async with _gateway(options) as (gateway, _):
        pids = [gateway.pid]
        try:
            async with _clients(options, gateway.port) as records:
                began = time.monotonic()
                for number in range(options.replacements):
                    pids.append(await asyncio.to_thread(_replace, pids[-1], number, gateway))
                    _print(f"process {pids[-1]} has taken over")
                seconds = time.monotonic() - began
        finally:
            for started in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(started, signal.SIGKILL)
    return seconds, records


def _replace(pid: int, number: int, gateway: Gateway) -> int:
    """Replace a process. Return the process id of its successor."""
    os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + _TAKE_OVER_SECONDS
    while len(found := _successors(gateway.text())) <= number:
        if time.monotonic() > until:
            sys.exit(f"no process has taken over:\n{gateway.text()[-2000:]}")
        time.sleep(0.1)
    return found[number]


def _successors(log: str) -> Sequence[int]:
    return [int(pid) for pid in re.findall(_TAKEN_OVER, log)]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
