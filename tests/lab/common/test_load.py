"""The load generator: answers, rates, and cancelled requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest

from lab.common.load import Answer, Client, Connections, Histogram, Load, ask, post

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = ROLE + TOKEN * 2 + USAGE % 2 + DONE


def whole(body: bytes, status: int = 200, *, is_whole: bool = True) -> Answer:
    return Answer(status, body, 0.0, None, 0.0, is_whole)


class Sink(asyncio.Transport):
    """A transport without a peer."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


@asynccontextmanager
async def serving(answer: bytes, *, closes: bool) -> AsyncIterator[tuple[int, list[int]]]:
    """Run a server that answers each request. Yields its port, and the number of requests per connection."""
    requests: list[int] = []
    handlers: list[asyncio.Task[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        requests.append(0)
        place = len(requests) - 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                requests[place] += 1
                writer.write(answer)
                if closes:
                    break
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], requests
        await asyncio.gather(*handlers)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (whole(STREAM), ""),
        (whole(STREAM, 503), "status 503"),
        (whole(STREAM, is_whole=False), "the connection was closed before the end of the answer"),
        (whole(STREAM.removesuffix(DONE)), "no [DONE]"),
        (whole(ROLE + b'data: {"error":{}}\n\n' + DONE), "error event"),
        (whole(ROLE + TOKEN + USAGE % 2 + DONE), "wrong number of tokens"),
        (whole(ROLE + TOKEN + DONE), "wrong number of tokens"),
    ],
)
def test_answer_reports_its_problem(answer: Answer, problem: str) -> None:
    assert answer.problem(has_usage=True) == problem


@pytest.mark.parametrize(
    ("reads", "gaps"),
    [([HEAD % len(STREAM) + STREAM], 0), ([HEAD % len(STREAM) + ROLE, TOKEN, TOKEN, USAGE % 2 + DONE], 1)],
)
async def test_client_records_first_token_and_gaps_between_reads(reads: list[bytes], gaps: int) -> None:
    histogram = Histogram()
    client = Client(histogram)
    client.connection_made(Sink())
    pending = client.ask(b"")
    for data in reads:
        client.data_received(data)
    answer = await pending
    assert answer.body == STREAM
    assert answer.first_token_at is not None
    assert answer.sent_at <= answer.first_token_at <= answer.ended_at
    assert sum(histogram.counts.values()) == gaps


async def test_cut_answer_has_the_received_part() -> None:
    async with serving(HEAD % 100 + ROLE, closes=True) as (port, _):
        answer = await ask(port, post(port, {}))
    assert (answer.status, answer.body, answer.is_whole) == (200, ROLE, False)


@pytest.mark.parametrize(("words", "expected"), [(b"", [3]), (b"Connection: close\r\n", [1, 1, 1])])
async def test_connections_are_kept_unless_the_server_closes(words: bytes, expected: list[int]) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + words + b"Content-Length: 0\r\n\r\n"
    async with serving(answer, closes=bool(words)) as (port, requests):
        connections = Connections(port)
        for _ in range(3):
            await connections.ask(post(port, {}))
        connections.close()
    assert requests == expected


@pytest.mark.parametrize("begin", [lambda load: load.at_rate(1000.0), lambda load: load.at_a_time(3)])
async def test_load_counts_answers_and_problems_and_awaits_the_last(
    begin: Callable[[Load], AbstractAsyncContextManager[None]],
) -> None:
    async def one(number: int) -> str:
        await asyncio.sleep(0)
        if number == 1:
            raise ConnectionResetError
        return "odd" if number == 2 else ""

    load = Load(one)
    async with begin(load):
        await load.have_ended(5)
    assert load.request_count == load.ended >= 5
    assert load.failures() == {"ConnectionResetError": 1, "odd": 1}


async def test_load_that_leaves_cancels_requests_in_flight() -> None:
    begun = asyncio.Event()

    async def forever(_: int) -> str:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return ""

    load = Load(forever)
    async with load.at_rate(0.01, leaves=True):
        await begun.wait()
    assert (load.request_count, load.ended) == (1, 0)
