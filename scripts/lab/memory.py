"""The gateway's memory under thousands of slow streams, after them, and with clients that read nothing."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

import uvloop

from lab.common.engines import Script
from lab.common.fleet import STOPS_SOON, Fleet, Gateway
from lab.common.load import Crowd, scripted, stalled_clients
from lab.common.proc import Memory, memory
from lab.common.processes import allow_many_files, unwind_on_signals

_PREFILLERS, _DECODERS = 2, 4
_STREAMS_PER_SECOND = 500
_MAX_TOKENS = 512
_PATIENCE_SECONDS = 30.0
_SETTLING_SECONDS = 2.0
_STALLED_SECONDS = 5.0
_MIB = 1024 * 1024
_NOTES = """
Slow: a token per second. Each: growth per stream. Freed memory is kept for later streams, so the memory after the end
must not grow from cycle to cycle."""


@dataclass(slots=True)
class Run:
    """A gateway and its measurements."""

    fleet: Fleet
    gateway: Gateway
    prompt_bytes: int
    idle: Memory | None = None
    errors: int = 0
    kib_each: float = 0.0
    """Latest growth per stream, in KiB."""

    def _request(self, script: Script) -> bytes:
        return scripted(self.gateway.port, self.prompt_bytes, _MAX_TOKENS, script)

    async def warm_up(self) -> None:
        crowd = Crowd(self.gateway.port)
        for _ in range(20):
            await crowd.open(self._request(Script(tokens=3, step_ms=1)))
        await crowd.ended(_PATIENCE_SECONDS)
        self._record_errors(crowd)

    async def grow(self, sizes: list[int]) -> None:
        """Open streams up to each size, and print the memory each time. Then end all of them."""
        crowd = Crowd(self.gateway.port)
        await self._print_memory("before", 0)
        opened = 0
        for size in sizes:
            await self._open(crowd, size - opened)
            opened = size
            await asyncio.sleep(_SETTLING_SECONDS)
            await self._print_memory(f"{size} slow streams", size)
        await self._finish(crowd)
        await asyncio.sleep(_SETTLING_SECONDS)
        await self._print_memory("after all have ended", 0)

    async def repeat(self, cycles: int, size: int) -> None:
        """Open and end streams repeatedly, to detect growth."""
        for cycle in range(1, cycles + 1):
            crowd = Crowd(self.gateway.port)
            await self._open(crowd, size)
            await self._finish(crowd)
            await asyncio.sleep(_SETTLING_SECONDS / 4)
            await self._print_memory(f"after {cycle} x {size} more", 0)

    async def stall(self, clients: int) -> None:
        """Open fast streams whose clients read nothing."""
        await self._print_memory("before", 0)
        words = self._request(Script(step_ms=0))
        with stalled_clients(self.gateway.port, words, clients):
            await asyncio.sleep(_STALLED_SECONDS)
            await self._print_memory(f"{clients} clients that read nothing", clients)
        await asyncio.sleep(_SETTLING_SECONDS)
        await self._print_memory("after they have left", 0)

    async def _open(self, crowd: Crowd, count: int) -> None:
        words = self._request(Script())
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(crowd.open(words))
                due += 1 / _STREAMS_PER_SECOND
                await asyncio.sleep(max(0.0, due - loop.time()))
        await crowd.begun(_PATIENCE_SECONDS)

    async def _finish(self, crowd: Crowd) -> None:
        await asyncio.to_thread(self.fleet.ask_engines, "/finish")
        await crowd.ended(_PATIENCE_SECONDS)
        self._record_errors(crowd)

    def _record_errors(self, crowd: Crowd) -> None:
        self.errors += crowd.errors.total()
        for problem, count in crowd.errors.items():
            print(f"{count} errors: {problem}")

    async def _print_memory(self, what: str, streams: int) -> None:
        now = memory(self.gateway.pid)
        self.idle = self.idle or now
        each = ""
        if streams:
            self.kib_each = (now.resident - self.idle.resident) / 1024 / streams
            each = f"{self.kib_each:8.1f}"
        print(f"{what:32} {now.resident / _MIB:9.1f} {now.shared_out / _MIB:9.1f} {each}", flush=True)


async def _measure_streams(run: Run, options: argparse.Namespace) -> None:
    await run.warm_up()
    await run.grow(options.streams)
    await run.repeat(options.cycles, options.cycle_streams)


async def _measure_stalled(run: Run, options: argparse.Namespace) -> None:
    await run.warm_up()
    await run.stall(options.stalled)


def main() -> None:
    unwind_on_signals()
    options = _options()
    allow_many_files()
    with Fleet() as fleet:
        fleet.cheap_engines(_PREFILLERS, _DECODERS)
        print(f"{'':32} {'RSS, MiB':>9} {'PSS, MiB':>9} {'KiB each':>8}")
        runs = []
        # A separate gateway for each, because freed memory of one hides the growth of the other.
        for measure in (_measure_streams, _measure_stalled):
            with fleet.gateway("--workers", str(options.workers), environment=STOPS_SOON) as gateway:
                runs.append(Run(fleet, gateway, options.prompt_bytes))
                uvloop.run(measure(runs[-1], options))
    errors, kib_each = sum(run.errors for run in runs), runs[0].kib_each
    print(f"{_NOTES}\n\n{errors} errors; {kib_each:.1f} KiB per stream (limit: {options.most_kib:g})")
    sys.exit(errors > 0 or kib_each > options.most_kib)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/memory", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 1000, 5000], help="numbers of concurrent streams")
    parser.add_argument("--cycles", type=int, default=10, help="number of further cycles (default: 10)")
    parser.add_argument("--cycle-streams", type=int, default=1000, help="streams per cycle (default: 1000)")
    parser.add_argument("--stalled", type=int, default=100, help="clients that read nothing (default: 100)")
    parser.add_argument("--prompt-bytes", type=int, default=2000, help="size of each prompt (default: 2000)")
    parser.add_argument("--most-kib", type=float, default=60, help="maximum KiB per stream (default: 60)")
    parser.add_argument("--workers", type=int, default=1, help="workers of the gateway (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
