"""A connection that aiohttp has taken returns to the fast path with the next plain request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pytest

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.gateway.roads import Roads
from tests.talking import Clients, raw

STREAM: Final = request(Api.CHAT, stream=True)
WHOLE: Final = request(Api.COMPLETIONS, stream=False)
OFF: Final[dict[str, Any]] = {"resume": {"mode": "off"}}
MODELS: Final = b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nX-Request-Id: r\r\n\r\n"
NOWHERE: Final = b"POST /nowhere HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\nX-Request-Id: r\r\n\r\n"
HALF: Final = b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nX-A: "
HIDDEN: Final = raw(WHOLE, X_Request_Id="hidden")


@pytest.mark.parametrize(
    "odd",
    [
        MODELS,
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Request-Id: r\r\n\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-Request-Id: r\r\n\r\n{}",
        raw({**WHOLE, "n": 0}, X_Request_Id="r"),
        raw(WHOLE | {"padding": "x" * 100_000, "n": 0}, X_Request_Id="r"),
    ],
)
@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_next_plain_request_uses_the_fast_path(roads: Roads, odd: bytes, body: dict[str, Any]) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number in range(3):
            line.send(odd)
            await line.answer()
            await line.ask(body, X_Request_Id=f"r-{number}")
            await line.ask(body, X_Request_Id=f"r-{number}-again")

    await roads.take(talk, is_fast=6, settings=OFF)


# Pieces of bytes, and the number of answers before the next piece. The last piece looks like a plain request.
UNCERTAIN: Final = {
    "in the middle of a header": [
        (MODELS + HALF, 1),
        (HIDDEN + b"\r\n\r\n", 1),
    ],
    "in the middle of a body": [(MODELS + NOWHERE % len(HIDDEN), 2), (HIDDEN, 0), (MODELS, 1)],
    "behind a blank line": [(MODELS + b"\r\n", 1), (HIDDEN, 1)],
    "behind a separate blank line": [(MODELS, 1), (b"\r\n", 0), (HIDDEN, 1)],
    "behind two pieces": [(MODELS[:-2], 0), (MODELS[-2:], 1), (HIDDEN, 1)],
    "behind two more pieces": [(MODELS, 1), (MODELS[:40], 0), (MODELS[40:], 1), (HIDDEN, 1)],
    "behind two requests at once": [(MODELS, 1), (MODELS + MODELS, 2), (HIDDEN, 1)],
    "behind chunks": [(MODELS.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost") + b"0\r\n\r\n", 1), (HIDDEN, 1)],
    "behind a body in pieces": [(MODELS.replace(b"Host", b"Content-Length: 3\r\nHost"), 0), (b"abc", 1), (HIDDEN, 1)],
}


@pytest.mark.parametrize("pieces", UNCERTAIN.values(), ids=UNCERTAIN)
async def test_connection_stays_with_aiohttp_when_no_request_certainly_begins(
    roads: Roads, pieces: Sequence[tuple[bytes, int]]
) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for piece, answers in pieces:
            line.send(piece)
            for _ in range(answers):
                await line.answer()
            for _ in range(20):
                await asyncio.sleep(0)

    await roads.take(talk, is_fast=0, settings=OFF)


async def test_connection_stays_with_aiohttp_after_several_changes(roads: Roads) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number in range(6):
            await line.ask({**WHOLE, "n": 0}, X_Request_Id=f"r-{number}")
        await line.ask(WHOLE, X_Request_Id="r-6")

    await roads.take(talk, is_fast=0, settings=OFF)


async def test_client_that_does_not_read_while_its_connection_changes(roads: Roads) -> None:
    async def talk(clients: Clients) -> None:
        line = await clients.connect()
        for number in range(3):
            line.send(MODELS)
            await until(lambda: not clients.gateway.leaks(), "the answer")
            line.send(raw(WHOLE, X_Request_Id=f"r-{number}"))
            await line.answer()
            await line.answer()

    await roads.take(talk, settings=OFF)
