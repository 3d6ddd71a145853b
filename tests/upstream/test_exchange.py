"""Test the calls that an Exchange receives from its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from proxy.common.errors import Failure, UpstreamError
from proxy.upstream import EngineConnection, Upstream
from tests.upstream.raw import LONG, STREAM_HEAD, Link, chunk, engine


class Recorder:
    """Exchange that records its calls. `then` is called with the name of each call."""

    def __init__(self, then: Callable[[str], None] = lambda call: None) -> None:
        self.told: list[tuple[object, ...]] = []
        self.over = asyncio.Event()
        self._then = then

    def on_answer_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.told.append(("answered", status, dict(headers)))
        self._then("answered")

    def on_body_data(self, data: bytes) -> bool:
        self.told.append(("received", data))
        self._then("received")
        return True

    def can_move_to_other_backend(self) -> bool:
        return True

    def on_body_end(self, error: UpstreamError | None) -> None:
        self.told.append(("ended", error and error.failure))
        self.over.set()
        self._then("ended")


def begin(connection: EngineConnection, exchange: Recorder) -> None:
    connection.begin_exchange(
        exchange, "/v1/completions", [b"{", b' "', b'":0}'], {"x-request-id": "r"}, answer_seconds=LONG
    )


async def test_exchange_receives_its_answer_as_it_arrives(upstream: Upstream) -> None:
    read = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer(STREAM_HEAD + chunk(b"one"))
        await read.wait()
        link.send(chunk(b"two") + b"0\r\n\r\n")

    async with engine(script) as backend:
        connection = await upstream.open_connection(backend)
        exchange = Recorder(lambda call: read.set() if call == "received" else None)
        begin(connection, exchange)
        await exchange.over.wait()
        assert exchange.told == [
            ("answered", 200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"}),
            ("received", b"one"),
            ("received", b"two"),
            ("ended", None),
        ]
        assert upstream.busy_connections == 1
        upstream.return_connection(connection)
        assert upstream.take_idle_connection(backend) is connection
        upstream.return_connection(connection)


async def test_next_exchange_may_begin_where_one_ends(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        for _ in range(2):
            await link.answer()

    async with engine(script) as backend:
        connection = await upstream.open_connection(backend)
        second = Recorder()

        def go_on(call: str) -> None:
            if call == "ended":
                upstream.return_connection(connection)
                assert upstream.take_idle_connection(backend) is connection
                begin(connection, second)

        first = Recorder(go_on)
        begin(connection, first)
        await second.over.wait()
        assert (
            [told[0] for told in first.told] == [told[0] for told in second.told] == ["answered", "received", "ended"]
        )
        upstream.return_connection(connection)


async def test_exchange_without_an_answer_only_ends(upstream: Upstream) -> None:
    async def script(link: Link) -> None:
        await link.request()

    async with engine(script) as backend:
        connection = await upstream.open_connection(backend)
        exchange = Recorder()
        begin(connection, exchange)
        await exchange.over.wait()
        assert exchange.told == [("ended", Failure.RESET)]
        upstream.return_connection(connection)


@pytest.mark.parametrize("last", ["answered", "received"])
async def test_released_exchange_gets_no_further_calls(upstream: Upstream, last: str) -> None:
    gone = asyncio.Event()

    async def script(link: Link) -> None:
        await link.answer()
        await link.left()
        gone.set()

    async with engine(script) as backend:
        connection = await upstream.open_connection(backend)
        exchange = Recorder(lambda call: upstream.return_connection(connection) if call == last else None)
        begin(connection, exchange)
        await gone.wait()
        await asyncio.sleep(0)  # one turn of the loop to report the lost connection
        assert connection.is_closed
        assert exchange.told[-1][0] == last
