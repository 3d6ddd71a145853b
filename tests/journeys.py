"""Functions of the gateway that a request runs, in the order of their first calls: `scripts/trace`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import uvloop

from proxy.observe.logs import silence_log
from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import Deployment, deployed
from tests.dialects import messages
from tests.talking import Clients, raw

_ROOT: Final = Path(__file__).parent.parent
_GATEWAY: Final = f"{_ROOT / 'proxy'}/"
_ENGINES: Final = f"{_GATEWAY}sim/"
_WARM_UPS: Final = 3
_TIMES: Final = 5
"""A function belongs to a journey if it runs each time. The others belong to timers and the garbage collector."""
_TIMERS: Final = ("Monitor._on_timer", "Worker.look", "build.<locals>.<lambda>", "Metrics.settle")
"""Functions of timers that every worker has. In a journey that takes long they run each time."""

CHAT: Final = raw(request(Api.CHAT, stream=True, max_tokens=12))
MESSAGE: Final = raw(messages.question(stream=True, max_tokens=12), messages.PATH)
JOURNEYS: Final = {"chat": (CHAT, 0), "message": (MESSAGE, 0), "two-deaths": (CHAT, 2)}
"""A request for a stream of 12 tokens, and the number of decoders that reset the connection after 3 tokens."""


@dataclass
class Trace:
    """The functions that ran."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    """How often each function was called, in the order of the first calls."""

    @property
    def files(self) -> set[str]:
        return {_file(code) for code in self.calls}

    @property
    def packages(self) -> set[str]:
        """The directories below `proxy`; one for all modules that are in none."""
        return {Path(file).parts[1] if len(Path(file).parts) > 2 else "proxy" for file in self.files}

    def lines(self) -> Iterator[str]:
        """One for each function: how often it was called, and where it is."""
        for code, times in self.calls.items():
            yield f"{times:6}  {_file(code)}:{code.co_firstlineno} {code.co_qualname}"


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(_ROOT))


@contextmanager
def tracing() -> Iterator[Trace]:
    """Trace the gateway's own functions."""
    trace = Trace()

    timer: FrameType | None = None

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal timer
        code = frame.f_code
        if timer is not None:
            if event == "return" and frame is timer:
                timer = None
        elif event == "call" and code.co_filename.startswith(_GATEWAY) and not code.co_filename.startswith(_ENGINES):
            if code.co_qualname in _TIMERS:
                timer = frame
            else:
                trace.calls[code] += 1

    sys.setprofile(on_event)
    try:
        yield trace
    finally:
        sys.setprofile(None)


async def travel(name: str, *, fast_path: bool = True) -> Trace:
    """Trace a journey on an open connection, after the gateway has served the same request some times."""
    data, deaths = JOURNEYS[name]
    engines = [SimulatedEngine(role="decode", decode_step_ms=1.0) for _ in range(max(1, deaths))]
    resume = {"repeat_up_to_tokens": 0, "deadline_seconds": 30.0}
    listen = {"fast_path": fast_path}
    health = {"eject_after": 1_000_000, "interval_seconds": 3600.0, "changing_interval_seconds": 3600.0}
    async with deployed(
        [SimulatedEngine(role="prefill")], [*engines], resume=resume, listen=listen, health=health
    ) as gateway:
        traces = [await _traced(gateway, data, deaths) for _ in range(_WARM_UPS + _TIMES)][_WARM_UPS:]
    each_time = set.intersection(*(set(trace.calls) for trace in traces))
    return Trace(Counter({code: times for code, times in traces[-1].calls.items() if code in each_time}))


async def _traced(gateway: Deployment, data: bytes, deaths: int) -> Trace:
    for engine in gateway.decoders[:deaths]:
        engine.faults.clear()
        engine.faults.add("reset_after_tokens", tokens=3, times=1)
    clients = Clients(gateway)
    line = await clients.connect()
    # The handlers that other tests have left would make records of the access line.
    with silence_log(), tracing() as trace:
        line.send(data)
        await line.answer()
        gateway.worker.request_observers.flush_batch()
    ((head, body, ending),) = line.received
    assert head.startswith("HTTP/1.1 200"), head
    assert ending == "whole"
    assert "error" not in body
    assert all(rule["fired"] == 1 for engine in gateway.decoders for rule in engine.faults.describe())
    line.writer.close()
    await clients.rest()
    await until(lambda: not gateway.worker.client_listener.connection_count, "the connection to be closed")
    return trace


def main() -> None:
    """Print a table, and the functions if they are asked for."""
    parser = argparse.ArgumentParser(prog="scripts/trace", description="Which functions a request runs.")
    parser.add_argument("--journey", action="append", choices=JOURNEYS, help="only this one (repeatable)")
    parser.add_argument("--functions", action="store_true", help="list them, too, in the order of their first calls")
    parser.add_argument("--without-fast-path", action="store_true", help="with listen.fast_path: false")
    options = parser.parse_args()
    print(f"{'functions':>9} {'files':>6} {'packages':>9} {'calls':>6}  streamed")
    for name in options.journey or JOURNEYS:
        trace = uvloop.run(travel(name, fast_path=not options.without_fast_path))
        counts = f"{len(trace.calls):9} {len(trace.files):6} {len(trace.packages):9} {trace.calls.total():6}"
        print(f"{counts}  {name}", flush=True)
        if options.functions:
            print(*trace.lines(), sep="\n")


if __name__ == "__main__":
    main()
