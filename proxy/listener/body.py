"""Reads the body of a client request, with limits for its size and time.

`100 Continue` is sent only when the body is needed, so requests that are rejected before receive none. At most the
limit and one piece of a body are in memory. A body that arrived with its headers needs no timer.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy.common.errors import GatewayError
from proxy.wire.weight import (
    ALWAYS_LIGHT_BYTES,
    LONG_BYTES,
    bound_element_counts,
    count_object_bytes,
    count_weight,
    count_wide_text_bytes,
    estimate_weight,
    is_light_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Listen

AWAITS_CONTINUE: Final = web.RequestKey("awaits_continue", bool)
"""Key of a flag in a request: the client sends its body only after `100 Continue`. The listener sets it."""

# A slow start is not an attack: TCP windows grow slowly, and the event loop may be late.
_GRACE_SECONDS: Final = 5.0
# Size of one read of uvloop. Twice this is buffered before flow control slows the client down.
_PIECE_BYTES: Final = 256 * 1024
# A body with a Content-Length of at most this is received, and counted, as a whole.
_WHOLE_BYTES: Final = 1024 * 1024


async def read_json(
    request: web.Request, listen_options: Listen, on_bytes: Callable[[int], object], *, parse_count: int = 1
) -> bytes:
    """Return the body of a JSON request as `read_body` does. Raises GatewayError 413 if parsing would take too long.

    Work of milliseconds is split, so that tokens of other requests pass in between.

    Args:
        request: The request.
        listen_options: The limits.
        on_bytes: Called with an upper bound of the memory that the body may take, if it is large. See
            `body_memory_bytes`.
        parse_count: How often the body is parsed without a pause, for example 2 if it is translated and parsed again.
    """
    raw = await read_body(request, listen_options, on_bytes)
    most = listen_options.max_body_elements // parse_count
    if len(raw) <= ALWAYS_LIGHT_BYTES or is_light_json(raw, most):
        return raw
    if len(raw) <= LONG_BYTES:
        elements, memory_bytes = bound_element_counts(raw)
        if elements <= most:
            on_bytes(len(raw) + memory_bytes)
            return raw
    weight = estimate_weight(raw)
    if weight.elements > most:
        await asyncio.sleep(0)
        weight = count_weight(raw, most)
        if weight.elements > most:
            raise _make_too_many_elements_error(most)
    on_bytes(len(raw) + weight.memory_bytes)
    if len(raw) > LONG_BYTES:
        await asyncio.sleep(0)
    return raw


def body_memory_bytes(raw_body: bytes, parsed_values: object) -> int:
    """Return the memory of a body with its values that have become Python objects."""
    if len(raw_body) <= ALWAYS_LIGHT_BYTES:
        return len(raw_body)
    return len(raw_body) + count_object_bytes(raw_body, parsed_values) + count_wide_text_bytes(raw_body, parsed_values)


async def read_body(
    request: web.Request,
    listen_options: Listen,
    on_bytes: Callable[[int], object] | None = None,
    *,
    size_option: str | None = "listen.max_body_bytes",
) -> bytes:
    """Read the whole body. Raises GatewayError (413, 415, 408), and ConnectionError if the client disconnected.

    `on_bytes` is called with the number of bytes so far, and its exceptions are raised. `size_option` is the setting
    that allows longer bodies, for the message; None: there is none.
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
            return await _read_body(request, listen_options, on_bytes, size_option)
        body = content.read_nowait()
    except ConnectionError:
        raise
    except OSError as lost:  # connections also end with other errors, such as timeouts
        raise ConnectionResetError("the client disconnected") from lost
    if len(body) > listen_options.max_body_bytes:
        raise _make_too_large_error(listen_options, size_option)
    if on_bytes is not None:
        on_bytes(len(body))
    return body


def deadline_seconds(received_bytes: int, listen_options: Listen) -> float:
    """Return the seconds from the start of reading, within which more than `received_bytes` must arrive.

    At this time the average rate falls below `body_bytes_per_second`. It is at least 5 s and at most `body_seconds`.
    """
    if not listen_options.body_bytes_per_second:
        return listen_options.body_seconds
    return min(max(_GRACE_SECONDS, received_bytes / listen_options.body_bytes_per_second), listen_options.body_seconds)


async def _read_body(
    request: web.Request, listen_options: Listen, on_bytes: Callable[[int], object] | None, size_option: str | None
) -> bytes:
    announced_bytes = request.content_length
    if announced_bytes is not None and announced_bytes > listen_options.max_body_bytes:
        raise _make_too_large_error(listen_options, size_option)
    if request.transport is None:
        raise ConnectionResetError("the client disconnected")
    if AWAITS_CONTINUE in request:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if announced_bytes is not None and announced_bytes <= _WHOLE_BYTES:
        return await _read_whole(request, announced_bytes, listen_options, on_bytes)
    content = request.content
    content.set_read_chunk_size(_PIECE_BYTES)
    body = BytesIO()  # returns its bytes without a copy
    received_bytes = 0
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started + deadline_seconds(0, listen_options)) as limit:
            while piece := await content.readany():
                received_bytes += len(piece)
                if received_bytes > listen_options.max_body_bytes:
                    raise _make_too_large_error(listen_options, size_option)
                if on_bytes is not None:
                    on_bytes(received_bytes)
                body.write(piece)
                limit.reschedule(started + deadline_seconds(received_bytes, listen_options))
    except TimeoutError:
        if not limit.expired():
            raise  # of the connection
        raise _make_too_slow_error() from None
    return body.getvalue()


async def _read_whole(
    request: web.Request, announced_bytes: int, listen_options: Listen, on_bytes: Callable[[int], object] | None
) -> bytes:
    """Read a body of a known length. The task wakes up once, and the parts are joined once."""
    if on_bytes is not None:
        on_bytes(announced_bytes)
    content = request.content
    content.set_read_chunk_size(announced_bytes)
    request.protocol.resume_reading()  # aiohttp may have paused at its lower limit
    if (lost := content.exception()) is not None:
        raise lost
    loop = asyncio.get_running_loop()
    started = loop.time()
    while (until := started + deadline_seconds(content.total_bytes, listen_options)) > loop.time():
        try:
            async with asyncio.timeout_at(until) as limit:
                await content.wait_eof()
            return content.read_nowait()
        except TimeoutError:
            if not limit.expired():
                raise  # of the connection
    raise _make_too_slow_error()


def _make_too_slow_error() -> GatewayError:
    return GatewayError("the body of the request did not arrive in time", code="slow_body", status=408)


def _make_too_large_error(listen_options: Listen, size_option: str | None) -> GatewayError:
    message = f"the request body is larger than the {listen_options.max_body_bytes} bytes this gateway accepts"
    if size_option is not None:
        message += f" ({size_option})"
    return GatewayError(message, code="request_too_large", status=413)


def _make_too_many_elements_error(max_elements: int) -> GatewayError:
    message = (
        f"the request body has more than the {max_elements} elements this gateway accepts "
        "(listen.max_body_elements): numbers "
        "and literals count one each, strings and names 8, arrays and objects 16, and escapes in strings one"
    )
    return GatewayError(message, code="request_too_large", status=413)
