"""Reads requests and writes answers: JSON bodies, server-sent events, and broken connections.

Events go to the transport within the scheduler's step, without a task switch. If the client reads too slowly, deltas
are merged, as in the engine's output collector, instead of being buffered.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

    from proxy.sim.dialects.endpoints import GenerationEndpoint
    from proxy.sim.dialects.vllm_answers import Answer
    from proxy.sim.engine.faults import Plan
    from proxy.sim.model.request import Delta, EngineError


_HIGH_WATER_BYTES = 64 * 1024
_RESET_AFTER_SECONDS = 0.02

CUT_CONNECTION_KEY = web.RequestKey("was_cut", bool)
"""Marks a request whose connection the engine has broken on purpose."""


def reset_connection(request: web.Request) -> None:
    """Close the connection with a TCP reset, so that the client sees an error instead of an end."""
    request[CUT_CONNECTION_KEY] = True
    if request.transport is not None:
        reset_transport(request.transport)


def reset_connection_soon(request: web.Request) -> None:
    """Reset the connection a little later.

    An immediate reset would discard sent data that the client has not read yet.
    """
    asyncio.get_running_loop().call_later(_RESET_AFTER_SECONDS, reset_connection, request)


def reset_transport(transport: asyncio.WriteTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


async def hang_forever() -> None:
    """Wait until the client gives up, which cancels the handler."""
    await asyncio.get_running_loop().create_future()


class EventStream:
    """Writes one streamed answer.

    The generation calls `on_delta`; `close` sends the remaining deltas and the end. The first delta opens the stream if
    it is not open.
    """

    def __init__(self, request: web.Request, answer: Answer, plan: Plan, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers)
        self._request = request
        self._answer = answer
        self._plan = plan
        self._writer: AbstractStreamWriter | None = None
        self._held_events: dict[int, Delta] = {}
        self._drained: asyncio.Task[None] | None = None
        self._batch: list[bytes] = []
        self._pieces: deque[bytes] = deque()
        self._opening: asyncio.Task[None] | None = None
        self._early: list[Delta] = []
        self._is_left = False
        self._pumped: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Send the status line. vLLM does this before the first token."""
        self.response.content_type = "text/event-stream"
        self.response.charset = "utf-8"
        self.response.enable_chunked_encoding()
        self._writer = await self.response.prepare(self._request)

    def on_delta(self, delta: Delta) -> None:
        if self._is_left:
            return
        if self._writer is None:
            self._early.append(delta)
            self._opening = self._opening or asyncio.create_task(self._open_late())
        elif self._drained is None:
            self._send_events(self._answer.events(delta))
        elif delta.index in self._held_events:
            self._held_events[delta.index].merge(delta)
        else:
            self._held_events[delta.index] = delta

    async def _open_late(self) -> None:
        await self.open()
        early, self._early = self._early, []
        for delta in early:
            self.on_delta(delta)

    async def settle(self) -> None:
        """Wait until all deltas so far are converted to events."""
        if self._opening is not None:
            await self._opening

    async def close(self, closing: list[bytes]) -> None:
        await self.settle()
        if self._writer is None:
            await self.open()
        while self._drained is not None:
            await self._drained
        self._send_events(closing)
        self._write_batch()
        if self._pumped is not None:
            await self._pumped
        await self.response.write_eof()

    def stop(self) -> None:
        """End all tasks of the stream. Called when its handler ends."""
        self._is_left = True
        for task in (self._opening, self._drained):
            if task is not None:
                task.cancel()
        self._pieces.clear()

    def _send_events(self, events: list[bytes]) -> None:
        if not self._plan:
            self._write_events(events)
            return
        for event in events:
            if "comments" in self._plan:
                event = b": keep-alive\n\n" + event
            if "crlf" in self._plan:
                event = event.replace(b"\n", b"\r\n")
            self._batch.append(event)
            rule = self._plan.get("coalesce")
            if rule is None or len(self._batch) >= rule.size:
                self._write_batch()

    def _write_batch(self) -> None:
        batch, self._batch = self._batch, []
        if len(batch) > 1:
            batch = [b"".join(batch)]
        self._write_events(batch)

    def _write_events(self, events: list[bytes]) -> None:
        transport = self._request.transport
        if not events or transport is None or transport.is_closing():
            return
        data = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])
        if rule := self._plan.get("split_bytes"):
            self._pieces.extend([data[at : at + rule.size] for at in range(0, len(data), rule.size)])
            self._write_pieces()
            return
        transport.write(data)
        if transport.get_write_buffer_size() > _HIGH_WATER_BYTES and self._drained is None:
            self._drained = asyncio.create_task(self._drain())

    def _write_pieces(self) -> None:
        """Write one piece in each turn of the event loop, so that the client gets separate TCP segments."""
        if self._pumped is None:
            self._pumped = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._write_piece)

    def _write_piece(self) -> None:
        assert self._pumped is not None
        transport = self._request.transport
        if self._pieces and transport is not None and not transport.is_closing():
            transport.write(self._pieces.popleft())
            asyncio.get_running_loop().call_soon(self._write_piece)
        else:
            if not self._pumped.done():  # the reader of the last piece may be gone
                self._pumped.set_result(None)
            self._pumped = None

    async def _drain(self) -> None:
        assert self._writer is not None
        await self._writer.drain()
        self._drained = None
        held, self._held_events = self._held_events, {}
        for delta in held.values():
            self.on_delta(delta)


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, headers=headers, content_type="application/json")


def refuse_request(error: EngineError, endpoint: GenerationEndpoint | None = None) -> web.Response:
    return json_response(error.body() if endpoint is None else endpoint.refusal(error), error.status)


async def read_json(request: web.Request) -> tuple[Any, int]:
    """Return the parsed body (None if it is not JSON) and its size."""
    raw = await request.read()
    try:
        return orjson.loads(raw), len(raw)
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw), len(raw)  # as engines read all requests
        except (ValueError, RecursionError):
            return None, len(raw)
