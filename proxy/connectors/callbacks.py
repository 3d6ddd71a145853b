"""Callbacks of decoders: for which attempts they are accepted, and what they say.

A callback is answered at once and counts once. It is refused when no attempt waits for it, or when it is not what a
decoder posts (MooncakeLayerwiseConnector.update_state_after_alloc): what a stranger sends never reaches an engine.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.common.errors import BadRequest, GatewayError
from proxy.wire.document import Document, InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_BODY_SECONDS: Final = 10.0


class Callbacks:
    """The attempts of this worker that decoders may call back for, by the id that an engine gives to a request."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[Document]] = {}

    @property
    def pending(self) -> int:
        """Attempts under way, called back or not."""
        return len(self._expected)

    @contextmanager
    def expected(self, engine_id: str) -> Iterator[asyncio.Future[Document]]:
        """Until the end of the block a decoder may call back; the future has what it says first."""
        callback = self._expected[engine_id] = asyncio.get_running_loop().create_future()
        try:
            yield callback
        finally:
            del self._expected[engine_id]

    async def take(self, request: web.Request) -> web.Response:
        """Answer a decoder at once: it has threads for 32 callbacks at a time, and looks at no answer.

        It posts up to three times when the connection fails: only the first time counts.
        """
        try:
            engine_id, params = _parse(await _read(request))
            callback = self._expected.get(engine_id)
            if callback is None:
                raise GatewayError("no request waits for this callback", code="unknown_request", status=404)
        except GatewayError as error:
            logger.info("refused a callback from %s: %s", request.remote, error.message)
            raise
        if not callback.done():
            callback.set_result(params)
        return web.json_response({"status": "ok"})


async def _read(request: web.Request) -> bytes:
    """The body, of which aiohttp takes no more than 1 MiB. Raises GatewayError.

    A callback names each block of the KV cache: a million tokens in blocks of 128 are 60 KB, in each group of layers.
    """
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise GatewayError("the body is longer than any callback", code="request_too_large", status=413) from None
    except TimeoutError:
        raise GatewayError("the body of the request did not arrive in time", code="slow_body", status=408) from None


def _parse(body: bytes) -> tuple[str, Document]:
    """The request's id in the engine, and the whole callback. Raises BadRequest.

    The id is 128 random bits that only engines are told before the answer begins, so a callback that has it is trusted
    about where the KV is to go. A prefiller looks `remote_cached_tokens` up without asking whether it is there: its
    engine would end.
    """
    try:
        params = Document(body)
    except InvalidDocument as error:
        raise BadRequest(str(error), code="invalid_json") from None
    engine_id, cached_tokens = params.values.get("request_id"), params.values.get("remote_cached_tokens")
    if not isinstance(engine_id, str) or params.values.get("do_remote_decode") is not True:
        raise BadRequest("this is not a decoder's callback")
    if type(cached_tokens) is not int or cached_tokens < 0:
        raise BadRequest("remote_cached_tokens must be a number of tokens", param="remote_cached_tokens")
    return engine_id, params
