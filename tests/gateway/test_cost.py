"""The calls that a plain request and a token cost, which are equal on all machines and have bounds.

The work for many requests at a time, every 200 ms, is counted separately, because its amount depends on the machine.
"""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pytest

from proxy.wire.openai import Api
from tests.asking import request
from tests.canned import CannedEngine, data
from tests.conftest import Deploy
from tests.gateway.calls import BATCH, Calls, Ended, ask, connected, counting
from tests.gateway.forwarding import framed, token
from tests.talking import Line, raw
from tests.upstream.raw import STREAM_HEAD

CONNECTIONS: Final = 16
ROUNDS: Final = 5  # few, so that on a slow machine, too, some measurement is without what is done now and then
MEASUREMENTS: Final = 16
REQUESTS: Final = 200
TOKENS: Final = 64
STREAM, WHOLE, TOKEN = "a stream of one token", "an answer that is not streamed", "a further token"
PAIR = "a stream of one token for which both legs go at once"
SETTLED = "what follows from one request of many that are over"

# Python functions of ours that are called, and C functions that ours call. About a tenth above what was measured; who
# makes a request cheaper lowers them.
BOUNDS: Final = {
    STREAM: (365, 330),
    WHOLE: (300, 240),
    PAIR: (408, 370),
    TOKEN: (1.6, 10.5),  # many, but of those that take no longer than a comparison
    SETTLED: (20.5, 31),
}
# Blocks of memory that are still there when a request is over and counted. A few caches may grow for other reasons.
LEFT_BLOCKS: Final = 1.0


@dataclass
class Cost:
    """How many calls there were, of one of many."""

    python: float = 0
    c: float = 0

    @classmethod
    def of(cls, calls: Calls, count: int) -> Cost:
        return cls(calls.functions.total() / count, calls.c / count)


async def per_request(lines: list[Line], **fields: Any) -> Cost:
    """Return the calls of one request, when everything has happened before.

    That is the least of some measurements, as some work is done only once in a while.
    """
    await ask(lines, 3, **fields)
    found = []
    for _ in range(MEASUREMENTS):
        with counting() as calls:
            await ask(lines, ROUNDS, **fields)
        found.append(Cost.of(calls, len(lines) * ROUNDS))
    return min(found, key=lambda cost: cost.python)


def check(what: str, cost: Cost) -> None:
    python, c = BOUNDS[what]
    told = f"{what} takes {cost.python:.1f} Python calls and {cost.c:.1f} C calls"
    assert cost.python <= python, told
    assert cost.c <= c, told
    assert cost.python > python / 2, f"{told}: lower the bound"


@pytest.mark.parametrize("what", [STREAM, WHOLE, PAIR])
async def test_plain_request_stays_below_its_bound_of_calls(deploy: Deploy, what: str) -> None:
    gateway = await deploy(connector="sglang_bootstrap" if what is PAIR else "vllm_pull")
    async with connected(gateway, 1) as lines:  # one by one: of many some would have to wait where the machine is busy
        check(what, await per_request(lines, stream=what is not WHOLE, max_tokens=1))


async def test_token_stays_below_its_bound_of_calls(deploy: Deploy) -> None:
    """Each token is read alone here. How the tokens of a socket are grouped into reads depends on the machine."""
    tokens = [token("content", number, ids=True) for number in range(9 + TOKENS)]
    engine = CannedEngine("both", [STREAM_HEAD, *tokens[:9]])
    gateway = await deploy(decoders=[engine], connector="plain")
    async with connected(gateway, 1) as (line,):
        line.send(raw(request(Api.CHAT, stream=True)))
        await line.has(b"word8")
        (connection,) = gateway.worker.upstream._busy
        with counting() as calls:
            for read in tokens[9:]:
                connection.data_received(read)
        last = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        connection.data_received(framed(last + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await line.answer()
        ((_, body, ending),) = line.received
    assert (body.count(" word"), ending) == (len(tokens), "whole")
    check(TOKEN, Cost.of(calls, TOKENS))


async def test_work_after_a_request_stays_below_its_bound_of_calls(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(
        logging.WARNING, "proxy"
    )  # lines are the tests' own handlers' work, if a test before asked for them
    gateway = await deploy()
    observers, ended = gateway.worker.request_observers, Ended()
    observers.add_listener(ended)
    async with connected(gateway, CONNECTIONS) as lines:
        await ask(lines, ROUNDS, stream=True, max_tokens=1)
        # All of them again at one time, so that the load of the machine does not matter.
        records = tuple(ended.records)
        with observers.collect_in_batches(lambda *_, **__: None), counting({BATCH}, None) as calls:
            for record in records:
                observers.end_record(record)
            observers.flush_batch()
    check(SETTLED, Cost.of(calls, len(records)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap"])
async def test_plain_request_leaves_no_memory_behind(
    deploy: Deploy, connector: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "proxy")  # it would keep every line, if a test before has asked for them
    gateway = await deploy(connector=connector)

    async def blocks(lines: list[Line]) -> int:
        await ask(lines, REQUESTS, stream=stream, max_tokens=1)
        gateway.worker.request_observers.flush_batch()
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
