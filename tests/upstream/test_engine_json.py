"""One question to an engine: what comes back, and what is said when nothing does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from proxy.common.errors import Failure
from proxy.upstream import engine_json
from proxy.upstream.engine_json import EngineRequest, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Of an engine that answers some paths well."""

    async def good(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.18.1"}, headers={"Server": "engine"})

    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(body=b"<html>", status=418)

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/good")

    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def told(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.query["a"] == "b" and await request.read() == b"{}" else 400)

    app = web.Application()
    app.add_routes([web.get(f"/{answer.__name__}", answer) for answer in (good, nonsense, elsewhere, never)])
    app.add_routes([web.post("/told", told)])
    async with TestServer(app, host="127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_an_answer_comes_back_whole_with_whatever_status(session: aiohttp.ClientSession, url: str) -> None:
    good = await engine_json.get(session, url, "/good", 5.0)
    assert (good.status, good.headers["Server"], good.json) == (200, "engine", {"version": "0.18.1"})
    nonsense = await engine_json.get(session, url, "/nonsense", 5.0)
    assert (nonsense.status, nonsense.body, nonsense.json_or_none) == (418, b"<html>", None)
    with pytest.raises(ValueError, match="unexpected character"):
        _ = nonsense.json
    assert await engine_json.get_status(session, url, "/nonsense", 5.0) == 418


async def test_nothing_is_followed(session: aiohttp.ClientSession, url: str) -> None:
    assert (await engine_json.get(session, url, "/elsewhere", 5.0)).status == 302


async def test_what_is_told_arrives(session: aiohttp.ClientSession, url: str) -> None:
    asked = EngineRequest(path="/told", query=[("a", "b")], headers={}, body=b"{}")
    status = await engine_json.post_status(session, url, asked, timeout_seconds=5.0, connect_seconds=5.0)
    assert status == 200


async def test_no_answer_says_why(session: aiohttp.ClientSession, url: str) -> None:
    with pytest.raises(EngineRequestError, match=r"^/never did not answer within 0.05 s$") as late:
        await engine_json.get(session, url, "/never", 0.05)
    with pytest.raises(EngineRequestError, match=r"^/good failed \(ClientPayloadError\)$") as long:
        await engine_json.get(session, url, "/good", 5.0, max_bytes=3)
    with pytest.raises(EngineRequestError, match=r"^cannot connect \(.*refused.*\)$") as refused:
        await engine_json.get(session, f"http://127.0.0.1:{unused_port()}", "/good", 5.0)
    with pytest.raises(EngineRequestError, match=r"^/good failed \(") as nowhere:
        await engine_json.get_status(session, "http://a..b:1", "/good", 5.0)
    assert [error.value.failure for error in (late, long, refused, nowhere)] == [
        Failure.TIMEOUT,
        Failure.BAD_ANSWER,
        Failure.CONNECT,
        Failure.BAD_ANSWER,
    ]
    assert "refused" in refused.value.reason
