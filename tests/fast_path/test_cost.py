"""What a plain request and a token cost in calls, which are the same on every machine: the price cannot creep back.

What is done for many requests at once, 200 ms apart, is counted apart: how many there are then depends on the machine.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pytest

from proxy.fast_path.connection import FastConnection
from proxy.fast_path.request import FastRequest
from proxy.observe.observers import Observers, RequestListener
from proxy.upstream.connection import Connection
from proxy.wire.openai import Api
from tests.asking import request
from tests.fast_path.roads import Clients, raw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Sequence
    from types import CodeType, FrameType

    from proxy.observe.record import RequestRecord
    from tests.conftest import Deploy
    from tests.deployment import Deployment
    from tests.fast_path.roads import Line

CONNECTIONS: Final = 16
ROUNDS: Final = 5  # few, so that on a slow machine, too, some measurement is without what is done now and then
MEASUREMENTS: Final = 16
REQUESTS: Final = 200
STREAM, WHOLE, TOKEN = "a stream of one token", "an answer that is not streamed", "a further token"
PAIR = "a stream of one token for which both legs go at once"
SETTLED = "what follows from one request of many that are over"

# Python functions of ours that are called, and C functions that ours call. About a tenth above what was measured; who
# makes a request cheaper lowers them.
BOUNDS: Final = {
    STREAM: (265, 270),
    WHOLE: (240, 205),
    PAIR: (300, 315),
    TOKEN: (2.4, 13),  # many, but of those that take no longer than a comparison
    SETTLED: (20.5, 27),
}
# Blocks of memory that are still there when a request is over and counted. A few caches may grow for other reasons.
LEFT_BLOCKS: Final = 1.0

_BATCH: Final = Observers.settle.__code__
_ROOTS: Final = {FastConnection.data_received.__code__, Connection.data_received.__code__, FastRequest._look.__code__}


@dataclass
class Calls:
    """How many calls there were."""

    python: float = 0
    c: float = 0


@contextmanager
def counting(roots: Collection[CodeType] = _ROOTS, left_out: CodeType | None = _BATCH) -> Iterator[Calls]:
    """Count the calls of the gateway's own code that follow from what has arrived, without what timers do."""
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
                    calls.python += 1
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
    data = raw(request(Api.CHAT, **fields))

    async def one(line: Line) -> None:
        for _ in range(rounds):
            line.send(data)
            await line.answer()

    await asyncio.gather(*map(one, lines))
    answers = {(head[: len("HTTP/1.1 200")], ending) for line in lines for head, _, ending in line.received}
    assert answers == {("HTTP/1.1 200", "whole")}


async def per_request(lines: list[Line], **fields: Any) -> Calls:
    """The calls of one request, when everything has happened before: the least of some measurements, as now and then
    something is done that is done once in a while.
    """
    await ask(lines, 3, **fields)
    found = []
    for _ in range(MEASUREMENTS):
        with counting() as calls:
            await ask(lines, ROUNDS, **fields)
        count = len(lines) * ROUNDS
        found.append(Calls(calls.python / count, calls.c / count))
    return min(found, key=lambda calls: calls.python)


@asynccontextmanager
async def connected(gateway: Deployment, count: int = CONNECTIONS) -> AsyncIterator[list[Line]]:
    """Clients, which leave at the end of the block."""
    clients = Clients(gateway)
    yield [await clients.connect() for _ in range(count)]
    for line in clients.lines:
        line.writer.close()


def check(what: str, calls: Calls) -> None:
    python, c = BOUNDS[what]
    told = f"{what} takes {calls.python:.1f} Python calls and {calls.c:.1f} C calls"
    assert calls.python <= python, told
    assert calls.c <= c, told
    assert calls.python > python / 2, f"{told}: lower the bound"


@pytest.mark.parametrize("what", [STREAM, WHOLE, PAIR])
async def test_a_plain_request_takes_no_more_calls_than_it_did(deploy: Deploy, what: str) -> None:
    gateway = await deploy(connector="sglang_bootstrap" if what is PAIR else "vllm_pull")
    async with connected(gateway, 1) as lines:  # one by one: of many some would have to wait where the machine is busy
        check(what, await per_request(lines, stream=what is not WHOLE, max_tokens=1))


async def test_a_token_takes_no_more_calls_than_it_did(deploy: Deploy) -> None:
    # Policies that learn do so with some requests and not with others, which would hide what a token takes.
    by_tokens = {"prefill_policy": "least_tokens", "decode_policy": "least_tokens"}
    gateway = await deploy(decoder={"decode_step_ms": 2.0}, balance=by_tokens)
    async with connected(gateway, 4) as lines:
        found = []
        for _ in range(MEASUREMENTS):  # a busy machine reads two tokens at once, which takes more
            few = await per_request(lines, stream=True, max_tokens=5)
            many = await per_request(lines, stream=True, max_tokens=45)
            found.append(Calls((many.python - few.python) / 40, (many.c - few.c) / 40))
            if found[-1].python <= BOUNDS[TOKEN][0] and found[-1].c <= BOUNDS[TOKEN][1]:
                break
    check(TOKEN, min(found, key=lambda calls: calls.c))


class Ended(RequestListener):
    """Keeps the records of those that are over."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        self.records += ended


async def test_what_follows_from_a_request_takes_no_more_calls_than_it_did(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(
        logging.WARNING, "proxy"
    )  # lines are the tests' own handlers' work, if a test before asked for them
    gateway = await deploy()
    observers, ended = gateway.worker.observers, Ended()
    observers.add(ended)
    async with connected(gateway) as lines:
        await ask(lines, ROUNDS, stream=True, max_tokens=1)
        # However busy the machine is: all of them once more, at one time.
        records = tuple(ended.records)
        with observers.in_batches(lambda *_, **__: None), counting({_BATCH}, None) as calls:
            for record in records:
                observers.end(record)
            observers.settle()
    check(SETTLED, Calls(calls.python / len(records), calls.c / len(records)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap"])
async def test_a_plain_request_leaves_nothing_in_memory(
    deploy: Deploy, connector: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "proxy")  # it would keep every line, if a test before has asked for them
    gateway = await deploy(connector=connector)

    async def blocks(lines: list[Line]) -> int:
        await ask(lines, REQUESTS, stream=stream, max_tokens=1)
        gateway.worker.observers.settle()
        for line in lines:
            line.received.clear()
        for engine in gateway.engines:
            engine.state.requests.clear()
        gc.collect()
        return sys.getallocatedblocks()

    async with connected(gateway, 1) as lines:  # so that few connections to engines come and go in between
        await blocks(lines)
        # What requests leave would be there each time.
        counts = [await blocks(lines) for _ in range(4)]
        left = min(after - before for before, after in pairwise(counts)) / REQUESTS
    assert left <= LEFT_BLOCKS, f"{left:.2f} blocks are left of each request"
