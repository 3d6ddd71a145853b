"""vLLM-Ascend's layerwise push: the decode leg goes first, and the prefiller pushes the KV cache to the decoder.

Used with MooncakeLayerwiseConnector. A decoder that has room for the KV cache posts its addresses to `/v1/metaserver`,
at the URL that came with the request. The posted members are the KV parameters of the prefill leg. The prefiller sends
the KV cache layer by layer as it computes it, and keeps nothing.

A decoder does not notice a failed prefill and would wait forever, so pdproxy closes its leg. Ids belong to one attempt
and are dropped with it, so a late callback is refused.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.common.errors import BadRequest, Failure, GatewayError, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import (
    ConnectorContext,
    PrefillAnswerBody,
    check_status,
    first_byte_timeout_seconds,
    new_attempt_id,
    parse_prefilled,
    prefill_timeout_seconds,
)
from proxy.connectors.concurrent import run_prefill_beside
from proxy.connectors.disaggregated import DisaggregatedConnector, make_prefill_body
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import Attempt
from proxy.upstream import make_upstream_error
from proxy.wire.document import Document, InvalidDocument
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline


logger = logging.getLogger(__name__)

_CALLBACK_PATH: Final = "/v1/metaserver"


class AscendLayerwise(DisaggregatedConnector):
    """Opens the decode leg, waits for the decoder's callback, and runs the prefill leg beside the decode leg."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        assert context.callback_url is not None, "decoders need an address to call back"
        self._pools = context.pools
        self.metaserver = context.callback_url + _CALLBACK_PATH
        """The URL that decoders call back."""
        self.callbacks = PrefillerCallbacks()

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the HTTP route of the decoders' callbacks."""
        logger.info("decoders call this worker back at %s", self.metaserver)
        return (web.post(_CALLBACK_PATH, self.callbacks.handle_callback),)

    @asynccontextmanager
    async def open_two_leg_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AsyncIterator[Attempt]:
        settings = self._context.live.settings
        attempt_id = new_attempt_id()
        headers = {**call.headers, "x-request-id": attempt_id}
        with (
            KvHandoff(self._context, call, request, timeline) as handoff,
            self._ranks.start_claim() as rank,
            self.callbacks.expect_callback(_engine_request_id(call, attempt_id)) as callback,
        ):
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            timeline.prefill_id = timeline.decode_id = attempt_id
            handoff.answers_after_transfer = True  # each layer is sent as soon as it is computed
            timeline.enter_stage(Stage.HANDOFF)
            async with run_prefill_beside(self._run_prefill(call, headers, callback, handoff, timeline)) as leg:
                # The status of a streamed answer may arrive at once, but nothing more before the callback and prefill.
                answer_seconds = (
                    settings.layerwise.callback_seconds
                    + prefill_timeout_seconds(settings.timeouts, call)
                    + first_byte_timeout_seconds(settings.timeouts, call)
                )
                params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": self.metaserver}
                opening = self._upstream.post_and_await_head(
                    decoder,
                    call.api.path,
                    call.make_body({"kv_transfer_params": {**params, **call.kv_params}}),
                    headers | rank.rank_header(decoder, settings.balance.decode_dp_ranks),
                    answer_seconds=answer_seconds,
                )
                with await leg.await_first_result(opening, lambda: handoff.is_settled) as response:
                    await check_status(response)
                    yield Attempt(
                        response,
                        timeline,
                        prefiller=prefiller,
                        has_kv_from_prefiller=True,
                        handoff=handoff,
                        first_token_seconds=answer_seconds,
                    )

    async def _run_prefill(
        self,
        call: Call,
        headers: dict[str, str],
        callback: asyncio.Future[Document],
        handoff: KvHandoff,
        timeline: Timeline,
    ) -> None:
        """Wait for the decoder's callback, then run the prefill leg.

        Raises UpstreamError if the decoder would get no KV.
        """
        try:
            params = await self._wait_for_callback(callback, handoff.decoder.backend)
            timeline.enter_stage(Stage.PREFILL)
            answer = await self._send_prefill_leg(call, headers, params, handoff.prefiller.backend)
        except UpstreamError:
            if handoff.is_settled:  # the decoder is at work and no longer needs the prefiller
                return
            raise
        prompt_counts = timeline.usage.add_prompt_usage(answer.read_usage)
        # When a prefiller answers it has sent the whole KV cache, and it keeps nothing.
        handoff.record_prefill(*prompt_counts)
        handoff.prefiller.release_kv()
        handoff.record_kv_held()
        if not handoff.is_settled:
            timeline.enter_stage(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)

    async def _wait_for_callback(self, callback: asyncio.Future[Document], decoder: Backend) -> Document:
        callback_seconds = self._context.live.settings.layerwise.callback_seconds
        try:
            async with asyncio.timeout(callback_seconds):
                return await callback
        except TimeoutError:
            message = f"did not call back within {callback_seconds:g} s"
            raise make_upstream_error(Failure.TIMEOUT, decoder, message) from None

    async def _send_prefill_leg(
        self, call: Call, headers: dict[str, str], params: Document, prefiller: Backend
    ) -> PrefillAnswerBody:
        settings = self._context.live.settings
        with self._ranks.start_claim() as rank:
            response, body = await self._upstream.post_and_read_body(
                prefiller,
                call.api.path,
                make_prefill_body(call, self._pools.prefill, prefiller, params.load()),
                headers | rank.rank_header(prefiller, settings.balance.prefill_dp_ranks),
                answer_seconds=prefill_timeout_seconds(settings.timeouts, call),
            )
        return parse_prefilled(response, body)


