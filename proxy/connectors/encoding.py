"""Encode first: every image, recording and clip of a chat goes to an encoder before another connector opens.

For vLLM with an EC connector (`--ec-transfer-config`): an encoder puts what it makes of an item into a cache in which
the other engines look it up by the item's hash. So nothing comes back but the end of the work, and the other legs get
the request as it is. Each item is a chat of its own without any text, answered with one token, as vLLM-Ascend's
disagg_epd_proxy.py sends it. One item that cannot be encoded fails the attempt. What has no media costs nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load
from proxy.common.errors import NoBackendAvailable
from proxy.connectors.base import Connector, new_attempt_id, prefill_seconds, refusal
from proxy.wire.openai import Api
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Attempt, Legs
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline

MEDIA: Final = frozenset({"image_url", "input_audio", "audio_url", "video_url"})
"""Members of the parts that an encoder works on: the type may be missing (vLLM `chat_utils.py`)."""

# Of the request, what else an item's hash depends on (vLLM `MultiModalHasher.hash_kwargs`): one that is encoded under
# another hash is not found.
_SHARED: Final = ("model", "mm_processor_kwargs", "media_io_kwargs")


_LOOK_AGAIN_SECONDS: Final = 0.02


class Encoding(Connector):
    """A connector in front of another one. Only media need its encoders, so they are not among its roles.

    Both connectors have one context, and so the same settings.
    """

    def __init__(self, connector: Connector, encoders: Pool, context: ConnectorContext) -> None:
        super().__init__(context)
        self._connector = connector
        self._encoders = encoders
        self._pools = context.pools
        self._upstream = context.upstream
        self.roles = connector.roles
        self.apis = connector.apis

    def check(self, call: Call) -> None:
        """Refuse calls that the other connector cannot serve."""
        self._connector.check(call)

    def splits(self, call: Call) -> bool:
        """The same as for the other connector."""
        return self._connector.splits(call)

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes of the other connector."""
        return self._connector.routes()

    def open(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """Encode if there is something to encode, then open. See Connector.open.

        An attempt that is repeated encodes again, as what it needs may have left the cache meanwhile.
        """
        items = media(call)
        if not items:
            return self._connector.open(call, request, timeline)
        return self._open_encoded(call, items, request, timeline)

    def alone(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt] | None:
        """The other connector's attempt, for calls without media. See Connector.alone."""
        return self._connector.alone(call, request, timeline)

    def legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """The legs of the other connector, where there is nothing to encode. See Connector.legs."""
        return None if media(call) else self._connector.legs(call, request, timeline)

    @asynccontextmanager
    async def _open_encoded(
        self,
        call: Call,
        items: Sequence[Mapping[str, Any]],
        request: PickRequest,
        timeline: Timeline,
    ) -> AsyncIterator[Attempt]:
        timeline.begin_encoding()
        # As admission waits for the others, but only what has media does.
        while self._encoders.is_restarting():  # noqa: ASYNC110 time alone may end it
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        # The room that admission saw is kept until the connector takes it, which it does before it waits for anything.
        with ExitStack() as room:
            for role in self.roles:
                with suppress(NoBackendAvailable):  # the lease fails then, unless an encoder is back
                    room.enter_context(self._pools.of(role).reserve(request))
            await self._encode(call, items, request.avoid)
            timeline.end_encoding()
        async with self._connector.open(call, request, timeline) as attempt:
            yield attempt

    async def _encode(self, call: Call, items: Sequence[Mapping[str, Any]], avoid: Collection[Backend]) -> None:
        """All items, a bounded number at a time; the first that fails ends the others, and its error is raised."""
        attempt_id = new_attempt_id()
        waiting = iter(enumerate(items))

        async def encode() -> None:
            for index, item in waiting:
                # The random part keeps one item of a repeated request from being the same request to an engine.
                request_id = f"{attempt_id}:{index}:{new_attempt_id()[:6]}"
                await self._encode_one(call, item, request_id, avoid)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._context.settings.fanout.concurrency, len(items))):
                    group.create_task(encode())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _encode_one(
        self, call: Call, item: Mapping[str, Any], request_id: str, avoid: Collection[Backend]
    ) -> None:
        """Raises NoBackendAvailable, UpstreamError."""
        cost = self._context.settings.cost
        tokens = cost.image_tokens if item.keys().isdisjoint(("input_audio", "audio_url")) else cost.audio_tokens
        body: dict[str, Any] = {name: call.values[name] for name in _SHARED if name in call.values}
        body |= {"messages": [{"role": "user", "content": [item]}], "max_tokens": 1, "stream": False}
        await self._wait_for_takers()
        with self._encoders.lease(PickRequest.of(Load(compute=max(1, tokens)), avoid=avoid)) as lease:
            response, answer = await self._upstream.fetch(
                lease.backend,
                Api.CHAT.path,
                dumps(body),
                {**call.headers, "x-request-id": request_id},
                answer_seconds=prefill_seconds(self._context.settings.timeouts, call),
                resend_if_stale=True,
            )
            if response.status != 200:
                raise refusal(response, answer)

    async def _wait_for_takers(self) -> None:
        """Wait while all encoders refuse requests, but not for longer than in the queue."""
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._context.settings.admission.wait_seconds
        while self._encoders.refuse_all() and loop.time() < waits_until:  # noqa: ASYNC110 time alone may end it
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def media(call: Call) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a chat that an encoder works on, in the order of the messages."""
    messages = call.values.get("messages") if call.api is Api.CHAT else None
    items: list[Mapping[str, Any]] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            items += [part for part in content if isinstance(part, dict) and not MEDIA.isdisjoint(part)]
    return items
