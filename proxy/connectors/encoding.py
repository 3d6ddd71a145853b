"""Sends every image, recording and clip of a chat to an encoder before another connector opens its legs.

For vLLM with an EC connector (`--ec-transfer-config`). With ECExampleConnector an encoder stores its result in a shared
cache, where the other engines look it up by the item's hash. With ECCPUConnector (vLLM 0.30) an encoder keeps it and
names its place, by hash, as `ec_transfer_params` of its answer. The other legs get these parameters, without which the
engines encode the item again (vLLM `ec_connector/cpu/scheduler`, `_admit_item`).
With ECMooncakeConnector (vLLM 0.32) an encoder sends its result to the engine that the request names (`consumer_zmq`),
and both name the transfer (`ec_items`). That engine waits for it, and encodes nothing itself (`_prepare_push_spec` and
`ensure_cache_available` in `ec_connector/mooncake/scheduler.py`). So the prefiller is chosen before the media are
encoded. Its port is in its configuration, which vLLM reports in development mode only.
Each item is sent as a separate chat without text, answered with one token, as in vLLM-Ascend's disagg_epd_proxy.py. If
an item cannot be encoded, the attempt fails.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Backend, Load
from proxy.common.errors import NoBackendAvailable
from proxy.connectors.base import Connector, ConnectorContext, make_refusal, new_attempt_id, prefill_timeout_seconds
from proxy.wire.openai import Api
from proxy.wire.python_json import dumps, loads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from aiohttp import web

    from proxy.balancer.pool import Pool
    from proxy.connectors.legs import Attempt, Legs
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline

MEDIA_MEMBERS: Final = frozenset({"image_url", "input_audio", "audio_url", "video_url"})
"""Names of the members that hold media in a part of a message; `type` may be missing (vLLM `chat_utils.py`)."""

# Members of the request that an item's hash depends on (vLLM `MultiModalHasher.hash_kwargs`). An item that was encoded
# under another hash is not found.
_HASHED_MEMBERS: Final = ("model", "mm_processor_kwargs", "media_io_kwargs")


_ENCODER_POLL_SECONDS: Final = 0.02


class EncodingConnector(Connector):
    """Encodes the media of a call, then lets another connector serve the call. Both have the same context.

    Only requests with media need encoders, so readiness does not depend on them.
    """

    def __init__(self, connector: Connector, encoders: Pool, context: ConnectorContext) -> None:
        super().__init__(context)
        self._connector = connector
        self._encoders = encoders
        self._pools = context.pools
        self._upstream = context.upstream
        self.apis = connector.apis

    def check_call(self, call: Call) -> None:
        """Raise BadRequest for a call that the inner connector cannot serve."""
        self._connector.check_call(call)

    def splits_into_units(self, call: Call) -> bool:
        """Return the decision of the inner connector."""
        return self._connector.splits_into_units(call)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the HTTP routes of the connector that serves the encoded calls."""
        return self._connector.routes()

    def open_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Encode the media of a call, then open the attempt of the inner connector.

        Each attempt encodes again, because the cache may have lost items since the previous attempt.
        """
        items = find_media_parts(call)
        if not items:
            return self._connector.open_attempt(call, request, timeline)
        return self._open_encoded_attempt(call, items, request, timeline)

    def open_decoder_only_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt] | None:
        """Return the inner connector's attempt without a prefiller. The call must have no media."""
        return self._connector.open_decoder_only_attempt(call, request, timeline)

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """Return the legs of the inner connector; None for a call with media, which needs a task."""
        return None if find_media_parts(call) else self._connector.make_legs(call, request, timeline)

    @asynccontextmanager
    async def _open_encoded_attempt(
        self,
        call: Call,
        items: Sequence[Mapping[str, Any]],
        request: PickRequest,
        timeline: Timeline,
    ) -> AsyncIterator[Attempt]:
        timeline.begin_encoding_attempt()
        # Admission does not wait for encoders, because only requests with media need them.
        while self._encoders.are_all_restarting():  # noqa: ASYNC110 time alone may end it
            await asyncio.sleep(_ENCODER_POLL_SECONDS)
        # Reserve the room that admission found. The connector takes it before it waits for anything.
        with ExitStack() as room:
            reserved: list[Backend] = []
            for role in self.roles:
                with suppress(NoBackendAvailable):  # if there is still none later, the lease fails
                    reserved.append(room.enter_context(self._pools.pool_of(role).make_reservation(request)).backend)
            address = None
            for backend in reserved:
                if (address := self._receiving_address(backend)) is not None:
                    request = replace(request, preferred_backend=backend)  # it must get the request, too
                    break
            places = await self._encode_media(call, items, request.avoided_backends, address)
            timeline.end_encoding()
        if places:
            call = call.copy_with_changes({"ec_transfer_params": places})
        async with self._connector.open_attempt(call, request, timeline) as attempt:
            yield attempt

    def _receiving_address(self, backend: Backend) -> str | None:
        """Return the address at which an engine with ECMooncakeConnector receives encoded media."""
        facts = self._pools.pool_of(backend.role).health.health_of(backend).engine_facts
        setup = None if facts is None else facts.identity.engine_setup
        if setup is None or setup.ec_connector != "ECMooncakeConnector" or setup.ec_port is None:
            return None
        return f"tcp://{backend.name.rpartition(':')[0]}:{setup.ec_port}"

    async def _encode_media(
        self, call: Call, items: Sequence[Mapping[str, Any]], avoid: Collection[Backend], receiver: str | None
    ) -> dict[str, object]:
        """Encode all items, a limited number at a time. Return the parameters by which engines find the results.

        These are the places of the results by hash, or the transfers to the `receiver`. The first failure cancels the
        others and is raised.
        """
        attempt_id = new_attempt_id()
        places: dict[str, object] = {}
        transfers = [f"{attempt_id}:{index}" for index in range(len(items))]
        waiting = iter(enumerate(items))

        async def encode() -> None:
            for index, item in waiting:
                # The random part makes the ids of a repeated request different for engines.
                request_id = f"{attempt_id}:{index}:{new_attempt_id()[:6]}"
                target = {} if receiver is None else _target(receiver, transfers[index : index + 1])
                places.update(await self._encode_medium(call, item, request_id, avoid, target))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._context.live.settings.fanout.concurrency, len(items))):
                    group.create_task(encode())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return places if receiver is None else _items(transfers)

    async def _encode_medium(
        self,
        call: Call,
        item: Mapping[str, Any],
        request_id: str,
        avoid: Collection[Backend],
        target: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Encode one image, recording or clip. Return the place of the result by hash; empty if engines share a cache.

        `target`: the encoder sends the result there; empty: it does not. Raises NoBackendAvailable, UpstreamError.
        """
        cost = self._context.live.settings.cost
        tokens = cost.image_tokens if item.keys().isdisjoint(("input_audio", "audio_url")) else cost.audio_tokens
        body: dict[str, Any] = {name: call.values[name] for name in _HASHED_MEMBERS if name in call.values}
        body |= {"messages": [{"role": "user", "content": [item]}], "max_tokens": 1, "stream": False}
        if target:
            body["ec_transfer_params"] = target
        await self._wait_for_encoders()
        with self._encoders.make_lease(
            PickRequest.make_for_load(Load(compute_tokens=max(1, tokens)), avoided_backends=avoid)
        ) as lease:
            response, answer = await self._upstream.post_and_read_body(
                lease.backend,
                Api.CHAT.path,
                dumps(body),
                {**call.headers, "x-request-id": request_id},
                answer_seconds=prefill_timeout_seconds(self._context.live.settings.timeouts, call),
                resend_if_stale=True,
            )
            if response.status != 200:
                raise make_refusal(response, answer)
        return _read_encoder_places(answer)

    async def _wait_for_encoders(self) -> None:
        """Wait while all encoders reject requests, for at most `admission.wait_seconds`."""
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._context.live.settings.admission.wait_seconds
        while self._encoders.do_all_refuse() and loop.time() < waits_until:  # noqa: ASYNC110 time alone may end it
            await asyncio.sleep(_ENCODER_POLL_SECONDS)


def _items(transfers: Sequence[str]) -> dict[str, object]:
    """Return the parameters that name the transfers of a request's items, in their order."""
    return {"ec_items": [{"transfer_id": transfer} for transfer in transfers]}


def _target(receiver: str, transfers: Sequence[str]) -> dict[str, object]:
    """Return the parameters by which an encoder sends its results to this address."""
    return {"consumer_zmq": receiver, **_items(transfers)}


def _read_encoder_places(answer: bytes) -> Mapping[str, object]:
    """Return the `ec_transfer_params` of an encoder's answer; empty if there are none."""
    try:
        places = loads(answer)["ec_transfer_params"]
    except (ValueError, LookupError, TypeError):  # the token is not used, so an odd answer is no failure
        return {}
    return places if isinstance(places, dict) else {}


def find_media_parts(call: Call) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a chat's messages that an encoder must encode, in the order of the messages."""
    messages = call.values.get("messages") if call.api is Api.CHAT else None
    items: list[Mapping[str, Any]] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            items += [part for part in content if isinstance(part, dict) and not MEDIA_MEMBERS.isdisjoint(part)]
    return items
