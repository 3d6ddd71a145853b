"""The body of a client's request: all of it, in time, and no more than is allowed.

`100 Continue` is only sent when a body is wanted, so whatever is refused before was refused without it. What is held of
a body is never more than the limit and one piece; a body that came with its headers costs no timer.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.common.errors import GatewayError
from proxy.wire.weight import LONG_BYTES, SLIGHT_BYTES, bounds, is_light, object_bytes, weigh, weigh_closely, wide_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Listen

AWAITS_CONTINUE: Final = web.RequestKey("awaits_continue", bool)
"""Noted by the front where a client sends its body only after `100 Continue`."""

# A slow start is no attack: TCP's windows open, and the event loop may be late itself.
_GRACE_SECONDS: Final = 5.0
# Twice this is buffered before the client is held back. uvloop reads so much at a time.
_PIECE_BYTES: Final = 256 * 1024
# A body that is told to be no longer is waited for, and accounted for, as a whole.
_WHOLE_BYTES: Final = 1024 * 1024


async def read_json(request: web.Request, listen: Listen, grow: Callable[[int], object], *, readings: int = 1) -> bytes:
    """As `read_body`, for a body that is to be read as JSON: one that would take too long is refused with 413.

    `grow` is called with the most that the body may take in memory, if that is much; for the rest see `memory_bytes`.
    What takes milliseconds is done piece by piece, so that tokens of others pass in between. `readings`: how many times
    the time of one reading the body takes in one go, as a body does that is translated and read again.
    """
    raw = await read_body(request, listen, grow)
    most = listen.max_body_elements // readings
    if len(raw) <= SLIGHT_BYTES or is_light(raw, most):
        return raw
    if len(raw) <= LONG_BYTES:
        elements, memory_bytes = bounds(raw)
        if elements <= most:
            grow(len(raw) + memory_bytes)
            return raw
    weight = weigh(raw)
    if weight.elements > most:
        await asyncio.sleep(0)
        weight = weigh_closely(raw, most)
        if weight.elements > most:
            raise _too_heavy(most)
    grow(len(raw) + weight.memory_bytes)
    if len(raw) > LONG_BYTES:
        await asyncio.sleep(0)
    return raw


def memory_bytes(raw: bytes, values: object) -> int:
    """What a body takes in memory of which these values were read, as a list."""
    if len(raw) <= SLIGHT_BYTES:
        return len(raw)
    return len(raw) + object_bytes(raw, values) + wide_bytes(raw, values)


async def read_body(
    request: web.Request,
    listen: Listen,
    grow: Callable[[int], object] | None = None,
    *,
    option: str | None = "listen.max_body_bytes",
) -> bytes:
    """The whole body, once. Raises GatewayError (413, 415, 408), and ConnectionError when the client has left.

    `grow` is called with the bytes there are so far; what it raises is raised. `option`: what an operator sets to allow
    longer ones; None: nothing.
    """
    coding = request.headers.get(hdrs.CONTENT_ENCODING)
    if coding is not None and coding.lower() != "identity":
        raise GatewayError(
            "the body has a Content-Encoding, which this gateway does not support: send it uncompressed",
            code="content_encoding",
            status=415,
        )
    content = request.content
    try:
        if not content.is_eof():
            return await _read_on(request, listen, grow, option)
        body = content.read_nowait()
    except ConnectionError:
        raise
    except OSError as lost:  # a connection can end by other errors, too: no route, timed out
        raise ConnectionResetError("the client has left") from lost
    if len(body) > listen.max_body_bytes:
        raise _too_large(listen, option)
    if grow is not None:
        grow(len(body))
    return body


def deadline_seconds(received_bytes: int, listen: Listen) -> float:
    """When, after the first look for the body, more of it than this must have arrived.

    That is when the average falls below `body_bytes_per_second`, but not before the grace ends, and at the latest after
    `body_seconds`.
    """
    if not listen.body_bytes_per_second:
        return listen.body_seconds
    return min(max(_GRACE_SECONDS, received_bytes / listen.body_bytes_per_second), listen.body_seconds)


async def _read_on(
    request: web.Request, listen: Listen, grow: Callable[[int], object] | None, option: str | None
) -> bytes:
    told_bytes = request.content_length
    if told_bytes is not None and told_bytes > listen.max_body_bytes:
        raise _too_large(listen, option)
    if request.transport is None:
        raise ConnectionResetError("the client has left")
    if AWAITS_CONTINUE in request:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if told_bytes is not None and told_bytes <= _WHOLE_BYTES:
        return await _read_whole(request, told_bytes, listen, grow)
    content = request.content
    content.set_read_chunk_size(_PIECE_BYTES)
    body = BytesIO()  # gives its bytes away without a copy
    received_bytes = 0
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started + deadline_seconds(0, listen)) as limit:
            while piece := await content.readany():
                received_bytes += len(piece)
                if received_bytes > listen.max_body_bytes:
                    raise _too_large(listen, option)
                if grow is not None:
                    grow(received_bytes)
                body.write(piece)
                limit.reschedule(started + deadline_seconds(received_bytes, listen))
    except TimeoutError:
        if not limit.expired():
            raise  # the connection's own
        raise _too_slow() from None
    return body.getvalue()


async def _read_whole(
    request: web.Request, told_bytes: int, listen: Listen, grow: Callable[[int], object] | None
) -> bytes:
    """A body of this length. Nobody wakes up for a part of it, and its parts are joined once."""
    if grow is not None:
        grow(told_bytes)
    content = request.content
    content.set_read_chunk_size(told_bytes)
    request.protocol.resume_reading()  # aiohttp may have stopped, as it did not know that so much is wanted
    if (lost := content.exception()) is not None:
        raise lost
    loop = asyncio.get_running_loop()
    started = loop.time()
    while (until := started + deadline_seconds(content.total_bytes, listen)) > loop.time():
        try:
            async with asyncio.timeout_at(until) as limit:
                await content.wait_eof()
            return content.read_nowait()
        except TimeoutError:
            if not limit.expired():
                raise  # the connection's own
    raise _too_slow()


def _too_slow() -> GatewayError:
    return GatewayError("the body of the request did not arrive in time", code="slow_body", status=408)


def _too_large(listen: Listen, option: str | None) -> GatewayError:
    message = f"the request body is larger than the {listen.max_body_bytes} bytes this gateway accepts"
    if option is not None:
        message += f" ({option})"
    return GatewayError(message, code="request_too_large", status=413)


def _too_heavy(most: int) -> GatewayError:
    message = (
        f"the request body has more than the {most} elements this gateway accepts (listen.max_body_elements): numbers "
        "and literals count one each, strings and names 8, arrays and objects 16, and escapes in strings one"
    )
    return GatewayError(message, code="request_too_large", status=413)
