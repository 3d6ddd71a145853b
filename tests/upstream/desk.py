"""Provide Names with a scripted name server."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from proxy.observe.metrics import Metrics
from proxy.upstream import AddressRules, HostNames
from tests.clock import Clock

LOOPBACK = AddressRules(["127.0.0.0/8", "::1/128"])


class NameServer:
    """Gives prepared answers, each to one look-up; it waits where there is none."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked = threading.Semaphore(0)
        self._answers: queue.Queue[tuple[str, ...] | Exception | None] = queue.Queue()

    def say(self, *answers: Sequence[str] | Exception) -> None:
        for answer in answers:
            self._answers.put(answer if isinstance(answer, Exception) else tuple(answer))

    def close(self) -> None:
        """Release all waiting look-ups."""
        for _ in range(8):
            self._answers.put(None)

    def __call__(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        self.is_asked.release()
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer or ()


class Desk:
    """Names with a name server, and the metrics they write."""

    def __init__(self, names: HostNames, server: NameServer, metrics: Metrics) -> None:
        self.names = names
        self.server = server
        self._metrics = metrics

    @property
    def errors(self) -> float:
        (sample,) = (
            sample
            for family in self._metrics.collect()
            for sample in family.samples
            if sample.name == "pdproxy_dns_errors_total"
        )
        return sample.value

    async def refreshed(self, host: str) -> None:
        """Until the look-up under way has ended."""
        pending = self.names._names_by_host[host].pending_look_up
        assert pending is not None
        await pending


@asynccontextmanager
async def desk(clock: Clock, *configured: str, rules: AddressRules = LOOPBACK) -> AsyncIterator[Desk]:
    server, metrics = NameServer(), Metrics()
    try:
        async with HostNames(rules, configured, metrics, clock=clock, look_up=server) as names:
            yield Desk(names, server, metrics)
    finally:
        server.close()
