"""The calls of Python functions that a streamed token costs, measured without a clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import orjson
import pytest

import proxy
from proxy.connectors.legs import Attempt
from proxy.gateway.assembly import StreamAssembly
from proxy.gateway.client_writer import ClientWriter
from proxy.gateway.delivery import Delivery
from proxy.gateway.relay import Relay, TokenClock
from proxy.observe.metrics import Metrics
from proxy.observe.record import RequestRecord
from proxy.observe.timeline import Timeline
from proxy.settings import Cost
from proxy.upstream import EngineConnection, Response
from proxy.wire.openai import Api
from tests.asking import api_of, request
from tests.fuzz.answers import Line, connected
from tests.fuzz.streams import NoHandoff, Owner
from tests.gateway.forwarding import Client, token
from tests.parsing import parse
from tests.upstream.raw import STREAM_HEAD

_OURS = str(Path(proxy.__file__).parent)


class Streamed(Client):
    """A ClientWriter that is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_output = self.connection = self
        self.gathers_tokens = True


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Count the calls of the gateway's functions in the block by name."""
    calls: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class EngineLine(Line):
    """A transport whose reading can be paused."""

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is."""


async def calls_for(
    reads: list[bytes],
    body: dict[str, Any],
    *,
    is_observed: bool,
    then: Callable[[EngineConnection, Streamed], None] | None = None,
) -> Counter[str]:
    """Count the calls for these reads from an engine, after a head. `then`: a function to call next."""
    connection = connected(EngineLine())
    response = Response(connection, lambda error: None)
    connection.begin_exchange(response, "/", b"", {}, answer_seconds=1.0)
    connection.data_received(STREAM_HEAD)
    whole = None if body["stream"] else StreamAssembly()
    delivery = Delivery(parse(api_of(body), orjson.dumps(body), Cost()), is_observed=is_observed, collector=whole)
    attempt = Attempt(response, Timeline(), None, has_kv_from_prefiller=True, handoff=NoHandoff())
    client = None if whole else cast("ClientWriter", Streamed())
    clock = TokenClock(RequestRecord("chat", "r"), Metrics())
    relay = Relay(attempt, delivery, Owner(), client, clock, idle_seconds=1.0)
    response.attach_sink(relay)
    with calls_counted() as calls:
        for read in reads:
            connection.data_received(read)
    if then is not None:
        then(connection, cast("Streamed", client))
    relay.stop_reading()
    connection.release_exchange()
    return calls


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
@pytest.mark.interpreted
async def test_token_costs_one_call(body: dict[str, Any], field: str | None, is_observed: bool, ids: bool) -> None:
    """It is the call for the received bytes. Timing and notes of tokens cost another half call."""
    tokens = [token(field, number, ids=ids) for number in range(73)]
    first = await calls_for(tokens[:9], body, is_observed=is_observed or not body["stream"])
    all_of_them = await calls_for(tokens, body, is_observed=is_observed or not body["stream"])
    calls = all_of_them - first
    assert calls["data_received"] == 64
    assert calls.total() <= 1.6 * 64, calls


@pytest.mark.interpreted
async def test_tokens_that_arrive_together_cost_less_than_two_calls() -> None:
    tokens = [token("content", number, ids=True) for number in range(73)]
    together = [*tokens[:9], *(b"".join(tokens[at : at + 4]) for at in range(9, 73, 4))]
    body = request(Api.CHAT, stream=True)
    calls = await calls_for(together, body, is_observed=True) - await calls_for(tokens[:9], body, is_observed=True)
    assert calls.total() <= 2 * 64, calls


@pytest.mark.interpreted
async def test_slow_client_pauses_the_engine_at_once() -> None:
    tokens = [token("content", number, ids=True) for number in range(9)]

    def fill(connection: EngineConnection, client: Streamed) -> None:
        assert not connection.is_reading_paused
        assert client.on_write_buffer_full is not None
        client.on_write_buffer_full()
        assert connection.is_reading_paused

    await calls_for(tokens, request(Api.CHAT, stream=True), is_observed=True, then=fill)


@pytest.mark.interpreted
async def test_next_answer_on_a_connection_does_not_go_to_the_client_of_the_last() -> None:
    """Though its tokens look the same."""
    tokens = [token("content", number, ids=True) for number in range(9)]
    client_of: list[Streamed] = []

    def begin_another(connection: EngineConnection, client: Streamed) -> None:
        client_of.append(client)
        before = len(client.written)
        connection.begin_exchange(Response(connection, lambda error: None), "/", b"", {}, answer_seconds=1.0)
        connection.data_received(b"".join([STREAM_HEAD, *tokens]))
        for read in tokens:
            connection.data_received(read)
        assert len(client.written) == before

    await calls_for(tokens, request(Api.CHAT, stream=True), is_observed=True, then=begin_another)
    assert client_of[0].written
