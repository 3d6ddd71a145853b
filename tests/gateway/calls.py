"""Counts the calls of the gateway's code that follow from received bytes, without the work of timers."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final

from proxy.gateway.fast_connection import FastConnection
from proxy.gateway.request import Request
from proxy.observe.observers import RequestListener, RequestObservers
from proxy.observe.record import RequestRecord
from proxy.upstream.connection import EngineConnection
from proxy.upstream.upstream import Upstream
from proxy.wire.openai import Api
from tests.asking import request
from tests.deployment import Deployment
from tests.talking import Clients, Line, raw

BATCH: Final = RequestObservers.flush_batch.__code__
"""Begins what is done for many requests at once. How many depends on the machine."""
SWEEP: Final = Upstream.check_connections.__code__
"""Begins the look at all exchanges that a timer has."""
ROOTS: Final = {
    FastConnection.data_received.__code__,
    EngineConnection.data_received.__code__,
    Request._complete_or_wait.__code__,
}
"""Begin what is done for one request."""


class Ended(RequestListener):
    """Keeps the records of ended requests."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        self.records += ended


@dataclass
class Calls:
    """The calls that were counted."""

    functions: Counter[CodeType] = field(default_factory=Counter)
    """How often each Python function was called."""
    c: int = 0
    """Calls of C functions."""


@contextmanager
def counting(roots: Collection[CodeType] = ROOTS, left_out: CodeType | None = BATCH) -> Iterator[Calls]:
    """Count the calls that follow from a call of a root, without those that follow from `left_out`."""
    calls = Calls()
    root: FrameType | None = None
    batch: FrameType | None = None

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal root, batch
        if root is None:
            if event != "call" or frame.f_code not in roots:
                return
            root = frame
        if batch is not None:
            if event == "return" and frame is batch:
                batch = None
        elif event == "call" and frame.f_code is left_out:
            batch = frame
        elif event in ("call", "c_call"):
            name = frame.f_code.co_filename
            if "/proxy/" in name and "/proxy/sim/" not in name:
                if event == "call":
                    calls.functions[frame.f_code] += 1
                else:
                    calls.c += 1
        elif event == "return" and frame is root:
            root = None

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def ask(lines: list[Line], rounds: int, **fields: Any) -> None:
    """Ask for chats on all connections at once, `rounds` times on each. All must be answered."""
    data = raw(request(Api.CHAT, **fields))

    async def one(line: Line) -> None:
        for _ in range(rounds):
            line.send(data)
            await line.answer()

    await asyncio.gather(*map(one, lines))
    answers = {(head[: len("HTTP/1.1 200")], ending) for line in lines for head, _, ending in line.received}
    assert answers == {("HTTP/1.1 200", "whole")}


@asynccontextmanager
async def connected(gateway: Deployment, count: int) -> AsyncIterator[list[Line]]:
    """Clients, which leave at the end of the block."""
    clients = Clients(gateway)
    yield [await clients.connect() for _ in range(count)]
    for line in clients.lines:
        line.writer.close()
