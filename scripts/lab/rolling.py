"""Replace what clients talk to while they do."""

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
from proxy.tools.roll import Gateways, Limits, RollProgress, Walk

_STEP_MS: Final = 100.0
_TAKEN_OVER: Final = r"process (\d+) has taken over"
_TAKE_OVER_SECONDS: Final = 120.0


def main() -> None:
    """The whole run; the exit code says whether clients have noticed anything."""
    unwind_on_signals()
    allow_many_files()
    options = _options()
    rows: list[tuple[str, ...]] = [("replaced", "seconds", "answers", "failed", "longest gap, ms")]
    failures = 0
    for name, evacuate_after_seconds in (("engines, evacuated", 0.0), ("engines, drained", None)):
        if options.what in ("engines", "both"):
            seconds, seen = uvloop.run(_roll(options, evacuate_after_seconds))
            rows.append(_row(name, seconds, seen))
            failures += len(seen.load.problems)
    if options.what in ("gateway", "both"):
        seconds, seen = uvloop.run(_take_over(options))
        rows.append(_row(f"gateway, {options.replacements} times", seconds, seen))
        failures += len(seen.load.problems)
    print(aligned(rows))
    print(
        f"\n{options.prefillers}P{options.decoders}D, {options.streams} streams of {options.tokens} tokens, one in "
        f"{_STEP_MS:g} ms; an engine is away for {options.down_seconds:g} s."
    )
    sys.exit(failures > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/rolling", description=__doc__)
    add = parser.add_argument
    add("what", nargs="?", choices=["engines", "gateway", "both"], default="both", help="is replaced (both)")
    add("--prefillers", type=int, default=4, help="4")
    add("--decoders", type=int, default=8, help="8")
    add("--streams", type=int, default=200, help="at a time (200)")
    add("--tokens", type=int, default=120, help="of each answer (120)")
    add("--down-seconds", type=float, default=2.0, help="that an engine takes to start (2)")
    add("--replacements", type=int, default=10, help="of the gateway (10)")
    options = parser.parse_args()
    if min(options.prefillers, options.decoders) < 2 or options.streams < 1 or options.replacements < 1:
        parser.error("there have to be two engines of each role, a stream and a replacement")
    return options


@dataclass(frozen=True, slots=True)
class Seen:
    """What all clients have seen."""

    load: Load
    gaps: Histogram
    """Times between two arrivals of tokens."""


def _row(name: str, seconds: float, seen: Seen) -> tuple[str, ...]:
    told = ", ".join(f"{count} × {why}" for why, count in seen.load.failures().items()) or "0"
    return name, f"{seconds:.0f}", str(seen.load.ended), told, f"{seen.gaps.milliseconds(1.0):.0f}"


@asynccontextmanager
async def _asked(options: argparse.Namespace, port: int) -> AsyncIterator[Seen]:
    """So many streams at a time, in which the same is asked again and again. Each answer must be whole, and the same as
    without a gateway. Half of the clients keep their connections.
    """
    asked = {
        "model": "sim",
        "messages": [{"role": "user", "content": "What is replaced while this is written?"}],
        "max_tokens": options.tokens,
        "stream": True,
    }
    async with SimulatedEngine(role="both") as engine:
        expected = _text(await ask(engine.port, post(engine.port, asked)))
    gaps = Histogram()
    connections = Connections(port, gaps)
    keeping, closing = post(port, asked), post(port, asked, Connection="close")

    async def one(number: int) -> str:
        answer = await connections.ask(closing if number % 2 else keeping)
        return answer.problem() or ("" if _text(answer) == expected else "another answer")

    load = Load(one)
    # Not all at the same moment, or nothing would be asked in between.
    async with load.at_a_time(options.streams, spread_seconds=1.0):
        await asyncio.sleep(options.tokens * _STEP_MS / 1000)
        yield Seen(load, gaps)


def _text(answer: Answer) -> str:
    """What a stream says."""
    events = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line and not line.startswith(DONE)]
    choices = [choice for event in events for choice in orjson.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def _gateway(options: argparse.Namespace) -> AsyncIterator[tuple[Gateway, list[SimulatedEngine]]]:
    """In front of engines in this process."""
    async with AsyncExitStack() as stack:
        engines = [SimulatedEngine(role="prefill") for _ in range(options.prefillers)]
        engines += [SimulatedEngine(role="decode", decode_step_ms=_STEP_MS) for _ in range(options.decoders)]
        for engine in engines:
            await stack.enter_async_context(engine)
        fleet = stack.enter_context(Fleet())
        words = [word for engine in engines for word in (f"--{engine.options.role}", engine.url)]
        # The default, which there is a reason for: idle connections are not closed under the clients' hands.
        gateway = fleet.gateway(*words, environment={"PROXY_DRAIN__NOT_READY_SECONDS": "5"})
        try:
            yield await asyncio.to_thread(fleet.keep, gateway), engines
        finally:
            await asyncio.to_thread(fleet.close)


async def _roll(options: argparse.Namespace, evacuate_after_seconds: float | None) -> tuple[float, Seen]:
    """All engines are restarted, one after the other."""
    loop = asyncio.get_running_loop()
    async with _gateway(options) as (gateway, engines):
        by_address = {f"{engine.host}:{engine.port}": engine for engine in engines}

        def restart(address: str) -> None:
            asyncio.run_coroutine_threadsafe(_restart(by_address[address], options.down_seconds), loop).result()

        async with _asked(options, gateway.port) as seen:
            began = time.monotonic()
            for role in ("prefill", "decode"):
                limits = Limits(evacuate_after_seconds=evacuate_after_seconds, settle_seconds=1.0)
                walk = Walk(Gateways([gateway.url], role, None), RollProgress(None, role, ""), limits, restart, _tell)
                await asyncio.to_thread(_walk, walk)
            seconds = time.monotonic() - began
    return seconds, seen


def _walk(walk: Walk) -> None:
    walk.run(walk.plan())


async def _restart(engine: SimulatedEngine, down_seconds: float) -> None:
    await engine.kill()
    await asyncio.sleep(down_seconds)
    await engine.start()


async def _take_over(options: argparse.Namespace) -> tuple[float, Seen]:
    """The gateway is replaced so many times."""
    async with _gateway(options) as (gateway, _):
        pids = [gateway.pid]
        try:
            async with _asked(options, gateway.port) as seen:
                began = time.monotonic()
                for number in range(options.replacements):
                    pids.append(await asyncio.to_thread(_replace, pids[-1], number, gateway))
                    _tell(f"process {pids[-1]} has taken over")
                seconds = time.monotonic() - began
        finally:
            for started in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(started, signal.SIGKILL)
    return seconds, seen


def _replace(pid: int, number: int, gateway: Gateway) -> int:
    """Have a process be replaced; the new one."""
    os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + _TAKE_OVER_SECONDS
    while len(found := _found(gateway.text())) <= number:
        if time.monotonic() > until:
            sys.exit(f"nobody has taken over:\n{gateway.text()[-2000:]}")
        time.sleep(0.1)
    return found[number]


def _found(log: str) -> Sequence[int]:
    return [int(pid) for pid in re.findall(_TAKEN_OVER, log)]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
