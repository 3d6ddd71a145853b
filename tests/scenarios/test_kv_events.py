"""The program hears KV events by one process, whatever its workers do, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from proxy.sim.engine import SimulatedEngine
from tests.asking import until
from tests.scenarios.program import Program, gateway

CONFIG = '{"publisher":"zmq","endpoint":"tcp://127.0.0.1:0"}'


def listeners(program: Program) -> list[int]:
    """Return the process ids of the subscribers of all workers."""
    found = []
    for worker in program.children():
        for task in Path(f"/proc/{worker}/task").glob("*"):
            found += [int(pid) for pid in told(task / "children").split()]
    return [pid for pid in found if b"kv_events" in told(Path(f"/proc/{pid}/cmdline"))]


def is_alive(pid: int) -> bool:
    """Nor is it a zombie, whose parent has not noticed yet."""
    stat = told(Path(f"/proc/{pid}/stat"))
    return bool(stat) and b") Z " not in stat


def told(path: Path) -> bytes:
    """Empty: it is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def publish(engine: SimulatedEngine) -> None:
    """Something, again and again: subscribers come late."""
    assert engine.kv_events is not None
    while True:
        engine.kv_events.cleared()
        await asyncio.sleep(0.02)


async def test_one_process_hears_for_all_workers_and_ends_with_the_one_that_has_started_it() -> None:
    async with (
        SimulatedEngine(role="prefill", profile_name="v0.33", kv_events_config=CONFIG) as prefiller,
        SimulatedEngine(role="decode", profile_name="v0.33") as decoder,
        gateway(
            *("--prefill", prefiller.url, "--decode", decoder.url, "--workers", "2", "--kv-events", "auto")
        ) as program,
    ):
        await until(lambda: len(listeners(program)) == 1, "the process that subscribes")
        (first,) = listeners(program)
        publishing = asyncio.create_task(publish(prefiller))
        try:
            await program.says(" publishes")
            os.kill(parent(first), signal.SIGKILL)
            await until(lambda: not is_alive(first), "its end")
            await until(lambda: len(listeners(program)) == 1, "another one")
            (second,) = listeners(program)
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        program.signal(signal.SIGTERM)
        assert await program.ended() == 0
        await until(lambda: not is_alive(second), "its end")
        assert "Traceback" not in program.output
