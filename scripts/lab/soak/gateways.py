"""The gateways: how they are set up, what one asks of each, and the store by which several share what they know."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from lab.common.proc import open_fds, resident_bytes, tree
from lab.common.processes import HOST
from lab.common.programs import Program
from lab.common.store import store, store_url
from lab.soak.evidence import Limits, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import aiohttp

STALL_SECONDS = 1.0
LIMITS = Limits(handoff_seconds=4.0, health_seconds=0.5)


def settings(prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """What all gateways have in common: everything that takes a while by default takes a second or so."""
    return {
        "prefill": list(prefill),
        "decode": list(decode),
        "retry": {
            "max_attempts": LIMITS.max_attempts,
            "budget_share": LIMITS.budget_share,
            "budget_least": LIMITS.budget_least,
        },
        "resume": {"mode": "exact", "max_attempts": LIMITS.max_resumes, "deadline_seconds": 10.0},
        "timeouts": {
            "connect_seconds": 1.0,
            "prefill_seconds": 10.0,
            "handoff_seconds": LIMITS.handoff_seconds,
            "first_token_seconds": 10.0,
            "idle_seconds": 10.0,
            "answer_seconds": 30.0,
        },
        "health": {
            "interval_seconds": LIMITS.health_seconds,
            "timeout_seconds": 3.0,  # silence is noticed by `stall_seconds`, and this machine may be busy
            "changing_interval_seconds": 0.2,
            "fall": 2,
            "rise": 2,
            "eject_seconds": 1.0,
            "stall_seconds": STALL_SECONDS,
            "slow_start_seconds": 2.0,
            "quarantine_seconds": 2.0,
        },
        "joining": {"interval_seconds": 0.2, "max_attempts": 50},
        "drain": {"not_ready_seconds": 0.0},
        "log": {"format": "json"},
    }


class Gateway:
    """One of them, with a configuration and a log of its own, which is closed on the way out."""

    def __init__(self, path: Path, port: int, options: Mapping[str, Any], session: aiohttp.ClientSession) -> None:
        """`path`: of both, without their suffixes."""
        self.port = port
        self.url = f"http://{HOST}:{port}"
        configuration = path.with_suffix(".yaml")
        configuration.write_text(json.dumps({**options, "listen": {"port": port}}, indent=1))  # JSON is YAML, too
        self._log = path.with_suffix(".log")
        self._output = self._log.open("wb")
        self.program = Program(["--config", str(configuration)], self._output)
        self._session = session

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    async def sample(self) -> Sample:
        """What it tells of itself, and the kernel of it. Each metric has the label `gateway` besides."""
        async with self._session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        metrics = {
            (sample.name, tuple(sorted({**sample.labels, "gateway": str(self.port)}.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
        pid = self.program.pid
        return Sample(at=time.time(), metrics=metrics, rss_bytes=resident_bytes(pid), fds=sum(map(open_fds, tree(pid))))

    async def samples(self) -> list[Sample]:
        """So many that every worker should have answered one of them: each knows for itself how the instances are."""
        return [await self.sample() for _ in range(max(1, 4 * len(self.workers())))]

    def workers(self) -> list[int]:
        """None if it is one process."""
        return tree(self.program.pid)[1:]

    async def instances(self) -> list[dict[str, Any]]:
        """What it tells of each, those that drain included."""
        async with self._session.get(f"{self.url}/instances") as response:
            return list((await response.json())["instances"])

    async def change(self, verb: str, body: Mapping[str, Any]) -> str:
        """`add` or `remove` an instance. What is said against it; empty: nothing."""
        async with self._session.post(f"{self.url}/instances/{verb}", json=body) as response:
            return "" if response.status == 200 else await response.text()


class Store:
    """What several gateways share. It can be lost, with all that it has, and come back."""

    def __init__(self, port: int, directory: Path) -> None:
        self._port = port
        self._directory = directory
        self._running = ExitStack()

    @property
    def settings(self) -> dict[str, Any]:
        """They have the gateways share it."""
        return {"replicas": {"url": store_url(self._port)}}

    async def start(self) -> None:
        await asyncio.to_thread(self._running.enter_context, store(self._port, self._directory))

    async def end(self) -> None:
        """Nothing happens if it has ended."""
        await asyncio.to_thread(self._running.close)
