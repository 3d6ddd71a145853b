"""What a streamed token costs in calls of Python functions: a price that can be told without a clock."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest

import proxy
from proxy.connectors.attempt import Attempt
from proxy.flow.assembly import Assembly
from proxy.flow.delivery import Delivery
from proxy.flow.relay import Relay, TokenClock
from proxy.observe.metrics import Metrics
from proxy.observe.record import RequestRecord
from proxy.observe.timeline import Timeline
from proxy.settings import Cost, Timeouts
from proxy.upstream import Response
from proxy.wire.openai import Api
from tests.asking import api_of, request
from tests.canned import data
from tests.flow.forwarding import Client, framed
from tests.fuzz.answers import Line, connected
from tests.fuzz.streams import Guard, NoHandoff
from tests.parsing import parse
from tests.upstream.raw import STREAM_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from proxy.flow.client import ClientStream
    from proxy.flow.unit_guard import UnitGuard

_OURS = str(Path(proxy.__file__).parent)


class Streamed(Client):
    """A ClientStream that is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.line = self.protocol = self


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Calls within the block of the gateway's functions, by their names."""
    calls: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def calls_for(reads: list[bytes], body: dict[str, Any], *, is_observed: bool) -> Counter[str]:
    """Calls for these reads from an engine; those before are the head and three tokens."""
    connection = connected(Line())
    response = Response(connection, lambda error: None)
    connection.begin(response, "/", b"", {}, answer_seconds=1.0)
    connection.data_received(STREAM_HEAD)
    whole = None if body["stream"] else Assembly()
    delivery = Delivery(parse(api_of(body), orjson.dumps(body), Cost()), is_observed=is_observed, whole=whole)
    attempt = Attempt(response, Timeline(), None, kv_handed_over=True, handoff=NoHandoff())
    client = None if whole else cast("ClientStream", Streamed())
    clock = TokenClock(RequestRecord("chat", "r"), Metrics())
    relay = Relay(attempt, delivery, cast("UnitGuard", Guard()), client, clock)
    running = asyncio.create_task(relay.run(Timeouts()))
    await asyncio.sleep(0)
    with calls_counted() as calls:
        for read in reads:
            connection.data_received(read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    connection.release()
    return calls


def token(field: str | None, number: int, ids: bool) -> bytes:
    text = f" word{number}"
    told: dict[str, Any] = {"text": text} if field is None else {"delta": {field: text}}
    told |= {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": [1000 + number] if ids else None}
    return framed(data({"id": "c", "object": "chunk", "created": 1, "choices": [told]}))


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("is_observed", [True, False])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (request(Api.CHAT, stream=True), "content"),
        (request(Api.CHAT, stream=True), "reasoning"),
        (request(Api.CHAT, stream=True, return_token_ids=True), "content"),
        (request(Api.COMPLETIONS, stream=True), None),
        (request(Api.CHAT, stream=False), "content"),
    ],
    ids=["chat", "reasoning", "with ids", "completion", "not streamed"],
)
async def test_a_token_costs_two_calls(body: dict[str, Any], field: str | None, is_observed: bool, ids: bool) -> None:
    """One where its bytes arrive, and one that passes them on. Another quarter times one gap in eight."""
    tokens = [token(field, number, ids) for number in range(73)]
    first = await calls_for(tokens[:9], body, is_observed=is_observed or not body["stream"])
    all_of_them = await calls_for(tokens, body, is_observed=is_observed or not body["stream"])
    calls = all_of_them - first
    assert (calls["data_received"], calls["take"]) == (64, 64)
    assert calls.total() <= 2.25 * 64, calls


async def test_tokens_that_arrive_together_cost_less_than_two_calls() -> None:
    tokens = [token("content", number, ids=True) for number in range(73)]
    together = [*tokens[:9], *(b"".join(tokens[at : at + 4]) for at in range(9, 73, 4))]
    body = request(Api.CHAT, stream=True)
    calls = await calls_for(together, body, is_observed=True) - await calls_for(tokens[:9], body, is_observed=True)
    assert calls.total() <= 2 * 64, calls