def _engine_request_id(call: Call, attempt_id: str) -> str:
    """Return the ID that the engine gives to a request (vLLM `_base_request_id`, plus a number for each prompt)."""
    return f"chatcmpl-{attempt_id}" if call.api is Api.CHAT else f"cmpl-{attempt_id}-0"


_callback_logger = logging.getLogger("proxy.connectors.callbacks")

_CALLBACK_BODY_SECONDS: Final = 10.0


class PrefillerCallbacks:
    """The attempts of this worker that wait for a decoder's callback. The key is the engine's ID of the request.

    A callback is answered at once and counts once. It is refused if no attempt waits for it, or if its content differs
    from a decoder's callback (MooncakeLayerwiseConnector.update_state_after_alloc). So the data of a stranger never
    reaches an engine.
    """

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[Document]] = {}

    @property
    def pending_count(self) -> int:
        """The number of attempts that expect a callback or have received it."""
        return len(self._expected)

    @contextmanager
    def expect_callback(self, engine_id: str) -> Iterator[asyncio.Future[Document]]:
        """Accept callbacks for a request until the end of the block. The first callback becomes the future's result."""
        callback = self._expected[engine_id] = asyncio.get_running_loop().create_future()
        try:
            yield callback
        finally:
            del self._expected[engine_id]

    async def handle_callback(self, request: web.Request) -> web.Response:
        """Answer a decoder's callback at once. A decoder makes up to 32 at a time, and does not read the answers.

        A decoder posts up to three times if the connection fails, and only the first callback counts.
        """
        try:
            engine_id, params = _parse_callback(await _read_callback_body(request))
            callback = self._expected.get(engine_id)
            if callback is None:
                raise GatewayError("no request waits for this callback", code="unknown_request", status=404)
        except GatewayError as error:
            _callback_logger.info("layerwise: refused a prefiller's callback: %s: %s", request.remote, error.message)
            raise
        if not callback.done():
            callback.set_result(params)
        return web.json_response({"status": "ok"})


async def _read_callback_body(request: web.Request) -> bytes:
    """Return the body of a decoder's callback, of at most 1 MiB. Raises GatewayError.

    A callback names each block of the KV cache: a million tokens in blocks of 128 are 60 KB, in each group of layers.
    """
    try:
        async with asyncio.timeout(_CALLBACK_BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise GatewayError(
            "the body is longer than the longest callback", code="request_too_large", status=413
        ) from None
    except TimeoutError:
        raise GatewayError("the body of the request did not arrive in time", code="slow_body", status=408) from None


def _parse_callback(body: bytes) -> tuple[str, Document]:
    """Return the engine's request ID in a decoder's callback, and the callback's body. Raises BadRequest.

    The ID is 128 random bits that only engines know before the answer begins. So the addresses in a callback with a
    valid ID are trusted. A prefiller crashes without `remote_cached_tokens`, so this member is checked here.
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
