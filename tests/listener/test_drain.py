"""Drain: what is in flight is counted, and what is cut off ends in an error, unless its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.common.errors import ShuttingDown
from proxy.listener import replies
from proxy.listener.drain import DrainManager
from proxy.observe.metrics import Metrics
from tests.asking import read, until

Client = TestClient[web.Request, web.Application]


class Work:
    """A route that never comes to its end, and what has happened to it."""

    def __init__(self, drain: DrainManager) -> None:
        self.drain = drain
        self.begun = 0
        self.ended: list[type[BaseException]] = []

    async def wait(self, request: web.Request) -> web.Response:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            self.ended.append(type(error))
            raise
        raise AssertionError("unreachable")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send an error inside a streamed answer, as the generation routes do."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        try:
            with self.drain:
                await self.wait(request)
        except ShuttingDown as error:
            await response.write(error.code.encode())
        return response


async def serve(drain: DrainManager, handler: Any) -> web.StreamResponse:
    """Run the middleware for a request in the current task."""
    request: Any = SimpleNamespace(task=asyncio.current_task())
    return await drain.count_while_answering(request, handler)


@pytest.fixture
def drain() -> DrainManager:
    return DrainManager()


@pytest.fixture
def work(drain: DrainManager) -> Work:
    return Work(drain)


@pytest.fixture
async def client(drain: DrainManager, work: Work) -> AsyncIterator[Client]:
    app = web.Application()
    replies.install_replies(app, Metrics())
    app.middlewares.append(drain.count_while_answering)
    app.add_routes([web.get("/wait", work.wait), web.get("/stream", work.stream)])
    async with TestClient(TestServer(app, handler_cancellation=True)) as client:
        yield client


async def test_request_cut_off_before_its_answer_gets_an_error(drain: DrainManager, work: Work, client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(client.get("/wait")) for _ in range(3)]
        await until(lambda: work.begun == 3, "three requests")
        assert drain.in_flight_count == 3
        assert drain.cut_off_all() == 3
    for task in asking:
        answer = task.result()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "draining"
    await drain.wait_until_idle()
    assert drain.in_flight_count == 0
    assert drain.cut_off_all() == 0


async def test_stream_cut_off_inside_its_answer_can_send_an_error(
    drain: DrainManager, client: Client, work: Work
) -> None:
    async with client.get("/stream") as response:
        await until(lambda: work.begun, "the answer to begin")
        drain.cut_off_all()
        assert await response.read() == b"first draining"


async def test_answer_cut_off_without_error_event_is_incomplete(drain: DrainManager) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        await asyncio.Event().wait()
        return response

    app = web.Application()
    replies.install_replies(app, Metrics())
    app.middlewares.append(drain.count_while_answering)
    app.add_routes([web.get("/", stream)])
    async with TestClient(TestServer(app, handler_cancellation=True)) as other, other.get("/") as response:
        await response.content.readany()
        drain.cut_off_all()
        assert not (await read(response)).is_whole


@pytest.mark.parametrize("times", [1, 2])
async def test_second_cut_off_cancels_no_task_twice(drain: DrainManager, times: int) -> None:
    """A handler that is cut off may wait a moment to write its error."""
    cancelled = 0

    async def handler(request: Any) -> web.Response:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            await asyncio.sleep(0)
            raise
        raise AssertionError("unreachable")

    task = asyncio.create_task(serve(drain, handler))
    await until(lambda: drain.in_flight_count, "the request")
    for _ in range(times):
        assert drain.cut_off_all() == 1
    with pytest.raises(ShuttingDown):
        await task
    assert cancelled == 1


async def test_drain_does_not_count_requests_of_disconnected_clients(drain: DrainManager) -> None:
    """A cancellation by another caller stays one, before and after the cut-off."""

    async def handler(request: Any) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    for is_ours_first in (True, False):
        async with AsyncExitStack() as stack:
            task = asyncio.create_task(serve(drain, handler))
            stack.callback(task.cancel)
            await until(lambda: drain.in_flight_count, "the request")
            for is_ours in (is_ours_first, not is_ours_first):
                if is_ours:
                    drain.cut_off_all()
                else:
                    task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert drain.in_flight_count == drain.cut_off_all() == 0


async def test_client_disconnect_during_the_error_stays_a_cancellation(drain: DrainManager) -> None:
    async def handler(request: Any) -> web.Response:
        with pytest.raises(ShuttingDown), drain:
            await asyncio.Event().wait()
        is_told.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    is_told = asyncio.Event()
    task = asyncio.create_task(serve(drain, handler))
    await until(lambda: drain.in_flight_count, "the request")
    drain.cut_off_all()
    await is_told.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_client_disconnect_cancels_the_handler_during_a_drain(
    drain: DrainManager, work: Work, client: Client
) -> None:
    task = asyncio.create_task(client.get("/wait"))
    await until(lambda: work.begun, "the request")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: work.ended, "the end of the work")
    assert work.ended == [asyncio.CancelledError]
    await drain.wait_until_idle()
